// One head as a large map of weights or logits, with what is known of the pair under the crosshair.

import { scales } from "../common/colours.js";
import { Choice } from "../common/controls.js";
import { Heatmap } from "../common/heatmap.js";
import { ColourBar } from "../common/maps.js";
import { html, useMemo, useState } from "../common/preact.js";
import { roundedUp, withError } from "./attention.js";
import { HeadChoice, inContext, masked } from "./heads.js";
import { Neurons } from "./neurons.js";

export function MapView({ attention, state, set }) {
  const [hovered, setHovered] = useState(null);
  const { layer, head } = state;
  const { rows, columns } = attention;
  const pinned = state.cell && state.cell.i < rows && state.cell.j < columns ? state.cell : null;
  const at = hovered ?? pinned;
  const isLogits = state.values === "logits";
  const range = useMemo(
    () => (isLogits ? logitRange(attention, layer, head) : null),
    [attention, layer, head, isLogits],
  );
  const scale = isLogits
    ? scales.signed(range.reach, [-range.reach, -range.reach / 2, 0, range.reach / 2, range.reach])
    : scales.weights;
  return html`<${HeadChoice} ...${{ attention, state, set }} />
    <p>
      Each cell is the ${isLogits ? "logit" : "attention weight"} of a pair: its row is the query, the token that reads;
      its column is the key, the token that is read. The bars show from which dimensions the logit comes.
    </p>
    <div class="controls">
      <${Choice}
        id="show"
        name="show"
        options=${["weights", "logits"]}
        value=${state.values}
        onChoose=${(values) => set({ values })} />
      <${ColourBar}
        scale=${scale}
        name=${isLogits ? "logit" : "attention weight"}
        format=${(tick) => (isLogits ? tick.toFixed(1) : String(tick))}
        masked=${masked(attention)} />
      ${
        isLogits &&
        html`<span class="soft small" id="range"
          >logits from ${range.least.toFixed(1)} to ${range.most.toFixed(1)}; a logit that is more than${" "}
          ${attention.floor} below the largest of its row is shown as ${attention.floor} below it</span
        >`
      }
      ${attention.alignment && html`<span class="soft small" id="legend"><i class="frame"></i> true alignment</span>`}
    </div>
    <output id="pointed"
      >${
        at
          ? html`<${Pair} ...${{ attention, layer, head, at }} />`
          : html`<span class="soft">Point at a cell, or click or tap: its weight and its logit are shown here.</span>`
      }</output
    >
    <div class="map-and-neurons">
      <${Heatmap}
        id="map"
        name=${`Attention ${isLogits ? "logits" : "weights"} of layer ${layer}, head ${head}`}
        ...${{ rows, columns, scale, at, pinned }}
        deps=${[attention, layer, head, isLogits]}
        makeValueAt=${() => (isLogits ? attention.logitsAt(layer, head) : attention.weightsAt(layer, head))}
        rowLabels=${attention.rowLabels}
        columnLabels=${attention.columnLabels}
        rowName="query"
        columnName="key"
        frames=${attention.alignment ?? []}
        onPoint=${setHovered}
        onPin=${(cell) => set({ cell })} />
      <${Neurons} ...${{ attention, layer, head, at: at ?? opening(attention, layer, head) }} />
    </div>
    <p class="soft small">
      All numbers of this head, to change by hand:${" "}
      <code id="lab-command">python -m mini_gpt.lab --workdir=RUN --head=${layer}.${head}</code>
    </p>
    <p class="soft small" id="precision">${errorOf(attention)}</p>`;
}

// The pair of the neuron view before the reader has chosen one: the typical query and the key that it reads the most.
const opening = (attention, layer, head) => ({
  i: attention.opening("query", layer, head),
  j: attention.opening("key", layer, head),
});

function logitRange(attention, layer, head) {
  const logitAt = attention.logitsAt(layer, head);
  let [least, most] = [Infinity, -Infinity];
  for (let i = 0; i < attention.rows; i++)
    for (let j = 0; j < attention.seen(i); j++) {
      const logit = logitAt(i, j);
      if (logit !== null) {
        least = Math.min(least, logit);
        most = Math.max(most, logit);
      }
    }
  return { least, most, reach: Math.max(Math.abs(least), Math.abs(most)) || 1 };
}

function errorOf({ steps, error, others, kept, block }) {
  const sentences = [
    `Weights are computed from logits quantised in ${steps} steps; the error of a weight is at most`,
    `${roundedUp(error)} (±), and in most cells far less.`,
    "The error of a logit grows with its distance from the largest of its row.",
  ];
  if (others) {
    sentences.push(`These errors hold for the ${kept} largest weights of each query;`);
    sentences.push(`all others are shown as the mean of their block of ${block} keys.`);
  }
  return sentences.join(" ");
}

// Query, key, logit and weight of a pair.
function Pair({ attention, layer, head, at: { i, j } }) {
  const logit = attention.logitsAt(layer, head)(i, j);
  const weight = attention.weights(layer, head)[i * attention.columns + j];
  const distance = !attention.isCross
    ? html` <span class="soft"
        >${
          i === j
            ? "the same token"
            : `${Math.abs(i - j)} token${Math.abs(i - j) > 1 ? "s" : ""} ${j < i ? "earlier" : "later"}`
        }</span
      >`
    : "";
  const numbers = () => {
    if (logit === null) return "masked: the query cannot see the key";
    if (attention.isMean(layer, head, i, j)) {
      const block = Math.floor(j / attention.block) * attention.block;
      const end = Math.min(block + attention.block, attention.columns) - 1;
      const most = attention.leastOwn(layer, head, i).toFixed(4);
      const others = `the mean of such keys from ${block} to ${end} is ${weight.toFixed(4)}`;
      return `weight at most ${most}: not one of the query's ${attention.kept} largest; ${others}`;
    }
    const shownLogit = attention.cut(layer, head, i, j)
      ? `at most ${logit.toFixed(1)}`
      : withError(logit, attention.logitError(layer, head, i, j));
    return `weight ${withError(weight, attention.error)}   logit ${shownLogit}`;
  };
  return html`<span class="line"><b>query ${i}</b> ${inContext(attention.tokens, i)}</span
    ><span class="line"><b>key ${j}</b> ${inContext(attention.keys, j)}${distance}</span
    ><span class="line" id="numbers">${numbers()}</span>`;
}

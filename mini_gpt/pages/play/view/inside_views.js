// Views of what the model computes: attention, the logit lens, losses and norms by place.

import { colourOf, scales, shadeStyle, textOn } from "../../common/colours.js";
import { Choice, LayerAndHead } from "../../common/controls.js";
import { Heatmap } from "../../common/heatmap.js";
import { ColourBar, PixelMap } from "../../common/maps.js";
import { clamped, multiples, roundStep } from "../../common/numbers.js";
import { html, useLayoutEffect, useRef, useState } from "../../common/preact.js";
import { useDark } from "../../common/theme.js";
import { FlowingText, shown } from "../../common/tokens.js";
import { labelOf, percent } from "./next_card.js";
import { indexOfLargest } from "./results.js";
import { keptHead } from "./state.js";

export const Waiting = () => html`<p class="soft" role="status">Computing …</p>`;

function HeadPickers({ facts, state, set }) {
  const choose = ({ layer = state.layer, head = state.head }) => set({ layer, head: keptHead(facts, layer, head) });
  return html`<div class="controls">
    <${LayerAndHead} layers=${facts.layers} heads=${facts.kept[state.layer]} ...${{ state, set: choose }} />
  </div>`;
}

// What a token attends to, in the text itself.
export function AttentionView({ facts, state, set, result, maps, texts, place, onPoint }) {
  const length = result.edited.length;
  const row = maps && place < length ? maps.weights.subarray(place * length, (place + 1) * length) : null;
  return html`<${HeadPickers} ...${{ facts, state, set }} />
    ${
      maps
        ? html`<p class="soft">
            The stronger a token's colour, the more attention “${shown(texts[place] ?? "")}” pays to it in this head.
            Point at another token, or click on it to pin it.
          </p>`
        : html`<${Waiting} />`
    }
    <${ColourBar} scale=${scales.weights} name="attention weight" />
    <${FlowingText}
      id="flow"
      tokens=${texts}
      name="Tokens, shaded by the attention weight"
      pinned=${state.pin}
      markOf=${(n) => (n === place && state.pin === null ? "pointed" : "")}
      styleOf=${(n) => (row ? shadeStyle(scales.weights, row[n] ?? 0) : "")}
      titleOf=${(n) => (row ? `weight ${(row[n] ?? 0).toFixed(3)}` : "")}
      onPoint=${onPoint}
      onPin=${(pin) => set({ pin })} />`;
}

export function MapView({ facts, state, set, result, maps, texts, place }) {
  const length = result.edited.length;
  const [hovered, setHovered] = useState(null);
  const [chosen, setChosen] = useState(null);
  // A chosen cell counts until another place is chosen elsewhere: then the key that this token reads the most is
  // marked. A cell can be beyond a text that was made shorter.
  const isInside = (cell) => cell !== null && cell.i < length && cell.j < length;
  if (!maps) return html`<${HeadPickers} ...${{ facts, state, set }} /><${Waiting} />`;
  const mostRead = indexOfLargest(maps.weights, place * length, (place + 1) * length);
  const pinned = isInside(chosen) && chosen.i === state.pin ? chosen : null;
  const shownAt = [hovered, pinned, { i: place, j: mostRead ?? place }].find(isInside) ?? null;
  const values = state.logits ? maps.logits : maps.weights;
  let reach = 0.01;
  if (state.logits)
    for (const logit of maps.logits) if (Number.isFinite(logit)) reach = Math.max(reach, Math.abs(logit));
  const scale = state.logits ? scales.signed(Number(reach.toPrecision(2))) : scales.weights;
  const valueAt = (i, j) => (maps.logits[i * length + j] === -Infinity ? null : values[i * length + j]);
  const axis = texts.slice(0, length).map(shown);
  const cell = shownAt && shownAt.i * length + shownAt.j;
  const said =
    shownAt &&
    `query ${shownAt.i} “${axis[shownAt.i]}”, key ${shownAt.j} “${axis[shownAt.j]}”: ` +
      (valueAt(shownAt.i, shownAt.j) === null
        ? "masked"
        : `logit ${maps.logits[cell].toFixed(2)}, weight ${maps.weights[cell].toFixed(4)}`);
  return html`<${HeadPickers} ...${{ facts, state, set }} />
    <p class="soft">
      Each row is a token, the query; its columns show how much attention it pays to each token, the key, in this head.
    </p>
    <div class="controls">
      <${Choice}
        id="show"
        name="show"
        options=${["weights", "logits"]}
        value=${state.logits ? "logits" : "weights"}
        onChoose=${(value) => set({ logits: value === "logits" })} />
      <${ColourBar}
        scale=${scale}
        name=${state.logits ? "attention logit" : "attention weight"}
        masked="masked"
        format=${(v) => +v.toFixed(2)} />
    </div>
    <output id="pointed">${said || "Point at a cell of the map."}</output>
    <${Heatmap}
      id="attention-map"
      name=${`Attention of head ${state.layer}.${state.head}`}
      rows=${length}
      columns=${length}
      makeValueAt=${() => valueAt}
      scale=${scale}
      deps=${[maps, state.logits]}
      rowLabels=${axis}
      columnLabels=${axis}
      rowName="query"
      columnName="key"
      at=${shownAt}
      pinned=${pinned}
      onPoint=${setHovered}
      onPin=${(cell) => {
        setHovered(null);
        setChosen(cell);
        set({ pin: cell ? cell.i : null });
      }}
      most=${620} />`;
}

const LENS_COLUMNS = 14; // places in the table, which scrolls sideways

// What the model would predict if it ended after each layer.
export function LensView({ result, texts, tokenizer, place, set }) {
  const { lens, length, layers } = result.edited;
  const box = useRef();
  useDark();
  // Bring the place into view.
  useLayoutEffect(() => {
    const here = box.current?.querySelector(".here");
    if (here)
      box.current.scrollLeft += here.getBoundingClientRect().right - box.current.getBoundingClientRect().right + 6;
  }, [place, lens]);
  if (!lens) return html`<${Waiting} />`;
  const last = Math.min(length - 1, Math.max(place, LENS_COLUMNS - 1));
  const first = Math.max(0, last - LENS_COLUMNS + 1);
  const scale = scales.linear(0, 1);
  const places = Array.from({ length: last - first + 1 }, (_, n) => first + n);
  const cell = (layer, n) => {
    const from = (layer * length + n) * lens.top;
    const next = n + 1 < texts.length ? result.edited.tokens[n + 1] : null;
    const likely = Array.from(
      { length: lens.top },
      (_, k) => `${labelOf(tokenizer, lens.tokens[from + k])} ${percent(lens.probabilities[from + k])}`,
    );
    return html`<td
      class=${lens.tokens[from] === next ? "actual" : ""}
      style=${textOn(colourOf(scale, lens.probabilities[from]))}
      title=${likely.join(", ")}
      data-layer=${layer}
      data-place=${n}>
      ${labelOf(tokenizer, lens.tokens[from])}
    </td>`;
  };
  return html`<p class="soft">
      Each column is a token of the text. Each cell is the most likely next token if the model ended after that layer;
      the stronger its colour, the higher its probability. A cell is underlined if this token does follow in the text.
    </p>
    <div class="scroll" ref=${box} tabindex="0" role="region" aria-label="Logit lens">
      <table class="lens">
        <thead>
          <tr>
            <th scope="col">after</th>
            ${places.map(
              (n) =>
                html`<th scope="col">
                  <button
                    class=${n === place ? "here" : ""}
                    aria-pressed=${n === place ? "true" : "false"}
                    onClick=${() => set({ pin: n })}
                    title=${`place ${n}`}>
                    ${shown(texts[n])}
                  </button>
                </th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${Array.from(
            { length: layers },
            (_, layer) =>
              html`<tr>
                <th scope="row">layer ${layer}</th>
                ${places.map((n) => cell(layer, n))}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <${ColourBar} scale=${scale} name="probability" />`;
}

// Norms of the residual stream, by layer and place.
export function StreamView({ result, texts, place, set }) {
  const { norms, length, layers } = result.edited;
  let most = 1e-9;
  for (const norm of norms) if (Number.isFinite(norm)) most = Math.max(most, norm);
  const ceiling = Number(most.toPrecision(2));
  const scale = scales.linear(0, ceiling, [0, ceiling / 2, ceiling]);
  const stages = Array.from({ length: layers + 1 }, (_, n) => n);
  const nameOf = (stage) => (stage ? `after layer ${stage - 1}` : "input");
  const ticks = multiples(roundStep(Math.max(1, length / 6)), 0, length - 1);
  const mean = (stage) => {
    let sum = 0;
    for (let n = 0; n < length; n++) sum += norms[stage * length + n];
    return sum / length;
  };
  const pin = (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    set({ pin: clamped(Math.floor(((event.clientX - left) / width) * length), 0, length - 1) });
  };
  const row = (stage) =>
    html`<tr key=${stage}>
      <th scope="row">${nameOf(stage)}</th>
      <td class="strip" onClick=${pin}>
        <${PixelMap}
          rows=${1}
          columns=${length}
          makeValueAt=${() => (_, j) => norms[stage * length + j]}
          scale=${scale}
          deps=${[result.edited, ceiling]}
          name=${`Norms ${nameOf(stage)}, by place`}
          style="width:100%;height:30px" />
        <i class="mark" style=${`left:${(100 * place) / length}%;width:${100 / length}%`}></i>
      </td>
      <td class="numbers">${mean(stage).toFixed(1)}</td>
      <td class="numbers" data-norm=${stage}>${norms[stage * length + place]?.toFixed(1)}</td>
    </tr>`;
  return html`<p class="soft">
      The L2 norm of the residual stream at each token, before the first layer (input) and after each layer; numbers
      above are places in the text.
    </p>
    <table class="strips">
      <thead>
        <tr>
          <th scope="col">stream</th>
          <th scope="col" class="places">
            ${ticks.map((n) => html`<span key=${n} style=${`left:${(100 * (n + 0.5)) / length}%`}>${n}</span>`)}
          </th>
          <th scope="col">mean</th>
          <th scope="col">at “${shown(texts[place] ?? "")}”</th>
        </tr>
      </thead>
      <tbody>
        ${stages.map(row)}
      </tbody>
    </table>
    <${ColourBar} scale=${scale} name="L2 norm" format=${(v) => +v.toPrecision(3)} />`;
}

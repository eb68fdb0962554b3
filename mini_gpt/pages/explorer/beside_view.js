// Maps of several heads side by side, with the names of the tokens.

import { scales } from "../common/colours.js";
import { Choice } from "../common/controls.js";
import { ColourBar, Frames, PixelMap } from "../common/maps.js";
import { clamped, indices } from "../common/numbers.js";
import { html, useMemo, useState } from "../common/preact.js";
import { headsOf, inContext, labelOf, masked } from "./heads.js";
import { PartSlider, partOf } from "./lines_view.js";

const MOST_BESIDE = 24; // tokens of a map
const SIX = 6; // heads

// Six heads as [layer, head]: the strongest of each label, then the strongest of the others; without labels, the first.
function sixHeads(attention) {
  const all = indices(attention.layers).flatMap((layer) => headsOf(attention, layer).map((head) => [layer, head]));
  const label = (place) => labelOf(attention, ...place);
  const strength = (place) => label(place)?.strength ?? -1;
  const sorted = [...all].sort((a, b) => strength(b) - strength(a));
  const isFirst = (place, n) => sorted.findIndex((other) => label(other)?.name === label(place)?.name) === n;
  const chosen = [...sorted.filter(isFirst), ...sorted.filter((place, n) => !isFirst(place, n))].slice(0, SIX);
  return chosen.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

export function BesideView({ attention, state, set }) {
  const [at, point] = useState(null);
  const isLayer = state.beside === "layer";
  const heads = useMemo(
    () => (isLayer ? headsOf(attention, state.layer).map((head) => [state.layer, head]) : sixHeads(attention)),
    [attention, isLayer, state.layer],
  );
  const [firstRow, endRow] = partOf(attention.rows, state.from, MOST_BESIDE);
  const [firstKey, endKey] = partOf(attention.columns, state.from, MOST_BESIDE);
  const part = { firstRow, firstKey, rows: endRow - firstRow, columns: endKey - firstKey };
  const shownAt = at && at.i < endRow && at.j < endKey ? at : null;
  return html`<p>
      Queries, the tokens that read, are downwards; keys, the tokens that they read, across. Point at a cell to compare
      its weight in all heads. Choose a title to open the head
      alone.${!isLayer && attention.labels && " The six are the strongest head of each label, then the next strongest."}
    </p>
    <div class="controls">
      <${Choice}
        id="beside"
        name="heads"
        options=${[
          ["six", "six heads"],
          ["layer", "all of a layer"],
        ]}
        value=${state.beside}
        onChoose=${(beside) => set({ beside })} />
      ${
        isLayer &&
        html`<${Choice}
          id="layer"
          name="layer"
          options=${indices(attention.layers)}
          value=${state.layer}
          onChoose=${(layer) => set({ layer })} />`
      }
      <${PartSlider} ...${{ attention, state, set, most: MOST_BESIDE }} />
      <${ColourBar} scale=${scales.weights} name="attention weight" masked=${masked(attention)} />
    </div>
    <p id="beside-pair" class="small">
      ${
        shownAt
          ? html`query ${shownAt.i} ${inContext(attention.tokens, shownAt.i)}, key ${shownAt.j}${" "}
            ${inContext(attention.keys, shownAt.j)}`
          : html`<span class="soft">Point at a cell.</span>`
      }
    </p>
    <div class="beside">
      ${heads.map(([layer, head]) => {
        const label = labelOf(attention, layer, head);
        const weight = shownAt && attention.weightsAt(layer, head)(shownAt.i, shownAt.j);
        return html`<section key=${`${layer}.${head}`} id=${`beside-${layer}-${head}`}>
          <h2>
            <button onClick=${() => set({ layer, head, tab: "Map" })}>${layer}.${head}</button>${" "}
            <span class="soft small">${label && `${label.name} ${label.strength?.toFixed(2) ?? ""}`}</span>
            <b class="weight">${shownAt && (weight === null ? "masked" : weight.toFixed(3))}</b>
          </h2>
          <${NamedMap} ...${{ attention, layer, head, part, at: shownAt, point }} />
        </section>`;
      })}
    </div>`;
}

// A map of a part of a text, with a name for each token.
function NamedMap({ attention, layer, head, part: { firstRow, firstKey, rows, columns }, at, point }) {
  const names = (labels, first, count) => indices(count).map((n) => html`<span key=${n}>${labels[first + n]}</span>`);
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const place = (along, size, count) => clamped(Math.floor((along / size) * count), 0, count - 1);
    point({
      i: firstRow + place(event.clientY - box.top, box.height, rows),
      j: firstKey + place(event.clientX - box.left, box.width, columns),
    });
  };
  const frame = at && [at.j - firstKey, at.j - firstKey + 1, at.i - firstRow, at.i - firstRow + 1];
  return html`<div class="named-map" style=${`--rows:${rows};--columns:${columns}`}>
    <span></span>
    <div class="across" aria-hidden="true">${names(attention.columnLabels, firstKey, columns)}</div>
    <div class="down" aria-hidden="true">${names(attention.rowLabels, firstRow, rows)}</div>
    <div class="cells" onPointerMove=${move} onPointerDown=${move} onPointerLeave=${() => point(null)}>
      <${PixelMap}
        ...${{ rows, columns }}
        makeValueAt=${() => {
          const weightAt = attention.weightsAt(layer, head);
          return (i, j) => weightAt(firstRow + i, firstKey + j);
        }}
        scale=${scales.weights}
        deps=${[attention, layer, head, firstRow, firstKey]}
        name=${`layer ${layer}, head ${head}, with the names of ${rows} queries and ${columns} keys`}
        style=${`aspect-ratio:${columns}/${rows}`} />
      ${at && html`<${Frames} ...${{ rows, columns, names: ["line"] }} frames=${[frame]} />`}
    </div>
  </div>`;
}

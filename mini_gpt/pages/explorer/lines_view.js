// One head as lines: the queries on the left, the keys on the right, a line for each weight.

import { scales, shadeStyle } from "../common/colours.js";
import { Slider } from "../common/controls.js";
import { clamped, indices } from "../common/numbers.js";
import { html, useState } from "../common/preact.js";
import { HeadChoice } from "./heads.js";

const MOST_LINES = 32; // tokens on each side
const FAINTEST = 0.02; // the smallest weight with a line
const lineHeight = () => (matchMedia("(pointer: coarse)").matches ? 40 : 24); // pixels of a token

// The part of a text that is shown, [first, end].
export const partOf = (count, from, most) => {
  const first = clamped(from, 0, Math.max(0, count - most));
  return [first, Math.min(count, first + most)];
};

// Which part of the text is shown, if it is longer than that.
export const PartSlider = ({ attention, state, set, most }) =>
  attention.longest > most &&
  html`<${Slider}
    id="from"
    name="from token"
    min=${0}
    max=${attention.longest - most}
    step=${1}
    value=${Math.min(state.from, attention.longest - most)}
    onChange=${(from) => set({ from })} />`;

export function LinesView({ attention, state, set }) {
  const [hovered, point] = useState(null);
  const { layer, head } = state;
  const [firstRow, endRow] = partOf(attention.rows, state.from, MOST_LINES);
  const [firstKey, endKey] = partOf(attention.columns, state.from, MOST_LINES);
  const rows = indices(endRow - firstRow).map((n) => firstRow + n);
  const keys = indices(endKey - firstKey).map((n) => firstKey + n);
  const pinned = state.side === "query" && rows.includes(state.pin) ? state.pin : null;
  const marked = hovered ?? pinned;
  const weightAt = attention.weightsAt(layer, head);
  const each = lineHeight();
  const height = each * Math.max(rows.length, keys.length);
  const middle = (n, first) => each * (n - first + 0.5);
  const lines = rows.flatMap((i) =>
    marked === null || marked === i
      ? keys.flatMap((j) => {
          const weight = weightAt(i, j);
          return weight === null || weight < FAINTEST ? [] : [{ i, j, weight }];
        })
      : [],
  );
  const total = marked === null ? null : keys.reduce((sum, j) => sum + (weightAt(marked, j) ?? 0), 0);
  return html`<${HeadChoice} ...${{ attention, state, set }} />
    <p>
      A line goes from each query, the token that reads, to the keys that it reads. A wide and strong line is a large
      weight; weights below ${FAINTEST} have no line. Point at a query to see its lines alone, click it to keep them.
    </p>
    <div class="controls"><${PartSlider} ...${{ attention, state, set, most: MOST_LINES }} /></div>
    <div class="head-lines" id="lines" style=${`--row:${each}px`}>
      <b>query</b><span></span><b>key</b>
      <div role="group" aria-label="queries">
        ${rows.map(
          (i) =>
            html`<button
              id=${`line-${i}`}
              key=${i}
              aria-pressed=${pinned === i ? "true" : "false"}
              class=${marked === i ? "marked" : ""}
              onClick=${() => set({ pin: pinned === i ? null : i, side: "query" })}
              onPointerEnter=${(event) => event.pointerType === "mouse" && point(i)}
              onPointerLeave=${() => point(null)}>
              <i>${i}</i> ${attention.rowLabels[i]}
            </button>`,
        )}
      </div>
      <svg
        viewBox=${`0 0 100 ${height}`}
        style=${`height:${height}px`}
        preserveAspectRatio="none"
        role="img"
        aria-label=${`${lines.length} weights of layer ${layer}, head ${head} as lines`}>
        ${lines.map(
          ({ i, j, weight }) =>
            html`<line
              x1="0"
              y1=${middle(i, firstRow)}
              x2="100"
              y2=${middle(j, firstKey)}
              stroke-width=${0.5 + 6 * weight}
              stroke-opacity=${Math.min(1, 0.1 + weight)}
              data-pair=${`${i},${j}`}
              data-weight=${weight} />`,
        )}
      </svg>
      <div role="group" aria-label="keys">
        ${keys.map((j) => {
          const weight = marked === null ? null : weightAt(marked, j);
          return html`<span key=${j} style=${weight === null ? "" : shadeStyle(scales.weights, weight)}
            ><i>${j}</i> ${attention.columnLabels[j]}${
              weight !== null && weight >= FAINTEST && html`<small> ${weight.toFixed(2)}</small>`
            }</span
          >`;
        })}
      </div>
    </div>
    <p class="soft small" id="lines-total">
      ${
        total === null
          ? `${rows.length} of ${attention.rows} queries and ${keys.length} of ${attention.columns} keys are shown.`
          : `The keys that are shown have ${total.toFixed(2)} of the weight of query ${marked}.`
      }
    </p>`;
}

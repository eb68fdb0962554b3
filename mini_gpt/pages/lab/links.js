// What a head attends to: its words twice, queries above and keys below, with a line for each weight.

import { colourOf, seriesColour, textOn } from "../common/colours.js";
import { html } from "../common/preact.js";
import { useDark } from "../common/theme.js";
import { named } from "./matrices.js";
import { SCALES } from "./matrix.js";
import { number } from "./terms.js";

const FAINTEST = 0.02; // the smallest weight that gets a line
export const CLEAR = 1.5; // a weight of a clear key is larger than this multiple of an even spread

// The key with the largest weight of each query, and whether it is clearly above an even spread.
export function strongest(weights) {
  return weights.map((row) => {
    const most = Math.max(...row);
    const seen = row.filter((weight) => weight > 0).length;
    const keys = row.flatMap((weight, j) => (weight > most - 0.005 ? [j] : []));
    return { keys, weight: most, isClear: seen === 1 || most * seen > CLEAR };
  });
}

// As text: "sat 0.77"; "The and the 0.38 each".
export const keysInWords = ({ keys, weight }, words) =>
  `${keys.map((j) => words[j]).join(" and ")} ${number(weight)}${keys.length > 1 ? " each" : ""}`;

// As text: "cat → sat 0.77, sat → cat 0.74; no clear key: The, on".
function inWords(weights, words) {
  const found = strongest(weights);
  const names = named(words);
  const even = names.filter((_, i) => !found[i].isClear);
  const clear = found.flatMap((keys, i) => (keys.isClear ? [`${names[i]} → ${keysInWords(keys, names)}`] : []));
  return [clear.join(", "), even.length ? `no clear key: ${even.join(", ")}` : ""].filter(Boolean).join("; ");
}

// pinned: the index of a word whose lines alone are shown, or null. onPin(index or null).
export function Links({ head, n, words, pinned, onPin, name }) {
  const count = words.length;
  const shown = (i) => pinned === null || pinned === i;
  useDark();
  return html`<div class="links" style=${`--count:${count};--head:${seriesColour(n)}`}>
    <span class="side" aria-hidden="true">query</span>
    <div class="words" role="group" aria-label=${`${name}: queries`}>
      ${words.map(
        (word, i) =>
          html`<button
            id=${`query-${n}-${i}`}
            aria-pressed=${pinned === i ? "true" : "false"}
            title="show only the lines of this word"
            onClick=${() => onPin(pinned === i ? null : i)}>
            ${word}
          </button>`,
      )}
    </div>
    <svg
      viewBox=${`0 0 ${count} 1`}
      preserveAspectRatio="none"
      role="img"
      aria-label=${`${name}: ${inWords(head.weights, words)}`}>
      ${head.weights.flatMap((row, i) =>
        row.map(
          (weight, j) =>
            shown(i) &&
            weight >= FAINTEST &&
            html`<line
              x1=${i + 0.5}
              y1="0"
              x2=${j + 0.5}
              y2="1"
              stroke="var(--head)"
              stroke-width=${0.5 + 7 * weight}
              stroke-opacity=${Math.min(1, 0.12 + weight)}
              vector-effect="non-scaling-stroke" />`,
        ),
      )}
    </svg>
    <span class="side" aria-hidden="true">key</span>
    <div class="words" aria-hidden="true">
      ${words.map(
        (word, j) =>
          html`<span style=${pinned === null ? "" : textOn(colourOf(SCALES.weights, head.weights[pinned][j]))}
            >${word}</span
          >`,
      )}
    </div>
    <p class="small" id=${`said-${n}`}>${inWords(head.weights, words)}.</p>
  </div>`;
}

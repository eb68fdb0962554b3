// The text field. Behind it, the tokens are coloured by their surprisal, and the end of the trained context is marked.

import { TABLES, colourOf, scales, table256 } from "../../common/colours.js";
import { html, useRef } from "../../common/preact.js";
import { useDark } from "../../common/theme.js";
import { UNITS } from "./state.js";

// Colours of surprisal: ink has a contrast of at least 4.5 on each of them.
TABLES.light.heat = table256(["#fcfcfa", "#fdf0d9", "#fbdba6", "#f8bd74", "#f19a52", "#e8814a"]);
TABLES.dark.heat = table256(["#15171b", "#2b2218", "#4a2f14", "#6b3c12", "#8a4715", "#a1501c"]);

// Colours of differences, as light.
TABLES.light.differences = table256(["#6f9cf0", "#b4cdf8", "#fcfcfa", "#f6c4ac", "#e8814a"]);
TABLES.dark.differences = table256(["#2f5cb8", "#24406f", "#15171b", "#5a3014", "#a1501c"]);

// The scale of the difference of two surprisals.
export const differenceScale = (unit) => ({
  ...scales.signed(4 * (unit === "bits" ? 1.5 : 1), unit === "bits" ? [-6, -3, 0, 3, 6] : [-4, -2, 0, 2, 4]),
  table: "differences",
  factor: UNITS[unit],
});

// The scale of surprisal: up to that of a blind guess among all tokens, or a little more.
export function surprisalScale(vocabulary, unit) {
  const factor = UNITS[unit];
  const most = Math.ceil(Math.log(vocabulary)) * (unit === "bits" ? 1.5 : 1);
  const step = most > 9 ? 3 : most > 5 ? 2 : 1;
  const ticks = Array.from({ length: Math.floor(most / step) + 1 }, (_, n) => n * step);
  return { table: "heat", share: (value) => value / most, ticks, factor };
}

// spans: as of Tokenizer.spans. valueOf(n): the surprisal of token n, or null. onCaret(n or null): the token before the
// caret; null at the end. range, onRange({first, last} or null): the selected tokens; null: none or all. context: the
// number of tokens that the model was trained on.
export function Editor({
  text,
  spans,
  valueOf,
  scale,
  context,
  place,
  range,
  onText,
  onCaret,
  onRange,
  onPoint,
  name,
}) {
  const field = useRef();
  useDark();
  const summed = (span) => {
    let sum = 0;
    for (let n = span.first; n <= span.last; n++) {
      const value = valueOf(n);
      if (value === null) return null;
      sum += value;
    }
    return sum;
  };
  const caret = () => {
    const { selectionStart: at, selectionEnd: to } = field.current;
    const chosen = (spans ?? []).filter(({ start, end }) => start < to && end > at);
    const isPart = at < to && chosen.length > 0 && chosen.length < spans.length;
    onRange(isPart ? { first: chosen[0].first, last: chosen.at(-1).last } : null);
    const before = Math.max(at < to ? to : at, 1); // at the start: the first token
    const span = (spans ?? []).find(({ start, end }) => start < before && before <= end);
    onCaret(!span || span.last === spans.at(-1).last ? null : span.last);
  };
  const point = (event) => {
    const found = document.elementsFromPoint(event.clientX, event.clientY).find((element) => element.dataset.last);
    onPoint(found ? +found.dataset.last : null);
  };
  let end = 0; // of the last span; text between spans has no token
  const painted = (spans ?? []).map((span) => {
    const gap = text.slice(end, span.start);
    const value = summed(span);
    const marks = [];
    if (span.first <= context && context <= span.last) marks.push("boundary");
    if (span.first >= context) marks.push("beyond");
    if (span.first <= place && place <= span.last) marks.push("place");
    if (range && span.last >= range.first && span.first <= range.last) marks.push("chosen");
    end = span.end;
    return html`${gap && html`<span class="unknown">${gap}</span>`}<span
        class=${marks.join(" ")}
        data-last=${span.last}
        data-value=${value}
        style=${value ? `background:rgb(${colourOf(scale, value * scale.factor)})` : ""}
        >${text.slice(span.start, span.end)}</span
      >`;
  });
  return html`<div class="editor">
    <div class="paint" aria-hidden="true" translate="no">
      ${spans && painted}${
        spans ? text.slice(end) && html`<span class="unknown">${text.slice(end)}</span>` : text
      }${"\u200b"}
    </div>
    <textarea
      id="text"
      ref=${field}
      aria-label=${name}
      spellcheck="false"
      autocomplete="off"
      autocapitalize="off"
      translate="no"
      value=${text}
      onInput=${(event) => {
        onText(event.target.value);
      }}
      onKeyUp=${caret}
      onClick=${caret}
      onSelect=${caret}
      onMouseMove=${point}
      onMouseLeave=${() => onPoint(null)}></textarea>
  </div>`;
}

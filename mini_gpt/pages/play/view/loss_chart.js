// The loss along the text, as a running mean, with the end of the trained context.

import { useWidth } from "../../common/maps.js";
import { clamped, multiples, roundStep } from "../../common/numbers.js";
import { html, useRef, useState } from "../../common/preact.js";
import { useDark } from "../../common/theme.js";
import { shown } from "../../common/tokens.js";
import { lossText } from "./said.js";
import { UNITS } from "./state.js";

const SMOOTH = 16; // tokens to each side of a running mean

// Running means of the losses from place 1 on, over `reach` tokens to each side.
function runningMeans(nll, reach) {
  const found = new Float64Array(nll.length).fill(NaN);
  for (let n = 1; n < nll.length; n++) {
    const from = Math.max(1, n - reach);
    const to = Math.min(nll.length, n + reach + 1);
    let sum = 0;
    for (let k = from; k < to; k++) sum += nll[k];
    found[n] = sum / (to - from);
  }
  return found;
}

// lines: [{name, values, colour, dashed, context}]. texts: the tokens. place: the marked one.
export function LossChart({ lines, unit, texts, place, onPin }) {
  useDark();
  const box = useRef();
  const width = Math.max(280, useWidth(box) || 900);
  const [at, setAt] = useState(null);
  const factor = UNITS[unit];
  const count = Math.max(2, ...lines.map((line) => line.values.length));
  const height = width < 500 ? 220 : 280;
  const reach = count - 1 < 2 * SMOOTH + 1 ? 0 : SMOOTH; // a short text is not smoothed
  const [left, right, top, bottom] = [46, 12, 22, 40];
  const means = lines.map((line) => runningMeans(line.values, reach));
  const highest = Math.max(0.5, ...means.map((values) => values.reduce((a, b) => (b > a ? b : a), 0))) * factor;
  const step = roundStep(highest / 6);
  const most = step * Math.ceil(highest / step);
  const x = (n) => left + ((n - 0.5) / (count - 1)) * (width - left - right);
  const y = (v) => height - bottom - (v / most) * (height - top - bottom);
  const path = (values) => {
    let d = "";
    values.forEach((v, n) => {
      if (Number.isFinite(v)) d += `${d ? "L" : "M"}${x(n).toFixed(1)},${y(v * factor).toFixed(1)}`;
    });
    return d;
  };
  const every = roundStep(Math.max(1, count / (width < 500 ? 6 : 10)));
  const contexts = [...new Set(lines.map((line) => line.context))].filter((context) => context < count);
  const move = (event) => {
    const { left: from } = event.currentTarget.getBoundingClientRect();
    const n = Math.round(((event.clientX - from - left) / (width - left - right)) * (count - 1) + 0.5);
    setAt(clamped(n, 1, count - 1));
  };
  const marked = at ?? (place > 0 && place < count ? place : null);
  const two = (value = NaN) => (value * factor).toFixed(2);
  const valuesOf = (line, n) =>
    `${line.name} ${two(line.values[marked])}${reach ? ` (mean around ${two(means[n][marked])})` : ""}`;
  const said = marked && `place ${marked} “${shown(texts[marked] ?? "")}”: ${lines.map(valuesOf).join(", ")}`;
  const lossOf = ({ mean }) => (mean === null ? "" : lossText(mean, unit));
  const losses = lines.map((line) => `${line.name} ${lossOf(line)}`);
  return html`<p class="soft">
      How the loss changes along the text, in ${unit}:${" "}
      ${reach ? `at each token, the mean over the ${2 * reach + 1} tokens around it` : "the loss of each token"}.
    </p>
    <p class="legend small">
      ${lines.map(
        (line) =>
          html`<span
            ><svg width="26" height="8" aria-hidden="true">
              <line
                x1="1"
                x2="25"
                y1="4"
                y2="4"
                stroke=${line.colour}
                stroke-width="2.5"
                stroke-dasharray=${line.dashed ? "5 4" : null} /></svg
            >${` ${line.name}`}${lossOf(line) && html`: <b class="numbers">${lossOf(line)}</b>`}</span
          >`,
      )}
    </p>
    <div class="chart" ref=${box}>
      <svg
        id="loss-chart"
        width=${width}
        height=${height}
        role="img"
        aria-label=${`Loss along the text in ${unit}: ${losses.join(", ")}`}
        onMouseMove=${move}
        onMouseLeave=${() => setAt(null)}
        onClick=${() => at && onPin(at)}>
        ${multiples(step, 0, most).map(
          (v) =>
            html`<line x1=${left} x2=${width - right} y1=${y(v)} y2=${y(v)} class="rule" /><text
                x=${left - 8}
                y=${y(v) + 4}
                text-anchor="end"
                >${+v.toFixed(2)}</text
              >`,
        )}
        ${multiples(every, 1, count - 1).map(
          (n) => html`<text x=${x(n)} y=${height - bottom + 17} text-anchor="middle">${n}</text>`,
        )}
        <text x=${width - right} y=${height - 4} text-anchor="end">place in the text (tokens)</text>
        ${contexts.map(
          (context) =>
            html`<line class="context" x1=${x(context)} x2=${x(context)} y1=${top - 8} y2=${height - bottom} /><text
                class="context-name"
                x=${x(context) + (x(context) > width - 190 ? -6 : 6)}
                y=${top - 2}
                text-anchor=${x(context) > width - 190 ? "end" : "start"}
                >trained context ends: ${context}</text
              >`,
        )}
        ${marked && html`<line class="marked" x1=${x(marked)} x2=${x(marked)} y1=${top} y2=${height - bottom} />`}
        ${lines.map(
          (line, n) =>
            html`<path
              d=${path(means[n])}
              fill="none"
              stroke=${line.colour}
              stroke-width="2"
              stroke-dasharray=${line.dashed ? "5 4" : null} />`,
        )}
      </svg>
    </div>
    <output id="pointed">${said || "Point at a place of the chart."}</output>`;
}

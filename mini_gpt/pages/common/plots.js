// Charts with axes and legends: lines, and maps of numbers. They are drawn in the pixels that they get.

import { seriesColour } from "./colours.js";
import { ColourBar, PixelMap, useWidth } from "./maps.js";
import { clamped, thousands, ticksOf } from "./numbers.js";
import { html, useRef, useState } from "./preact.js";
import { useDark } from "./theme.js";

const HEIGHT = 260; // pixels of a chart
const FRAME = { left: 52, right: 12, top: 8, bottom: 40 };

// Ticks, grid lines and names of both axes. x, y: {name, ticks, at(value)}.
function Axes({ width, height, x, y, grid = true }) {
  const { left, right, top, bottom } = FRAME;
  return html`<g
    >${y.ticks.map(
      (tick) =>
        html`<line
            class=${grid ? "grid-line" : "tick"}
            x1=${left - 4}
            x2=${grid ? width - right : left}
            y1=${y.at(tick)}
            y2=${y.at(tick)} />
          <text x=${left - 7} y=${y.at(tick) + 4} text-anchor="end">${thousands(tick)}</text>`,
    )}
    ${x.ticks.map(
      (tick) =>
        html`<line class="tick" x1=${x.at(tick)} x2=${x.at(tick)} y1=${height - bottom} y2=${height - bottom + 4} />
          <text x=${x.at(tick)} y=${height - bottom + 17} text-anchor="middle">${thousands(tick)}</text>`,
    )}
    <text class="axis" x=${(left + width - right) / 2} y=${height - 6} text-anchor="middle">${x.name}</text>
    <text class="axis" transform=${`translate(13 ${(top + height - bottom) / 2}) rotate(-90)`} text-anchor="middle"
      >${y.name}</text
    ></g
  >`;
}

// A line as the path of an SVG. A null is a gap; a value between two gaps is a dash of three pixels.
function pathOf(values, x, y) {
  const isGap = (n) => (values[n] ?? null) === null;
  const point = (n, shift = 0) => `${(x(n) + shift).toFixed(1)},${y(values[n]).toFixed(1)}`;
  const step = (n) => {
    if (isGap(n)) return "";
    if (!isGap(n - 1)) return `L${point(n)}`;
    return isGap(n + 1) ? `M${point(n, -1.5)}h3` : `M${point(n)}`;
  };
  return values.map((_, n) => step(n)).join("");
}

// lines: [{name, values, dash, wide}]; a value's place on the x axis is its index; null: a gap. xName, yName: with
// units. The legend has the values at the place that is pointed at.
export function LineChart({ id, name, lines, xName, yName, low, high }) {
  const box = useRef();
  const width = useWidth(box);
  const [at, setAt] = useState(null);
  useDark();
  const { left, right, top, bottom } = FRAME;
  const last = Math.max(...lines.map(({ values }) => values.length)) - 1;
  const x = { name: xName, ticks: ticksOf(0, last, width / 90), at: (v) => left + (v / last) * (width - left - right) };
  const y = {
    name: yName,
    ticks: ticksOf(low, high, 5),
    at: (v) => top + ((high - clamped(v, low, high)) / (high - low)) * (HEIGHT - top - bottom),
  };
  const move = (event) => {
    const from = event.currentTarget.getBoundingClientRect();
    setAt(clamped(Math.round(((event.clientX - from.left - left) / (width - left - right)) * last), 0, last));
  };
  const numberAt = (values) => at !== null && values[at]?.toFixed(3);
  return html`<div class="plot" ref=${box}>
    ${
      width > 0 &&
      html`<svg
        id=${id}
        width=${width}
        height=${HEIGHT}
        role="img"
        aria-label=${name}
        onPointerMove=${move}
        onPointerDown=${move}
        onPointerLeave=${() => setAt(null)}>
        <${Axes} ...${{ width, height: HEIGHT, x, y }} />
        ${lines.map(
          ({ values, dash, wide }, n) =>
            html`<path
              fill="none"
              stroke=${seriesColour(n)}
              stroke-width=${wide ? 6 : 2}
              opacity=${wide ? 0.4 : 1}
              stroke-dasharray=${dash}
              d=${pathOf(values, x.at, y.at)} />`,
        )}
        ${at !== null && html`<line class="cross" x1=${x.at(at)} x2=${x.at(at)} y1=${top} y2=${HEIGHT - bottom} />`}
      </svg>`
    }
    <ul class="legend">
      ${lines.map(
        ({ name: own, values, dash, wide }, n) =>
          html`<li>
            <svg width="26" height="10" aria-hidden="true">
              <line
                x1="0"
                x2="26"
                y1="5"
                y2="5"
                stroke=${seriesColour(n)}
                stroke-width=${wide ? 6 : 3}
                opacity=${wide ? 0.4 : 1}
                stroke-dasharray=${dash} />
            </svg>
            ${own}${numberAt(values) && html` <b class="numbers">${numberAt(values)}</b>`}
          </li>`,
      )}
      <li class="soft numbers">
        ${at === null ? "Point at the chart, or tap it, to read values." : `at ${thousands(at)}`}
      </li>
    </ul>
  </div>`;
}

// A map of numbers with axes, rows downwards. x, y: {name, last}: the number of the last column or row.
export function MapChart({ id, name, rows, columns, makeValueAt, scale, deps, x, y, height = HEIGHT, bar }) {
  const box = useRef();
  const width = useWidth(box);
  const { left, right, top, bottom } = FRAME;
  const axis = ({ name: own, last }, from, to) => ({
    name: own,
    ticks: ticksOf(0, last, (to - from) / 70),
    at: (v) => from + (v / last) * (to - from),
  });
  const inside = { left, top, width: Math.max(0, width - left - right), height: height - top - bottom };
  return html`<div class="plot" ref=${box}>
    ${
      width > 0 &&
      html`<div class="axed" style=${`height:${height}px`}>
        <${PixelMap}
          id=${id}
          ...${{ name, rows, columns, makeValueAt, scale, deps }}
          style=${Object.entries(inside)
            .map(([side, pixels]) => `${side}:${pixels}px`)
            .join(";")} />
        <svg width=${width} height=${height} aria-hidden="true">
          <${Axes}
            ...${{ width, height }}
            grid=${false}
            x=${axis(x, left, width - right)}
            y=${axis(y, top, height - bottom)} />
        </svg>
      </div>`
    }
    <${ColourBar} scale=${scale} name=${bar} />
  </div>`;
}

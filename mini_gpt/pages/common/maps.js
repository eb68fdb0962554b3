// Maps of pixels, and their colour bars. No pixel is painted for a masked pair (null) or a
// value that is not a number, and the hatching shows.

import { TABLES, colourIndex, themeName } from "./colours.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { useDark } from "./theme.js";

// A hook: the width of an element in CSS pixels; 0 before it is known.
export function useWidth(element) {
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => set(element.current?.clientWidth ?? 0));
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

// Paint one pixel for each cell. valueAt(i, j): of row i and column j.
export function paintCells(canvas, rows, columns, valueAt, scale) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const table = TABLES[themeName()][scale.table];
  for (let i = 0, at = 0; i < rows; i++)
    for (let j = 0; j < columns; j++, at += 4) {
      const index = colourIndex(scale, valueAt(i, j));
      if (index === null) continue;
      const [r, g, b] = table[index];
      image.data[at] = r;
      image.data[at + 1] = g;
      image.data[at + 2] = b;
      image.data[at + 3] = 255;
    }
  context.putImageData(image, 0, 0);
}

// Do a task in one of the next frames, with others for at most 30 ms a frame, so that many maps do not freeze the page.
const waiting = [];
function soon(task) {
  const work = () => {
    for (const start = performance.now(); waiting.length && performance.now() - start < 30;) waiting.shift()();
    if (waiting.length) requestAnimationFrame(work);
  };
  if (waiting.push(task) === 1) requestAnimationFrame(work);
}

// A small map without axes. makeValueAt(): returns valueAt, when the map is painted. deps: what the values depend on.
export function PixelMap({ rows, columns, makeValueAt, scale, deps, name, style = "", ...rest }) {
  const canvas = useRef();
  const isDark = useDark();
  useLayoutEffect(() => {
    let isShown = true;
    soon(() => isShown && paintCells(canvas.current, rows, columns, makeValueAt(), scale));
    return () => {
      isShown = false;
    };
  }, [...deps, isDark]);
  return html`<canvas
    ref=${canvas}
    class="masked"
    role="img"
    aria-label=${name}
    style=${`image-rendering:pixelated;${style}`}
    ...${rest}></canvas>`;
}

// Frames over a small map, [[column, end, row, end]].
export const Frames = ({ frames, rows, columns, names = ["edge", "line"] }) =>
  html`<svg class="frames" viewBox=${`0 0 ${columns} ${rows}`} preserveAspectRatio="none" aria-hidden="true">
    ${names.map((name) =>
      frames.map(
        ([j, endJ, i, endI]) => html`<rect class=${name} x=${j} y=${i} width=${endJ - j} height=${endI - i} />`,
      ),
    )}
  </svg>`;

// The colours of a scale with its ticks. masked: what hatching means, if there is any.
export function ColourBar({ scale, name, format = String, masked }) {
  const canvas = useRef();
  const isDark = useDark();
  useLayoutEffect(() => {
    const context = canvas.current.getContext("2d");
    const table = TABLES[themeName()][scale.table];
    table.forEach((rgb, n) => {
      context.fillStyle = `rgb(${rgb})`;
      context.fillRect(n, 0, 1, 1);
    });
  }, [scale.table, isDark]);
  return html`<div class="bar">
    <span>${name}</span>
    <span class="scale"
      ><canvas
        ref=${canvas}
        class="colours"
        width="256"
        height="1"
        role="img"
        aria-label=${`Colours of ${name}`}></canvas>
      <span class="ticks"
        >${scale.ticks.map(
          (tick) => html`<span style=${`left:${100 * scale.share(tick)}%`}>${format(tick)}</span>`,
        )}</span
      ></span
    >
    ${masked && html`<span><i class="swatch masked"></i>${masked}</span>`}
  </div>`;
}

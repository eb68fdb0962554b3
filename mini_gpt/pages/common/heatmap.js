// A large map: tokens or numbers along both axes, a crosshair, and zoom by buttons, keys, Ctrl + wheel, drag and pinch.

import { hasModifier } from "./controls.js";
import { paintCells, useWidth } from "./maps.js";
import { clamped, roundStep } from "./numbers.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "./preact.js";
import { useDark } from "./theme.js";

const CLOSEST = 6; // cells across, at the largest zoom
const LABEL = 11; // pixels of a cell from which its token is written

// A colour of base.css as a canvas can use it.
function cssColour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

// Where things are, in CSS pixels. view: {zoom, x, y}, the first visible column and row.
function layoutOf({ rows, columns, rowLabels, columnLabels, most }, width, view) {
  const longest = (labels) => Math.min(width < 500 ? 7 : 12, Math.max(...labels.map((label) => [...label].length)));
  const left = 20 + Math.max(26, 7.5 * longest(rowLabels));
  const top = 20 + Math.max(16, 7.5 * longest(columnLabels));
  const right = 8;
  const cell = Math.min((width - left - right) / columns, most / rows, 44);
  const plot = { left, top, width: cell * columns, height: cell * rows, cell: cell * view.zoom };
  return { ...plot, x: (j) => left + (j - view.x) * plot.cell, y: (i) => top + (i - view.y) * plot.cell };
}

const kept = (view, rows, columns) => {
  const zoom = clamped(view.zoom, 1, Math.max(1, columns / CLOSEST));
  const inside = (start, count) => clamped(start, 0, count - count / zoom);
  return { zoom, x: inside(view.x, columns), y: inside(view.y, rows) };
};

function hatching(context) {
  const tile = document.createElement("canvas");
  const side = 6 * devicePixelRatio;
  tile.width = tile.height = side;
  const pen = tile.getContext("2d");
  pen.strokeStyle = cssColour("--line");
  pen.lineWidth = 1.2 * devicePixelRatio;
  for (const shift of [-side, 0, side]) {
    pen.moveTo(shift, side);
    pen.lineTo(shift + side, 0);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
  return pattern;
}

function drawAxis(context, plot, labels, across, marked) {
  const { cell, left, top } = plot;
  const start = across ? left : top;
  const size = across ? plot.width : plot.height;
  const place = across ? plot.x : plot.y;
  const cut = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);
  const step = cell >= LABEL ? 1 : roundStep((across ? 30 : 18) / cell);
  const write = (n, isMarked) => {
    const middle = place(n + 0.5);
    if (middle < start - 0.5 || middle > start + size + 0.5) return;
    const text = cell >= LABEL || isMarked ? cut(labels[n], Math.floor(((across ? top : left) - 20) / 7.5)) : String(n);
    context.save();
    context.translate(across ? middle : left - 5, across ? top - 5 : middle);
    const isTurned = across && (cell >= LABEL || isMarked) && [...text].length > 1;
    if (isTurned) context.rotate(-Math.PI / 2);
    const isUpright = across && !isTurned;
    context.textAlign = "right";
    if (across) context.textAlign = isTurned ? "left" : "center";
    context.textBaseline = isUpright ? "alphabetic" : "middle";
    if (isMarked) {
      const wide = context.measureText(text).width + 6;
      const from = { center: -wide / 2, left: -3, right: 3 - wide }[context.textAlign];
      context.fillStyle = cssColour("--mark");
      context.fillRect(from, isUpright ? -11 : -7, wide, 14);
      context.fillStyle = cssColour("--paper");
    }
    context.fillText(text, 0, 0);
    context.restore();
  };
  context.fillStyle = cssColour("--soft");
  const family = getComputedStyle(document.documentElement).getPropertyValue("--mono");
  context.font = `${cell >= LABEL ? Math.min(12, cell) : 12}px ${family}`;
  for (let n = 0; n < labels.length; n += step)
    if (marked === null || Math.abs(n - marked) * cell > (across ? 24 : 16) || cell >= LABEL) write(n, false);
  if (marked !== null) write(marked, true);
}

// valueAt(i, j), scale: as in maps.js. rowName, columnName: of the axes. frames: [[column, end, row, end]].
// at: the marked cell {i, j} or null. pinned: the cell that the page keeps, or null. onPoint(cell or null): the mouse
// is on a cell. onPin(cell or null): a click, a tap or a key chose it; null unpins.
// most: pixels of the largest height. deps: what the values depend on.
export function Heatmap({
  id,
  name,
  rows,
  columns,
  makeValueAt,
  scale,
  deps,
  rowLabels,
  columnLabels,
  rowName,
  columnName,
  frames = [],
  at = null,
  pinned = null,
  onPoint,
  onPin,
  most = 720,
}) {
  const box = useRef();
  const canvas = useRef();
  const pointers = useRef({ places: new Map(), moved: false }).current; // that are pressed, and whether they moved
  const isDark = useDark();
  const width = useWidth(box);
  const [wanted, setView] = useState({ zoom: 1, x: 0, y: 0 });
  const view = kept(wanted, rows, columns);
  const plot = layoutOf({ rows, columns, rowLabels, columnLabels, most }, width, view);
  const cells = useMemo(() => {
    const painted = document.createElement("canvas");
    paintCells(painted, rows, columns, makeValueAt(), scale);
    return painted;
  }, [...deps, isDark]);
  useLayoutEffect(() => {
    if (!width) return;
    const element = canvas.current;
    const ratio = devicePixelRatio;
    const total = { width: plot.left + plot.width + 8, height: plot.top + plot.height + 6 };
    [element.width, element.height] = [total.width * ratio, total.height * ratio];
    element.style.width = `${total.width}px`;
    const context = element.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = hatching(context);
    context.fillRect(plot.left, plot.top, plot.width, plot.height);
    context.imageSmoothingEnabled = plot.cell * ratio < 1;
    context.drawImage(
      cells,
      view.x,
      view.y,
      columns / view.zoom,
      rows / view.zoom,
      plot.left,
      plot.top,
      plot.width,
      plot.height,
    );
    context.strokeStyle = cssColour("--edge");
    context.strokeRect(plot.left - 0.5, plot.top - 0.5, plot.width + 1, plot.height + 1);
    drawAxis(context, plot, rowLabels, false, at && at.i);
    drawAxis(context, plot, columnLabels, true, at && at.j);
    context.fillStyle = cssColour("--ink");
    context.font = "13px system-ui, sans-serif";
    context.fillText(`${columnName} →`, plot.left, 13);
    context.save();
    context.translate(12, plot.top);
    context.rotate(-Math.PI / 2);
    context.textAlign = "right";
    context.fillText(`← ${rowName}`, 0, 0);
    context.restore();
    context.beginPath();
    context.rect(plot.left, plot.top, plot.width, plot.height);
    context.clip();
    for (const [colour, wide] of [
      ["--paper", 4],
      ["--mark", 2],
    ]) {
      context.strokeStyle = cssColour(colour);
      context.lineWidth = wide;
      for (const [j, endJ, i, endI] of frames)
        context.strokeRect(plot.x(j), plot.y(i), (endJ - j) * plot.cell, (endI - i) * plot.cell);
      if (at === null) continue;
      context.lineWidth = wide / 2;
      const side = Math.max(plot.cell, 3);
      const [x, y] = [plot.x(at.j + 0.5) - side / 2, plot.y(at.i + 0.5) - side / 2];
      context.strokeRect(plot.left - 9, y, plot.width + 18, side);
      context.strokeRect(x, plot.top - 9, side, plot.height + 18);
    }
  });
  const zoomAt = (by, point) =>
    setView((old) => {
      const now = kept(old, rows, columns);
      const next = kept({ ...now, zoom: now.zoom * by }, rows, columns);
      const centre = point ?? (at && [plot.x(at.j + 0.5), plot.y(at.i + 0.5)]); // without a pointer, the crosshair
      const [x, y] = centre ? [(centre[0] - plot.left) / plot.width, (centre[1] - plot.top) / plot.height] : [0.5, 0.5];
      const move = (start, count, share) => start + share * (count / now.zoom - count / next.zoom);
      return kept({ zoom: next.zoom, x: move(now.x, columns, x), y: move(now.y, rows, y) }, rows, columns);
    });
  const pan = (dx, dy) =>
    setView((old) => kept({ ...old, x: old.x - dx / plot.cell, y: old.y - dy / plot.cell }, rows, columns));
  const placeOf = (event) => {
    const from = canvas.current.getBoundingClientRect();
    return [event.clientX - from.left, event.clientY - from.top];
  };
  const cellOf = (event) => {
    const [x, y] = placeOf(event);
    const j = Math.floor((x - plot.left) / plot.cell + view.x);
    const i = Math.floor((y - plot.top) / plot.cell + view.y);
    const isInside = x >= plot.left && x < plot.left + plot.width && y >= plot.top && y < plot.top + plot.height;
    return isInside && i >= 0 && j >= 0 && i < rows && j < columns ? { i, j } : null;
  };
  const latestZoom = useRef();
  latestZoom.current = zoomAt;
  useLayoutEffect(() => {
    const wheel = (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      latestZoom.current(Math.exp(-event.deltaY / 200), placeOf(event));
    };
    canvas.current.addEventListener("wheel", wheel, { passive: false });
    return () => canvas.current?.removeEventListener("wheel", wheel);
  }, []);
  const down = (event) => {
    pointers.places.set(event.pointerId, [event.clientX, event.clientY]);
    pointers.moved = pointers.places.size > 1;
    if (view.zoom > 1) canvas.current.setPointerCapture(event.pointerId);
  };
  const move = (event) => {
    // A mouse that was released outside the map.
    if (event.pointerType === "mouse" && event.buttons === 0) pointers.places.delete(event.pointerId);
    const before = pointers.places.get(event.pointerId);
    const now = [event.clientX, event.clientY];
    if (!before) return event.pointerType === "mouse" && onPoint?.(cellOf(event));
    const others = [...pointers.places].filter(([finger]) => finger !== event.pointerId).map(([, place]) => place);
    if (others.length) {
      const apart = (place) => Math.hypot(place[0] - others[0][0], place[1] - others[0][1]);
      zoomAt(
        apart(now) / Math.max(1, apart(before)),
        placeOf({ clientX: (now[0] + others[0][0]) / 2, clientY: (now[1] + others[0][1]) / 2 }),
      );
    } else if (pointers.moved || Math.hypot(now[0] - before[0], now[1] - before[1]) > 5) {
      pointers.moved = true;
      if (view.zoom > 1) pan(now[0] - before[0], now[1] - before[1]);
    } else return;
    pointers.places.set(event.pointerId, now);
  };
  const up = (event) => {
    if (pointers.places.delete(event.pointerId) && !pointers.moved && event.type === "pointerup") {
      const cell = cellOf(event);
      const isPinned = cell !== null && cell.i === pinned?.i && cell.j === pinned?.j;
      onPin?.(isPinned ? null : cell);
    }
  };
  const press = (event) => {
    if (event.target !== box.current || hasModifier(event)) return;
    const step = (di, dj) =>
      onPin?.({ i: clamped((at?.i ?? 0) + di, 0, rows - 1), j: clamped((at?.j ?? 0) + dj, 0, columns - 1) });
    const act = {
      ArrowRight: () => step(0, 1),
      ArrowLeft: () => step(0, -1),
      ArrowDown: () => step(1, 0),
      ArrowUp: () => step(-1, 0),
      "+": () => zoomAt(1.5),
      "-": () => zoomAt(1 / 1.5),
      0: () => setView({ zoom: 1, x: 0, y: 0 }),
      Escape: () => onPin?.(null),
    }[event.key];
    if (act) {
      event.preventDefault();
      event.stopPropagation();
      act();
    }
  };
  return html`<div
    class=${`map ${view.zoom > 1 ? "zoomed" : ""}`}
    ref=${box}
    tabindex="0"
    role="group"
    aria-label=${`${name}. Arrow keys move the crosshair, + and − zoom.`}
    onKeyDown=${press}>
    <canvas
      id=${id}
      ref=${canvas}
      role="img"
      aria-label=${name}
      data-left=${plot.left}
      data-top=${plot.top}
      data-cell=${plot.cell}
      data-x=${view.x}
      data-y=${view.y}
      onPointerDown=${down}
      onPointerMove=${move}
      onPointerUp=${up}
      onPointerCancel=${up}
      onPointerLeave=${() => onPoint?.(null)}
      onDblClick=${(event) => zoomAt(2, placeOf(event))}></canvas>
    <div class="controls small">
      <span class="choice"
        ><span class="name">zoom</span>
        <button onClick=${() => zoomAt(1 / 1.5)} disabled=${view.zoom === 1} aria-label="zoom out">−</button>
        <button onClick=${() => zoomAt(1.5)} disabled=${view.zoom >= columns / CLOSEST} aria-label="zoom in">+</button>
        <button onClick=${() => setView({ zoom: 1, x: 0, y: 0 })} disabled=${view.zoom === 1}>whole map</button></span
      >
      <span class="soft"
        >Drag moves a zoomed map; <span class="by-pointer">Ctrl + wheel or </span>two fingers zoom.</span
      >
    </div>
  </div>`;
}

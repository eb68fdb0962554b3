// A matrix: a table of coloured numbers, or a map if it is too large for that. A cell can be pointed at, by mouse, tap or
// arrow keys. Some can be edited.

import { colourOf, scales, seriesColour, textOn } from "../common/colours.js";
import { hasModifier } from "../common/controls.js";
import { Heatmap } from "../common/heatmap.js";
import { clamped } from "../common/numbers.js";
import { html, useMemo, useRef, useState } from "../common/preact.js";
import { useDark } from "../common/theme.js";
import { HIDDEN, isHidden } from "./attention.js";
import { LARGEST } from "./cells.js";
import { brief } from "./explain.js";
import { named, shapeOf } from "./matrices.js";
import { number } from "./terms.js";

const MOST = 4; // the value from which a signed number has the strongest colour

export const SCALES = { signed: scales.signed(MOST), weights: scales.linear(0, 1, [0, 0.5, 1]) };

// Text in which W_Q and its like have subscripts.
export const typeset = (text) =>
  text.split(/_([QKVO])(?!\w)/).map((part, n) => (n % 2 ? html`<sub>${part}</sub>` : part));

// A number that can be typed. The typed text stays until the field is left; what is not a number, or too large,
// changes nothing.
function NumberField({ value, label, onChange, onBlur, digits = 3, ...rest }) {
  const [typed, setTyped] = useState(null);
  const isAllowed = (number) => Math.abs(number) <= LARGEST;
  const read = (text) => (text.trim() === "" ? NaN : Number(text.replace(",", ".").replace("−", "-")));
  const change = (text) => {
    setTyped(text);
    if (isAllowed(read(text))) onChange(read(text));
  };
  const isBad = typed !== null && !isAllowed(read(typed));
  return html`<input
    type="text"
    inputmode="decimal"
    autocomplete="off"
    aria-label=${label}
    aria-invalid=${isBad ? "true" : "false"}
    ...${rest}
    value=${typed ?? String(+value.toFixed(digits))}
    onInput=${(event) => change(event.target.value)}
    onBlur=${() => {
      setTyped(null);
      onBlur();
    }} />`;
}

// matrix: of matricesShown. page: {view, result, pointed, from, point, focus}. onEdit(i, j, value) or none.
// place: which of the page's matrices it is; by default named by its view, as the same matrix is shown in several.
// isBare: without labels of the rows, since the matrix on its left has them. children: what is beside the name.
// A large matrix is a map.
export function Matrix({ place, ...own }) {
  const { matrix, page } = own;
  const View = isLarge(matrix) ? MatrixMap : MatrixTable;
  return html`<${View} ...${own} place=${place ?? (page.view === "main" ? matrix.id : `${page.view}-${matrix.id}`)} />`;
}

function MatrixTable({ matrix, page, onEdit, isBare = false, place, children }) {
  const { id, name, values, rows, columns } = matrix;
  const [stop, setStop] = useState([0, 0]);
  const box = useRef();
  useDark();
  const own = page.pointed?.view === page.view && page.from[id];
  const isPointed = (i, j) => page.pointed?.place === place && page.pointed.i === i && page.pointed.j === j;
  const isSource = (i, j) =>
    own && (own.rows === null || own.rows.includes(i)) && (own.columns === null || own.columns.includes(j));
  const last = [values.length - 1, values[0].length - 1];
  const [stopI, stopJ] = stop.map((n, axis) => Math.min(n, last[axis]));
  const go = (i, j) => {
    const to = [i, j].map((n, axis) => clamped(n, 0, last[axis]));
    setStop(to);
    const cell = box.current.rows[to[0] + 1].cells[to[1] + 1];
    (cell.querySelector("input") ?? cell).focus();
  };
  const press = (event, i, j) => {
    if (hasModifier(event) || event.shiftKey) return;
    const field = event.target.tagName === "INPUT" ? event.target : null;
    const atStart = !field || field.selectionEnd === 0;
    const atEnd = !field || field.selectionStart === field.value.length;
    const act = {
      ArrowDown: () => go(i + 1, j),
      ArrowUp: () => go(i - 1, j),
      Enter: () => go(i + 1, j),
      ArrowRight: atEnd && (() => go(i, j + 1)),
      ArrowLeft: atStart && (() => go(i, j - 1)),
    }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  };
  const cellAt = (i, j) => ({ view: page.view, place, id, i, j });
  const cell = (value, i, j) => {
    const isMasked = isHidden((matrix.logits ?? values)[i][j]);
    const style = isMasked ? "" : textOn(colourOf(SCALES[matrix.scale], value));
    const of = `${name}, ${rows[i]}, ${columns[j]}`;
    const tab = i === stopI && j === stopJ ? 0 : -1;
    const marks = `${isPointed(i, j) ? "pointed" : ""} ${isSource(i, j) ? "source" : ""} ${isMasked ? "masked" : ""}`;
    const shared = {
      role: "gridcell",
      class: marks,
      style,
      "data-value": value,
      key: j,
      onPointerEnter: (event) => event.pointerType === "mouse" && page.point(cellAt(i, j)),
    };
    const focus = {
      tabindex: tab,
      onFocus: () => {
        setStop([i, j]);
        page.focus(cellAt(i, j));
      },
      onBlur: () => page.focus(null),
      onKeyDown: (event) => press(event, i, j),
    };
    return onEdit
      ? html`<td ...${shared}>
          <${NumberField} value=${value} label=${of} onChange=${(read) => onEdit(i, j, read)} ...${focus} />
        </td>`
      : html`<td ...${shared} ...${focus} aria-label=${`${of}: ${brief(value)}`}>
          ${isMasked && value === 0 ? "0" : brief(value)}
        </td>`;
  };
  return html`<figure
    class=${["matrix", onEdit && "editable", columns.length > 6 && "many", matrix.step === "input" && "named"]
      .filter(Boolean)
      .join(" ")}
    id=${`matrix-${place}`}>
    <figcaption>
      <b class="name">${typeset(name)}</b> <span class="soft">${shapeOf(matrix)}</span>${children}
    </figcaption>
    <table role="grid" aria-label=${`${name}, ${shapeOf(matrix)}`} ref=${box} onPointerLeave=${() => page.point(null)}>
      <thead>
        <tr role="row">
          <td class=${isBare ? "unseen" : ""}></td>
          ${columns.map(
            (label, j) => html`<th scope="col" role="columnheader" style=${headLine(page, matrix, j)}>${label}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${values.map(
          (row, i) =>
            html`<tr role="row" key=${i}>
              <th scope="row" role="rowheader" class=${isBare ? "unseen" : ""}>${rows[i]}</th>
              ${row.map((value, j) => cell(value, i, j))}
            </tr>`,
        )}
      </tbody>
    </table>
  </figure>`;
}

// A line in the head's colour above the columns that belong to it.
function headLine(page, matrix, j) {
  const isWide = ["WQ", "WK", "WV", "Q", "K", "V", "O"].includes(matrix.id);
  const head = matrix.head ?? (isWide ? Math.floor(j / page.result.width) : null);
  return head === null ? "" : `border-bottom:3px solid ${seriesColour(head)}`;
}

// One cell at a time has its number, and can be edited.
export const WIDEST = 16; // columns of a table
export const TALLEST = 32; // rows of a table
const CELL = 12; // the largest side of a cell in pixels, so that tokens can be read beside it
const isLarge = ({ values }) => values[0].length > WIDEST || values.length > TALLEST;

function MatrixMap({ matrix, page, onEdit, place, children }) {
  const { id, name, values, rows, columns } = matrix;
  const [pinned, setPinned] = useState(null);
  // The largest size of a number that is not hidden.
  const largest = useMemo(
    () =>
      Math.max(
        0,
        ...values
          .flat()
          .map(Math.abs)
          .filter((size) => size < -HIDDEN),
      ),
    [values],
  );
  const reach = largest || 1;
  const scale = matrix.scale === "weights" ? SCALES.weights : scales.signed(reach);
  const isOwn = page.pointed?.view === page.view && page.pointed.place === place;
  const kept = pinned && values[pinned.i]?.[pinned.j] !== undefined ? pinned : null;
  const at = isOwn ? page.pointed : kept;
  const from = page.pointed?.view === page.view && page.from[id];
  const frames = from ? framesOf(from, values) : [];
  const nameOf = ({ i, j }) => `[${named(rows)[i]}, ${named(columns)[j]}]`;
  const pin = (cell) => {
    setPinned(cell);
    page.focus(cell && { view: page.view, place, id, ...cell });
  };
  return html`<figure
    class="matrix large"
    id=${`matrix-${place}`}
    style=${`width:min(100%, ${Math.max(340, CELL * values[0].length + 110)}px)`}>
    <figcaption>
      <b class="name">${typeset(name)}</b> <span class="soft">${shapeOf(matrix)}</span>${children}
    </figcaption>
    <${Heatmap}
      id=${`map-${place}`}
      name=${`${name}, ${shapeOf(matrix)}`}
      rows=${values.length}
      columns=${values[0].length}
      makeValueAt=${() => (i, j) => (isHidden((matrix.logits ?? values)[i][j]) ? null : values[i][j])}
      deps=${[values, reach]}
      rowLabels=${rows}
      columnLabels=${columns}
      rowName="row"
      columnName="column"
      most=${Math.min(460, CELL * values.length)}
      onPoint=${(cell) => page.point(cell && { view: page.view, place, id, ...cell })}
      onPin=${pin}
      ...${{ scale, at, frames }}
      pinned=${kept} />
    <p class="small">
      ${
        kept && onEdit
          ? html`<label
              >${nameOf(kept)}
              <${NumberField}
                value=${values[kept.i][kept.j]}
                digits=${4}
                label=${`${name}, ${rows[kept.i]}, ${columns[kept.j]}`}
                onChange=${(read) => onEdit(kept.i, kept.j, read)}
                onBlur=${() => {}}
            /></label>`
          : at
            ? `${nameOf(at)} = ${number(values[at.i][at.j], 4)}`
            : html`<span class="soft">${onEdit ? "Click a cell to change it." : "Point at a cell."}</span>`
      }
      <span class="soft">
        ${
          matrix.scale === "weights"
            ? " Colours: 0 to 1."
            : largest
              ? ` Blue: −${number(reach)}; red: ${number(reach)}.`
              : ` All numbers are 0${values.flat().some(isHidden) ? " or −∞" : ""}.`
        }
      </span>
    </p>
  </figure>`;
}

// Frames around the rows and columns from which the number is computed that is pointed at.
function framesOf({ rows, columns }, values) {
  const spans = (own, count) => (own === null ? [[0, count]] : own.map((n) => [n, n + 1]));
  return spans(rows, values.length).flatMap(([i, endI]) =>
    spans(columns, values[0].length).map(([j, endJ]) => [j, endJ, i, endI]),
  );
}

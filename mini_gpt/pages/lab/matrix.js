// A matrix as a table of coloured numbers. A cell can be pointed at, by mouse, tap or arrow keys. Some can be edited.

import { colourOf, seriesColour, textOn } from "../common/colours.js";
import { hasModifier } from "../common/controls.js";
import { clamped } from "../common/numbers.js";
import { html, useRef, useState } from "../common/preact.js";
import { useDark } from "../common/theme.js";
import { isHidden } from "./attention.js";
import { brief } from "./explain.js";
import { shapeOf } from "./matrices.js";
import { MatrixMap, isLarge } from "./matrix_map.js";
import { NumberField, SCALES, typeset } from "./matrix_parts.js";

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

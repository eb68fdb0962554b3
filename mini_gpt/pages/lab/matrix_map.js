// A matrix that is too large for a table of numbers, as a map. One cell at a time has its number, and can be edited.

import { scales } from "../common/colours.js";
import { Heatmap } from "../common/heatmap.js";
import { html, useMemo, useState } from "../common/preact.js";
import { HIDDEN, isHidden } from "./attention.js";
import { named, shapeOf } from "./matrices.js";
import { NumberField, SCALES, typeset } from "./matrix_parts.js";
import { number } from "./terms.js";

export const WIDEST = 16; // columns of a table
export const TALLEST = 32; // rows of a table
const CELL = 12; // the largest side of a cell in pixels, so that tokens can be read beside it
export const isLarge = ({ values }) => values[0].length > WIDEST || values.length > TALLEST;

// As Matrix.
export function MatrixMap({ matrix, page, onEdit, place, children }) {
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

// The shapes of the five steps in this example, and in a model of any size.

import { TableHead } from "../common/controls.js";
import { thousands } from "../common/numbers.js";
import { html, useState } from "../common/preact.js";
import { Section } from "./sections.js";

const LARGEST_SIZE = 1_000_000; // a size that can be typed

const model = (width, heads) => html`width ${width},<br />${heads} head${heads > 1 && "s"}`;

function shapesOf(length, width, heads) {
  const each = width / heads;
  const shape = (...axes) => axes.map(thousands).join(" × ");
  return [
    ["Project: Q, K, V", shape(length, width)],
    ["Split into heads", shape(heads, length, each)],
    ["Score: S", shape(heads, length, length)],
    ["Softmax, times V: O", shape(heads, length, each)],
    ["Concatenate, project: Y", shape(length, width)],
  ];
}

export function Shapes({ page }) {
  const { state, data } = page;
  const [sizes, setSizes] = useState({ length: 10, width: 512, heads: 8 });
  const { length, width, heads } = sizes;
  const own = shapesOf(state.order.length, data.dimensions.length, state.heads);
  const fits = width % heads === 0;
  const other = fits ? shapesOf(length, width, heads) : own.map(([step]) => [step, "—"]);
  const parameters = thousands(4 * width * width);
  const field = (name, said) =>
    html`<label
      >${said}
      <input
        type="number"
        id=${`size-${name}`}
        min="1"
        max=${LARGEST_SIZE}
        value=${sizes[name]}
        onInput=${(event) => {
          const read = Math.round(+event.target.value);
          if (read >= 1 && read <= LARGEST_SIZE) setSizes((old) => ({ ...old, [name]: read }));
        }}
    /></label>`;
  return html`<${Section} id="shapes" page=${page} title="Shapes, here and in a model">
    <div class="controls">${field("length", "tokens")}${field("width", "width")}${field("heads", "heads")}</div>
    <div>
      <div class="wide" tabindex="0" role="group" aria-label="Shapes">
        <table class="shapes">
          <${TableHead}
            columns=${["step", model(data.dimensions.length, state.heads), model(width, heads)]} />
          <tbody>
            ${own.map(
              ([step, shape], n) =>
                html`<tr>
                  <th scope="row"><span class="badge">${n + 1}</span> ${step}</th>
                  <td>${shape}</td>
                  <td>${other[n][1]}</td>
                </tr>`,
            )}
          </tbody>
        </table>
      </div>
      <p class="small" id="fits">
        ${
          fits
            ? `Q, K and V have the same shape. The four matrices have 4 · ${width}² = ${parameters} parameters, ` +
              "for any number of heads. A batch adds one axis in front."
            : html`<b
                >The width must be divisible by the number of heads: ${width} / ${heads} is not a whole number.</b
              >`
        }
      </p>
    </div>
  </${Section}>`;
}

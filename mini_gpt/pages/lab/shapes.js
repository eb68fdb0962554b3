"use strict";
// The shapes of the five steps in this example, and in a model of any size.

const LARGEST = 1_000_000; // a size that can be typed

function shapesOf(length, width, heads) {
  const each = width / heads, shape = (...axes) => axes.map((n) => n.toLocaleString("en")).join(" × ");
  return [
    ["1 Project", "Q, K, V = X·W_Q, X·W_K, X·W_V", `three of ${shape(length, width)}`],
    ["2 Split into heads", "Q = [Q₁ … Q_H], and so on", `three of ${shape(heads, length, each)}`],
    ["3 Score", "S = Q·Kᵀ / √(width of a head)", shape(heads, length, length)],
    ["4 Softmax, times V", "O = softmax(S)·V", shape(heads, length, each)],
    ["5 Concatenate and project", "Y = [O₁ … O_H]·W_O", shape(length, width)],
  ];
}

function Shapes({ page }) {
  const { state, data } = page, [sizes, setSizes] = useState({ length: 10, width: 512, heads: 8 }), { length, width, heads } = sizes;
  const own = shapesOf(state.order.length, data.dimensions.length, state.heads), fits = width % heads === 0;
  const other = fits ? shapesOf(length, width, heads) : own.map((row) => [...row.slice(0, 2), "—"]);
  const field = (name, said) => html`<label>${said} <input type="number" id=${`size-${name}`} min="1" max=${LARGEST} value=${sizes[name]} onInput=${(event) => {
    const read = Math.round(+event.target.value);
    if (read >= 1 && read <= LARGEST) setSizes((old) => ({ ...old, [name]: read }));
  }} /></label>`;
  return html`<section class="card step" id="shapes" aria-labelledby="title-shapes"><header><h2 id="title-shapes">The shapes of the five steps</h2></header>
    <div class="controls">${field("length", "tokens")}${field("width", "width (d_model)")}${field("heads", "heads")}</div>
    <p id="fits">${fits ? html`${width} → ${heads} × ${width / heads}: each head has ${width / heads} of the ${width} columns. The four matrices have 4 · ${width}² = ${(4 * width * width).toLocaleString("en")} parameters, for any number of heads.`
      : html`<b>The width must be divisible by the number of heads: ${width} / ${heads} is not a whole number.</b>`}</p>
    <div class="wide" tabindex="0" role="group" aria-label="Shapes"><table class="shapes"><thead><tr><th scope="col">step</th><th scope="col">formula</th><th scope="col">here: ${data.dimensions.length} → ${state.heads} × ${data.dimensions.length / state.heads}</th><th scope="col">${width} → ${heads} × ${fits ? width / heads : "?"}</th></tr></thead>
      <tbody>${own.map(([step, formula, shape], n) => html`<tr><th scope="row">${step}</th><td><code>${formula}</code></td><td>${shape}</td><td>${other[n][2]}</td></tr>`)}</tbody></table></div>
    <p class="soft small">A batch adds one axis in front of each shape. Heads are an axis too: all heads are computed by the same products.</p></section>`;
}

// The logit of one pair as a sum over the dimensions of the head: what each product of query and key adds.

import { colourOf, scales } from "../common/colours.js";
import { clamped, indices } from "../common/numbers.js";
import { html } from "../common/preact.js";
import { useDark } from "../common/theme.js";
import { inContext } from "./heads.js";

const NEURON_WIDTH = 330; // of the drawing, in its own units

// at: the pair that is pointed at or pinned.
export function Neurons({ attention, layer, head, at: { i, j } }) {
  useDark();
  const found = attention.products(layer, head, i, j);
  const title = html`<h2>q · k by dimension</h2>
    <p class="small">query ${i} ${inContext(attention.tokens, i)}<br />key ${j} ${inContext(attention.keys, j)}</p>`;
  if (found === null)
    return html`<section class="neurons" id="neurons">
      ${title}
      <p class="soft small">
        ${
          attention.vectors
            ? `The page holds queries and keys of the first ${attention.vectors.tokens} tokens only.`
            : "This page does not hold queries and keys: it is of whole words, of a model with an encoder, or full."
        }
      </p>
    </section>`;
  return html`<section class="neurons" id="neurons" aria-label="q · k by dimension">
    ${title}
    <${NeuronBars} found=${found} />
    <${NeuronSum} ...${{ found, attention, layer, head, i, j }} />
  </section>`;
}

// A row for each dimension: the query, the key, and a bar for what their product adds to the logit.
function NeuronBars({ found: { query, key, products } }) {
  const each = clamped(560 / products.length, 6, 18);
  const [top, left, middle] = [18, 76, 203];
  const height = top + each * products.length;
  const most = (values) => Math.max(1e-9, ...values.map(Math.abs));
  const [reach, scale] = [most(products), scales.signed(most([...query, ...key]))];
  const length = (value) => (118 * value) / reach;
  const labels = each >= 11 ? 1 : each >= 8 ? 4 : 8; // a number for every so many dimensions
  const largest = indices(products.length)
    .sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]))
    .slice(0, 5)
    .map((n) => `dimension ${n}: ${signed(products[n])}`);
  const fill = (value) => `fill:rgb(${colourOf(scale, value)})`;
  return html`<svg
    viewBox=${`0 0 ${NEURON_WIDTH} ${height}`}
    role="img"
    aria-label=${`What each of ${products.length} dimensions adds to the logit. The largest: ${largest.join(", ")}.`}>
    <text x="29" y="12" text-anchor="middle">q</text>
    <text x="55" y="12" text-anchor="middle">k</text>
    <text x=${middle} y="12" text-anchor="middle">q·k, times the scale</text>
    ${products.map((value, n) => {
      const y = top + n * each;
      return html`<g>
        <title>${`dimension ${n}: q ${signed(query[n])}, k ${signed(key[n])}, adds ${signed(value)}`}</title>
        <rect class="row" x="0" y=${y} width=${NEURON_WIDTH} height=${each} />
        ${n % labels === 0 && html`<text x="13" y=${y + each / 2 + 3.5} text-anchor="end">${n}</text>`}
        <rect x="18" y=${y} width="23" height=${each - 1} style=${fill(query[n])} />
        <rect x="44" y=${y} width="23" height=${each - 1} style=${fill(key[n])} />
        <rect
          class=${value < 0 ? "less" : "more"}
          x=${Math.min(middle, middle + length(value))}
          y=${y}
          width=${Math.max(0.5, Math.abs(length(value)))}
          height=${each - 1}
          data-value=${value} />
      </g>`;
    })}
    <line x1=${middle} x2=${middle} y1=${top} y2=${height} />
    <rect class="edge" x="17.5" y=${top - 0.5} width="24" height=${height - top} />
    <rect class="edge" x="43.5" y=${top - 0.5} width="24" height=${height - top} />
  </svg>`;
}

const signed = (value, digits = 2) => value.toFixed(digits).replace("-", "−");

// The sum in words: of the products, what changes it, and the logit.
function NeuronSum({ attention, layer, head, i, j, found: { products, sum, added } }) {
  const { scale } = attention.vectors;
  const logit = attention.logitsAt(layer, head)(i, j);
  const times = scale === 1 ? "" : ` × ${+scale.toPrecision(3)} (1/√${+(1 / scale ** 2).toFixed(2)})`;
  const parts = `${products.length} products: ${signed(sum / scale)}${times} = `;
  if (logit === null)
    return html`<p id="neuron-sum" class="numbers">
      ${parts}<b>${signed(sum)}</b>, but the mask hides the key: the weight is 0.
    </p>`;
  const isKnown = !attention.cut(layer, head, i, j) && !attention.isMean(layer, head, i, j);
  const change = isKnown && added.length > 0 ? logit - sum : null;
  return html`<p id="neuron-sum" class="numbers" data-sum=${sum}>
      ${parts}<b>${signed(sum)}</b>${
        added.length > 0
          ? ` before ${added.join(" and ")}${
              change === null ? "" : `, which adds ${signed(change)}; the logit is ${signed(logit)}`
            }.`
          : ": this is the logit."
      }
    </p>
    <p class="soft small">
      q and k are as the model multiplies them, after norms and rotations by position. A bar to the right raises the
      logit. The softmax of all logits of the query gives the weights.
    </p>`;
}

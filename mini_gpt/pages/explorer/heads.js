// What several views share: the choice of a layer and a head, labels of heads, places in the text.

import { LayerAndHead } from "../common/controls.js";
import { indices } from "../common/numbers.js";
import { html } from "../common/preact.js";
import { shown } from "../common/tokens.js";

export const MEAN = "mean"; // in the place of a head: the mean of all heads of the layer
export const TYPICAL = "typical"; // in the place of a pinned token: the reader has not chosen one

// What hatching means; false if no pair is masked.
export const masked = (attention) => attention.isMasked && "masked: the query cannot see the key";

// The label of a head as {name, strength}; strength is null for mixed and global heads.
export const labelOf = (attention, layer, head) => {
  const [name, strength] = attention.labels?.[layer]?.[head] ?? [];
  return name ? { name, strength } : null;
};

// Whether mini_gpt.prune has removed the head.
export const isRemoved = (attention, layer, head) => labelOf(attention, layer, head)?.name === "removed";

export const headsOf = (attention, layer) =>
  indices(attention.heads).filter((head) => !isRemoved(attention, layer, head));

export function HeadChoice({ attention, state, set, withMean }) {
  const heads = headsOf(attention, state.layer);
  const removed = indices(attention.heads).filter((head) => !heads.includes(head));
  return html`<div class="controls">
    <${LayerAndHead}
      layers=${attention.layers}
      heads=${withMean ? [...heads, MEAN] : heads}
      ...${{ state, set }}
      titleOf=${(head) => labelOf(attention, state.layer, head)?.name} />
    ${removed.length > 0 && html`<span class="soft" id="removed">removed: ${removed.join(", ")}</span>`}
    ${saidOfHead(attention, state)}
  </div>`;
}

function saidOfHead(attention, { layer, head }) {
  if (head === MEAN) return html`<span class="soft">the mean of all heads of layer ${layer}</span>`;
  const label = labelOf(attention, layer, head);
  if (!label) return html`<span class="soft" id="no-label">no label: not measured; see “All heads”</span>`;
  const { name, strength } = label;
  return html`<span
    ><b id="label">${name}</b
    >${attention.meanings[name] && html` <span class="soft">attends to ${attention.meanings[name]}</span>`}${
      strength !== null && html`<span class="soft">; strength ${strength.toFixed(2)}</span>`
    }</span
  >`;
}

export const NoLabels = () =>
  html`<span class="soft" id="no-labels"
    >Heads have no labels: the model is too large, or its text too short, to measure them for this
    page.${" The command "}<code>eval.py --suite=heads,explorer</code> measures them on many texts and writes this page
    again.</span
  >`;

// Whether a token belongs to the one that is pointed at: {side, at}, a query or a key.
export const isAligned = (attention, { side, at }, n) =>
  (attention.alignment ?? []).some(([key, endKey, query, endQuery]) => {
    const [i, j] = side === "key" ? [n, at] : [at, n];
    return i >= query && i < endQuery && j >= key && j < endKey;
  });

// Whether a key is a true one of a query for a head: by the alignment of the pair, or by the grammar of the text if the
// head's label is a relation of it. Null if neither is known.
export function truthOf(attention, layer, head) {
  if (attention.alignment) return (i, j) => isAligned(attention, { side: "query", at: i }, j);
  const pairs = attention.relations?.[labelOf(attention, layer, head)?.name];
  const known = new Set(pairs?.map(([i, j]) => i * attention.columns + j));
  return pairs ? (i, j) => known.has(i * attention.columns + j) : null;
}

// A token with some of the text before it.
export const inContext = (tokens, n) =>
  html`<span class="context"
    >${tokens
      .slice(Math.max(0, n - 12), n)
      .map(shown)
      .join("")
      .slice(-16)}<mark>${shown(tokens[n])}</mark></span
  >`;

// What several views share: the choice of a layer and a head, labels of heads, places in the text.

import { LayerAndHead } from "../common/controls.js";
import { indices } from "../common/numbers.js";
import { html } from "../common/preact.js";
import { shown } from "../common/tokens.js";

export const MEAN = "mean"; // in the place of a head: the mean of all heads of the layer
export const TYPICAL = "typical"; // in the place of a pinned token: the reader has not chosen one
// What a head with this label attends to, as --suite=heads measures it.
const LABELS = {
  "previous token": "the token before",
  "next token": "the token after",
  self: "the token itself",
  "first token": "the first token",
  "fixed offset": "a token at one fixed distance",
  "local window": "the token and its near neighbours",
  delimiter: "line ends, punctuation and other symbols",
  "current word": "other tokens of the same word",
  "word start": "the first token of a word",
  "duplicate token": "earlier occurrences of the same token",
  "rare token": "rare tokens",
  induction: "the token that followed an earlier occurrence",
  "matching bracket": "the matching bracket",
  "earlier use of a name": "earlier uses of the same name",
  "definition of a call": "the definition of the function that is called",
  "subject of the verb": "the subject of this verb",
  "subject of the next verb": "the subject of the verb that comes next",
  "object of the verb": "the object of this verb",
  "verb of the object": "the verb of this object",
  "antecedent of the pronoun": "the noun that this pronoun stands for",
  "determiner of the noun": "the determiner of this noun",
  "answer to the question": "the noun in the story that answers the question",
  "noun of the adjective": "the noun that this adjective describes",
  "earlier person": "earlier nouns that name persons",
  "earlier animal": "earlier nouns that name animals",
  "earlier thing": "earlier nouns that name things",
  "adjective of the noun": "the adjective before this noun",
  "noun of the same class": "other nouns of the same class: person, animal or thing",
  global: "all tokens about equally",
  mixed: "no single kind of token",
  "source separator": "the token before the source",
  "last source token": "the end of the source",
  "source delimiter": "punctuation in the source",
  diagonal: "the same place in the source",
  "token read": "source tokens equal to the last one read",
  "token to write": "source tokens equal to the next one",
  aligned: "the aligned source tokens",
};

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
    ><b id="label">${name}</b>${LABELS[name] && html` <span class="soft">attends to ${LABELS[name]}</span>`}${
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

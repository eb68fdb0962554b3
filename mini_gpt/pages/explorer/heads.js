"use strict";
// What several views share: the choice of a layer and a head, labels of heads, places in the text.

const MEAN = "mean"; // in the place of a head: the mean of all heads of the layer
const LABELS = {
  // what a head with this label attends to, as --suite=heads measures it
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
const masked = (attention) => attention.isMasked && "masked: the query cannot see the key";

// The label of a head as {name, strength}; strength is null for mixed and global heads.
const labelOf = (attention, layer, head) => {
  const [name, strength] = attention.labels?.[layer]?.[head] ?? [];
  return name ? { name, strength } : null;
};

function HeadChoice({ attention, state, set, withMean }) {
  const numbers = (count) => Array.from({ length: count }, (_, n) => [n, String(n)]);
  const label = labelOf(attention, state.layer, state.head);
  const heads = withMean ? [...numbers(attention.heads), [MEAN, "mean"]] : numbers(attention.heads);
  return html`<div class="controls">
    <${Choice}
      id="layer"
      name="layer"
      options=${numbers(attention.layers)}
      value=${state.layer}
      onChoose=${(layer) => set({ layer })} />
    <${Choice}
      id="head"
      name="head"
      options=${heads}
      value=${state.head}
      onChoose=${(head) => set({ head })}
      titleOf=${(head) => labelOf(attention, state.layer, head)?.name} />
    ${
      state.head === MEAN
        ? html`<span class="soft">the mean of all heads of layer ${state.layer}</span>`
        : label
          ? html`<span
              ><b id="label">${label.name}</b>${" "}
              ${LABELS[label.name] && html`<span class="soft">attends to ${LABELS[label.name]}</span>`}
              ${label.strength !== null && html`<span class="soft">; strength ${label.strength.toFixed(2)}</span>`}</span
            >`
          : html`<span class="soft" id="no-label">no label: not measured; see “All heads”</span>`
    }
  </div>`;
}

const NoLabels = () =>
  html`<span class="soft" id="no-labels"
    >Heads have no labels: the model is too large, or its text too short, to measure them for this page. The
    command${" "} <code>eval.py --suite=heads,explorer</code> measures them on many texts and writes this page
    again.</span
  >`;

// Whether a token belongs to the one that is pointed at: {side, at}, a query or a key.
const isAligned = (attention, { side, at }, n) =>
  (attention.alignment ?? []).some(([key, endKey, query, endQuery]) => {
    const [i, j] = side === "key" ? [n, at] : [at, n];
    return i >= query && i < endQuery && j >= key && j < endKey;
  });

// A token with some of the text before it.
const inContext = (tokens, n) =>
  html`<span class="context"
    >${tokens
      .slice(Math.max(0, n - 12), n)
      .map(shown)
      .join("")
      .slice(-16)}<mark>${shown(tokens[n])}</mark></span
  >`;

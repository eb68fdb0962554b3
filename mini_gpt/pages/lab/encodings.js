// What the page says of an encoding, by its kind; sinusoids, RoPE and ALiBi have words of their own. No view.
// An encoding is {name, title, kind, trained} with its numbers: table[i][n]; or queries[head][i] and keys[head][i], a
// matrix for each position; or bias[head][i][j]. Sinusoids and RoPE also have the `frequencies` of pairs of columns, in
// radians per token, and ALiBi has `slopes`.

import { columnOf, number, term, terms } from "./terms.js";

const isZero = ({ table, bias }) => (table ?? bias).flat(2).every((value) => value === 0);

// formula, input, split, score: of the steps. cause: why the order matters, or null. adds: what adds the bias.
// atTable, atRow and atLogit explain a number. isShown: whether the bias is a matrix of its own.
const PLAIN = {
  formula: "",
  input: "",
  split: "Nothing is computed here.",
  score: "",
  cause: null,
  isShown: false,
  atLogit: () => "",
};

const KINDS = {
  none: () => ({}),
  // What a run does in one head, with its own encoding or without: a rotation, a bias, both, or nothing here.
  run: ({ title, queries, bias }) => ({
    ...(queries && {
      split: `${title} rotates queries and keys by their positions.`,
      atRow: KINDS.rotation({ title }).atRow,
    }),
    formula: bias ? " + B" : "",
    score: bias ? "B is what the run adds to the logits; −∞ hides a key, such as one outside a window." : "",
    input: `Positions: ${title}. What the run adds to embeddings is already in X.`,
    adds: "the run",
    cause: title,
    isShown: bias !== undefined,
    atLogit: (head, i, j) => (bias ? ` + ${term(bias[head][i][j])}` : ""),
  }),
  table: (encoding) => ({
    input: `The encoding ${encoding.title} adds P${asInitialized(encoding)}.`,
    cause: isZero(encoding) ? null : "P",
    atTable: (i, j) => `${number(encoding.table[i][j])}, which the encoding ${encoding.title} adds at position ${i}`,
  }),
  rotation: (encoding) => ({
    input: `The encoding ${encoding.title} adds nothing here: it rotates queries and keys in step 2.`,
    split: `The encoding ${encoding.title} rotates queries and keys by their positions${asInitialized(encoding)}.`,
    cause: encoding.title,
    atRow: (row, matrix, i, j) => ({
      text: `multiplied with the matrix of position ${i}: ${terms(row, columnOf(matrix[i], j))}`,
      columns: row.map((_, n) => n),
    }),
  }),
  bias: (encoding) => ({
    formula: " + B",
    input: `The encoding ${encoding.title} adds nothing here: it adds a bias to the logits in step 3.`,
    score: `The encoding ${encoding.title} adds a bias B to the logits${asInitialized(encoding)}.`,
    cause: isZero(encoding) ? null : encoding.title,
    isShown: true,
    atLogit: (head, i, j) => ` + ${term(encoding.bias[head][i][j])}`,
  }),
};

function asInitialized(encoding) {
  if (!encoding.trained) return "";
  const zeros = encoding.kind !== "rotation" && isZero(encoding) ? ", which are all 0" : "";
  return `, here at its initial values${zeros}`;
}

// By name.
const OWN = {
  sinusoidal: ({ table, frequencies }) => ({
    input: "P has the sine and the cosine of each position. It is added once, here.",
    cause: "the sinusoids",
    atTable: (i, j) => `${j % 2 ? "cos" : "sin"}(${i} · ${+frequencies[j >> 1].toFixed(5)}) = ${number(table[i][j])}`,
  }),
  rope: ({ frequencies }) => ({
    input: "RoPE adds nothing here: it rotates queries and keys in step 2.",
    split: "RoPE rotates each pair of columns of Q and K by an angle that grows with the position.",
    atRow: (row, _, i, j) => {
      const half = row.length / 2;
      const [first, second] = [j % half, (j % half) + half];
      const angle = number(i * frequencies[first]);
      const [other, sign] = j < half ? [second, "−"] : [first, "+"];
      const said = `RoPE rotates the pair (${first + 1}, ${second + 1}) of the head by ${angle} radians`;
      return {
        text: `${said}: ${term(row[j])}·cos(${angle}) ${sign} ${term(row[other])}·sin(${angle})`,
        columns: [first, second],
      };
    },
  }),
  alibi: ({ slopes }) => ({
    formula: " − slope·distance",
    input: "ALiBi adds nothing here: it lowers logits in step 3.",
    score: `ALiBi's ${slopes.length === 1 ? "slope is" : "slopes are"} ${slopes.map((slope) => `1/${1 / slope}`).join(" and ")}.`,
    isShown: false,
    atLogit: (head, i, j) => ` − ${Math.abs(i - j)}/${1 / slopes[head]}`,
  }),
};

export const wordsAbout = (encoding) => ({
  ...PLAIN,
  adds: encoding.title,
  ...KINDS[encoding.kind](encoding),
  ...OWN[encoding.name]?.(encoding),
});

// All matrices that the page shows, with names and labels, sorted into the steps of multi-head attention. No view.

import { wordsAbout } from "./encodings.js";
import { settingsOf, wordsOf } from "./state.js";
import { subjectOf } from "./subject.js";

export const STEPS = [
  { id: "input", number: null, title: "Input" },
  { id: "project", number: 1, title: "Project" },
  { id: "split", number: 2, title: "Split into heads" },
  { id: "score", number: 3, title: "Score" },
  { id: "mix", number: 4, title: "Softmax, times V" },
  { id: "output", number: 5, title: "Concatenate, project" },
];
const subscript = (head) => "₁₂"[head];

// {id: {id, step, name, python, values, rows, columns, scale, head}}. name: as in formulas. python: a name for NumPy.
// rows, columns: labels. scale: signed or weights. head: whose matrix it is, or null.
export function matricesShown(data, state, result) {
  const shown = {};
  const words = wordsOf(data, state);
  const dimensions = data.dimensions;
  const { matrices, x } = settingsOf(data, state);
  const { first, aboutX } = subjectOf(data);
  const counted = (from, to) => Array.from({ length: to - from }, (_, n) => String(first + from + n));
  const all = counted(0, matrices.Q[0].length);
  const add = (matrix) => {
    shown[matrix.id] = { python: matrix.name, scale: "signed", head: null, ...matrix };
  };
  const places = words.map((word, place) => `${place} ${word}`); // positions count from 0
  const input = { step: "input", rows: words, columns: dimensions };
  add({ ...input, id: "X", name: "X", values: x, about: aboutX });
  if (result.added) {
    add({ ...input, id: "P", name: "P", values: result.added, rows: places });
    add({ ...input, id: "input", name: "X + P", python: "X_P", values: result.input, rows: places });
  }
  const project = { step: "project", columns: all };
  for (const letter of ["Q", "K", "V"])
    add({ ...project, id: `W${letter}`, name: `W_${letter}`, values: matrices[letter], rows: dimensions });
  for (const letter of ["Q", "K", "V"])
    add({ ...project, id: letter, name: letter, values: result[letter.toLowerCase()], rows: words });
  result.heads.forEach((head, n) => {
    const own = counted(n * result.width, (n + 1) * result.width);
    const names = (letter) => ({ id: `${letter}${n}`, name: `${letter}${subscript(n)}`, python: `${letter}_${n + 1}` });
    const addOfHead = (letter, matrix) => add({ ...names(letter), rows: words, columns: own, head: n, ...matrix });
    for (const letter of ["Q", "K", "V"]) addOfHead(letter, { step: "split", values: head[letter.toLowerCase()] });
    if (wordsAbout(result.encoding).isShown) {
      const bias = result.encoding.bias[n].slice(0, words.length).map((row) => row.slice(0, words.length));
      addOfHead("B", { step: "score", values: bias, columns: words });
    }
    addOfHead("S", { step: "score", values: head.logits, columns: words });
    // logits: of hidden keys, -Infinity.
    addOfHead("A", { step: "mix", values: head.weights, columns: words, scale: "weights", logits: head.logits });
    addOfHead("O", { step: "mix", values: head.out });
  });
  const output = { step: "output", columns: counted(0, matrices.O[0].length) };
  add({ ...output, id: "O", name: "O", values: result.concatenated, rows: words, columns: all });
  add({ ...output, id: "WO", name: "W_O", values: matrices.O, rows: all });
  add({ ...output, id: "Y", name: "Y", values: result.y, rows: words });
  return shown;
}

// Labels with their places, where a label is there more than once.
export const named = (labels) =>
  labels.map((label, n) => (labels.indexOf(label) === labels.lastIndexOf(label) ? label : `${label} (${n})`));

export const ofStep = (shown, step) => Object.values(shown).filter((matrix) => matrix.step === step);
export const shapeOf = ({ values }) => `${values.length} × ${values[0].length}`;

// The numbers of matrices as lines of tab-separated text, with labels, for a spreadsheet.
export const asTable = (matrices) =>
  matrices
    .map(({ name, values, rows, columns }) =>
      [[name, ...columns].join("\t"), ...values.map((row, i) => [rows[i], ...row].join("\t"))].join("\n"),
    )
    .join("\n\n");

// The numbers of matrices as Python.
export function asNumpy(matrices) {
  const number = (value) => (value === -Infinity ? "-np.inf" : String(value));
  const literal = ({ python, values }) =>
    `${python} = np.array([${values.map((row) => `[${row.map(number).join(", ")}]`).join(",\n    ")}])`;
  return ["import numpy as np", "", ...matrices.map(literal)].join("\n");
}

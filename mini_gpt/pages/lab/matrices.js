"use strict";
// All matrices that the page shows, with names and labels, sorted into the steps of multi-head attention. No view.

const STEPS = [
  { id: "input", number: null, title: "Input" },
  { id: "project", number: 1, title: "Project" },
  { id: "split", number: 2, title: "Split into heads" },
  { id: "score", number: 3, title: "Score" },
  { id: "mix", number: 4, title: "Softmax, times V" },
  { id: "output", number: 5, title: "Concatenate, project" },
];
const subscript = (head) => "₁₂"[head];
const counted = (from, to) => Array.from({ length: to - from }, (_, n) => String(from + n + 1));

// {id: {id, step, name, python, values, rows, columns, scale, head}}. name: as in formulas. python: a name for NumPy.
// rows, columns: labels. scale: signed or weights. head: whose matrix it is, or null.
function matricesShown(data, state, result) {
  const held = {};
  const words = wordsOf(data, state);
  const dimensions = data.dimensions;
  const all = counted(0, dimensions.length);
  const { matrices, x } = settingsOf(data, state);
  const add = (id, step, name, python, values, rows, columns, scale = "signed", head = null) => {
    held[id] = { id, step, name, python, values, rows, columns, scale, head };
  };
  add("X", "input", "X", "X", x, words, dimensions);
  if (result.added) {
    add("P", "input", "P", "P", result.added, words, dimensions);
    add("input", "input", "X + P", "X_P", result.input, words, dimensions);
  }
  for (const letter of ["Q", "K", "V"])
    add(`W${letter}`, "project", `W_${letter}`, `W_${letter}`, matrices[letter], dimensions, all);
  for (const letter of ["Q", "K", "V"])
    add(letter, "project", letter, letter, result[letter.toLowerCase()], words, all);
  result.heads.forEach((head, n) => {
    const own = counted(n * result.width, (n + 1) * result.width);
    const of = (letter) => `${letter}${subscript(n)}`;
    for (const letter of ["Q", "K", "V"])
      add(
        `${letter}${n}`,
        "split",
        of(letter),
        `${letter}_${n + 1}`,
        head[letter.toLowerCase()],
        words,
        own,
        "signed",
        n,
      );
    add(`S${n}`, "score", of("S"), `S_${n + 1}`, head.logits, words, words, "signed", n);
    add(`A${n}`, "mix", of("A"), `A_${n + 1}`, head.weights, words, words, "weights", n);
    held[`A${n}`].logits = head.logits; // of hidden keys, -Infinity
    add(`O${n}`, "mix", of("O"), `O_${n + 1}`, head.out, words, own, "signed", n);
  });
  add("O", "output", "O", "O", result.concatenated, words, all);
  add("WO", "output", "W_O", "W_O", matrices.O, all, all);
  add("Y", "output", "Y", "Y", result.y, words, all);
  return held;
}

const ofStep = (held, step) => Object.values(held).filter((matrix) => matrix.step === step);
const shapeOf = ({ values }) => `${values.length} × ${values[0].length}`;

// The numbers of matrices as lines of tab-separated text, with labels, for a spreadsheet.
const asTable = (matrices) =>
  matrices
    .map(({ name, values, rows, columns }) =>
      [[name, ...columns].join("\t"), ...values.map((row, i) => [rows[i], ...row].join("\t"))].join("\n"),
    )
    .join("\n\n");

// The numbers of matrices as Python.
function asNumpy(matrices) {
  const number = (value) => (value === -Infinity ? "-np.inf" : String(value));
  const literal = ({ python, values }) =>
    `${python} = np.array([${values.map((row) => `[${row.map(number).join(", ")}]`).join(",\n    ")}])`;
  return ["import numpy as np", "", ...matrices.map(literal)].join("\n");
}

"use strict";
// How a number of the page is computed, as text, and from which rows and columns. No view.

const number = (value, digits = 2) =>
  value === -Infinity ? "−∞" : (Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits).replace("-", "−");
// Three digits or so, as cells show it.
function brief(value) {
  const size = Math.abs(value);
  return size >= 9999.5 && size < Infinity
    ? value.toExponential(0).replace("e+", "e").replace("-", "−")
    : number(value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}
const term = (value) => (value < -0.005 ? `(${number(value)})` : number(value));
const terms = (a, b) => a.map((value, n) => `${term(value)}·${term(b[n])}`).join(" + ");
const columnOf = (matrix, j) => matrix.map((row) => row[j]);
// exp of a value, with three digits.
function exponential(value) {
  const exp = Math.exp(value);
  const text = exp >= 999.5 || exp < 0.001 ? exp.toExponential(2).replace("e+", "e") : exp.toPrecision(3);
  return text.replace("-", "−");
}

function aboutPositions(i, j, width) {
  const angle = i * frequency(Math.floor(j / 2), width);
  const [name, value] = j % 2 ? ["cos", Math.cos(angle)] : ["sin", Math.sin(angle)];
  return `${name}(${i} · ${frequency(Math.floor(j / 2), width)}) = ${number(value)}`;
}

function aboutRotation(head, letter, i, j) {
  const row = head.plain[letter][i];
  const half = row.length / 2;
  const isFirst = j < half;
  const other = isFirst ? j + half : j - half;
  const angle = number(i * frequency(j % half, row.length));
  const parts = `${term(row[j])}·cos(${angle}) ${isFirst ? "−" : "+"} ${term(row[other])}·sin(${angle})`;
  const pair = `(${Math.min(j, other) + 1}, ${Math.max(j, other) + 1})`;
  return `RoPE rotates the pair ${pair} of the head by ${angle} radians: ${parts} = ${number(head[letter][i][j])}`;
}

function aboutLogit(head, state, i, j, words) {
  if (head.logits[i][j] === -Infinity) return `hidden by the causal mask: ${words[j]} comes after ${words[i]}`;
  const sum = terms(head.q[i], head.k[j]);
  const width = head.q[0].length;
  const bias = state.position === "alibi" ? ` − ${Math.abs(i - j)}/${1 / head.slope}` : "";
  return `${state.scale ? `(${sum}) / √${width}` : sum}${bias} = ${number(head.logits[i][j])}`;
}

function aboutWeight(head, state, i, j, words) {
  if (head.logits[i][j] === -Infinity) return `0, because the key ${words[j]} is hidden`;
  const seen = head.logits[i].filter((value) => value !== -Infinity);
  const most = Math.max(...seen);
  const isLarge = most > 20 * state.temperature;
  const shift = isLarge ? most : 0;
  const part = (value) => (value - shift) / state.temperature;
  const divided = state.temperature === 1 ? "" : ` / ${state.temperature}`;
  const logit = number(head.logits[i][j] - shift, state.temperature < 1 ? 3 : 2);
  const sum = seen.reduce((all, value) => all + Math.exp(part(value)), 0);
  const exps = seen.map((value) => exponential(part(value))).join(" + ");
  const less = isLarge ? `minus the largest logit of the row, ${number(most)}: ` : "";
  const share = `${exponential(part(head.logits[i][j]))} / ${exponential(Math.log(sum))}`;
  return `${less}exp(${logit}${divided}) / (${exps}) = ${share} = ${number(head.weights[i][j], 3)}`;
}

// {name, text, from} of the cell {id, i, j}. from: {id: {rows, columns}}, what it is computed from; null: all of them.
function explain({ held, state, result }, { id, i, j }) {
  const matrix = held[id];
  const label = `${matrix.name}[${matrix.rows[i]}, ${matrix.columns[j]}]`;
  const value = number(matrix.values[i][j]);
  const said = (text, from = {}) => ({ name: label, text, from });
  const row = (n) => ({ rows: [n], columns: null });
  const column = (n) => ({ rows: null, columns: [n] });
  const cell = { rows: [i], columns: [j] };
  const words = held.X.rows;
  const input = result.added ? "input" : "X";
  if (id === "X")
    return said(
      `embedding of ${matrix.rows[i]} in the dimension “${matrix.columns[j]}”, chosen by hand. Type another number.`,
    );
  if (id[0] === "W")
    return said(
      `${number(matrix.values[i][j])}, row “${matrix.rows[i]}”, column ${matrix.columns[j]}. Type another number.`,
    );
  if (id === "P") return said(aboutPositions(i, j, matrix.columns.length));
  if (id === "input")
    return said(`${term(held.X.values[i][j])} + ${term(held.P.values[i][j])} = ${value}`, { X: cell, P: cell });
  if (["Q", "K", "V"].includes(id)) {
    const weights = held[`W${id}`].values;
    return said(`${terms(result.input[i], columnOf(weights, j))} = ${value}`, {
      [input]: row(i),
      [`W${id}`]: column(j),
    });
  }
  if (id === "O") {
    const head = Math.floor(j / result.width);
    return said(`${value}, column ${(j % result.width) + 1} of ${held[`O${head}`].name}`, {
      [`O${head}`]: { rows: [i], columns: [j % result.width] },
    });
  }
  if (id === "Y")
    return said(`${terms(result.concatenated[i], columnOf(held.WO.values, j))} = ${value}`, {
      O: row(i),
      WO: column(j),
    });
  const n = matrix.head;
  const head = result.heads[n];
  const kind = id[0];
  if (kind === "S") return said(aboutLogit(head, state, i, j, words), { [`Q${n}`]: row(i), [`K${n}`]: row(j) });
  if (kind === "A") return said(aboutWeight(head, state, i, j, words), { [`S${n}`]: row(i) });
  if (kind === "O")
    return said(`${terms(head.weights[i], columnOf(head.v, j))} = ${value}`, {
      [`A${n}`]: row(i),
      [`V${n}`]: column(j),
    });
  const from = { [kind]: { rows: [i], columns: [n * result.width + j] } };
  if (state.position === "rope" && kind !== "V") {
    const half = result.width / 2;
    const pair = [j % half, (j % half) + half].map((place) => n * result.width + place);
    return said(aboutRotation(head, kind.toLowerCase(), i, j), { [kind]: { rows: [i], columns: pair } });
  }
  return said(`${value}, column ${n * result.width + j + 1} of ${kind}`, from);
}

// How a number of the page is computed, as text, and from which rows and columns. No view.

import { isHidden } from "./attention.js";
import { wordsAbout } from "./encodings.js";
import { named } from "./matrices.js";
import { columnOf, number, term, terms } from "./terms.js";

// Three digits or so, as cells show it.
export function brief(value) {
  const size = Math.abs(value);
  return size >= 9999.5 && !isHidden(value)
    ? value.toExponential(0).replace("e+", "e").replace("-", "−")
    : number(value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}
// exp of a value, with three digits.
function exponential(value) {
  const exp = Math.exp(value);
  const text = exp >= 999.5 || exp < 0.001 ? exp.toExponential(2).replace("e+", "e") : exp.toPrecision(3);
  return text.replace("-", "−");
}

function aboutLogit({ heads, encoding }, n, state, i, j, words) {
  const head = heads[n];
  if (head.logits[i][j] === -Infinity) return `hidden by the causal mask: ${words[j]} comes after ${words[i]}`;
  if (isHidden(head.logits[i][j])) return `hidden by the bias of ${wordsAbout(encoding).adds}`;
  const sum = terms(head.q[i], head.k[j]);
  const width = head.q[0].length;
  const bias = wordsAbout(encoding).atLogit(n, i, j);
  return `${state.scale ? `(${sum}) / √${width}` : sum}${bias} = ${number(head.logits[i][j])}`;
}

function aboutWeight(head, state, i, j, words) {
  const seen = head.logits[i].filter((value) => !isHidden(value));
  if (head.weights[i][j] > 0 && !seen.length) return "the softmax is even: the bias hides all keys that the mask shows";
  if (isHidden(head.logits[i][j])) return `0, because the key ${words[j]} is hidden`;
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
export function explain({ held, state, result }, { id, i, j }) {
  const matrix = held[id];
  const [rows, columnNames, words] = [matrix.rows, matrix.columns, held.X.rows].map(named);
  const label = `${matrix.name}[${rows[i]}, ${columnNames[j]}]`;
  const value = number(matrix.values[i][j]);
  const said = (text, from = {}) => ({ name: label, text, from });
  const row = (n) => ({ rows: [n], columns: null });
  const column = (n) => ({ rows: null, columns: [n] });
  const cell = { rows: [i], columns: [j] };
  const input = result.added ? "input" : "X";
  if (id === "X") return said(`${value}, ${matrix.about(rows[i], columnNames[j])}. Type another number.`);
  if (id[0] === "W")
    return said(
      `${number(matrix.values[i][j])}, row “${matrix.rows[i]}”, column ${matrix.columns[j]}. Type another number.`,
    );
  const about = wordsAbout(result.encoding);
  if (id === "P") return said(about.atTable(i, j));
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
    return said(`${value}, column ${matrix.columns[j]} of ${held[`O${head}`].name}`, {
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
  if (kind === "S")
    return said(aboutLogit(result, n, state, i, j, words), { [`Q${n}`]: row(i), [`K${n}`]: row(j), [`B${n}`]: cell });
  if (kind === "B") return said(`${value}, which ${about.adds} adds to the logit of positions ${i} and ${j}`);
  if (kind === "A") return said(aboutWeight(head, state, i, j, words), { [`S${n}`]: row(i) });
  if (kind === "O")
    return said(`${terms(head.weights[i], columnOf(head.v, j))} = ${value}`, {
      [`A${n}`]: row(i),
      [`V${n}`]: column(j),
    });
  const columns = (own) => ({ [kind]: { rows: [i], columns: own.map((place) => n * result.width + place) } });
  const turns = { Q: result.encoding.queries, K: result.encoding.keys }[kind];
  if (turns) {
    const { text, columns: own } = about.atRow(head.plain[kind.toLowerCase()][i], turns[n], i, j);
    return said(`${text} = ${value}`, columns(own));
  }
  return said(`${value}, column ${matrix.columns[j]} of ${kind}`, columns([j]));
}

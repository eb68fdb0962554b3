// Multi-head attention of one sentence, with the result of each step. No view and no state.
// A matrix is an array of rows. Positions count from 0.

const product = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, value, k) => sum + value * b[k][j], 0)));
const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
const columns = (matrix, from, to) => matrix.map((row) => row.slice(from, to));
export const filled = (rows, width, valueAt) =>
  Array.from({ length: rows }, (_, i) => Array.from({ length: width }, (_, j) => valueAt(i, j)));

export const HIDDEN = -1e29; // a smaller logit belongs to a hidden key: numbers of the reader are far above it
export const isHidden = (logit) => logit < HIDDEN;

// Each row times the matrix of its position.
const rotated = (matrix, turns) => (turns ? matrix.map((row, place) => product([row], turns[place])[0]) : matrix);

// The softmax of a row over its visible keys; hidden keys have weight 0.
function softmax(row, temperature) {
  const top = Math.max(...row);
  const exps = row.map((value) => Math.exp((value - top) / temperature));
  const sum = exps.reduce((a, b) => a + b);
  return exps.map((value) => value / sum);
}

// One head. plain: q, k and v before a rotation. The logit of a key that the mask hides is -Infinity.
function attend(plain, { encoding: { queries, keys, bias }, scale, causal, temperature }, head) {
  const [q, k] = [rotated(plain.q, queries?.[head]), rotated(plain.k, keys?.[head])];
  const factor = scale ? 1 / Math.sqrt(q[0].length) : 1;
  const logits = filled(q.length, k.length, (i, j) =>
    causal && j > i ? -Infinity : factor * dot(q[i], k[j]) + (bias?.[head][i][j] ?? 0),
  );
  const weights = logits.map((row) => softmax(row, temperature));
  return { plain, q, k, v: plain.v, logits, weights, out: product(weights, plain.v) };
}

// All steps. settings: x, matrices {Q, K, V, O}, heads, encoding, scale, causal, temperature. encodings.js has the form
// of an encoding. `added` is the matrix of positions that is added to x, or null.
export function attention(settings) {
  const { x, matrices, heads, encoding } = settings;
  const width = matrices.Q[0].length / heads;
  const added = encoding.table?.slice(0, x.length) ?? null;
  const input = added ? filled(x.length, x[0].length, (i, n) => x[i][n] + added[i][n]) : x;
  const [q, k, v] = [matrices.Q, matrices.K, matrices.V].map((matrix) => product(input, matrix));
  const each = Array.from({ length: heads }, (_, head) => {
    const part = (matrix) => columns(matrix, head * width, (head + 1) * width);
    return attend({ q: part(q), k: part(k), v: part(v) }, settings, head);
  });
  const concatenated = x.map((_, i) => each.flatMap(({ out }) => out[i]));
  const y = product(concatenated, matrices.O);
  return { encoding, added, input, q, k, v, width, heads: each, concatenated, y };
}

"use strict";
// Multi-head attention of one sentence, with the result of each step. No view and no state.
// A matrix is an array of rows. Positions count from 0.

const product = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, value, k) => sum + value * b[k][j], 0)));
const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
const columns = (matrix, from, to) => matrix.map((row) => row.slice(from, to));
const filled = (rows, width, valueAt) =>
  Array.from({ length: rows }, (_, i) => Array.from({ length: width }, (_, j) => valueAt(i, j)));

const BASE = 10_000; // of sinusoids and of RoPE

// Radians per token of pair i: base^(-2i/width).
const frequency = (pair, width) => BASE ** ((-2 * pair) / width);

// Dimension 2i is sin(p · frequency of pair i), dimension 2i+1 the cosine (Vaswani et al. 2017, 3.5).
const sinusoids = (length, width) =>
  filled(length, width, (place, n) => {
    const angle = place * frequency(Math.floor(n / 2), width);
    return n % 2 ? Math.cos(angle) : Math.sin(angle);
  });

// RoPE: dimensions i and i + width/2 are a pair, which is rotated by the position (Su et al. 2021; half-split layout).
const rotated = (matrix) =>
  matrix.map((row, place) =>
    row.map((value, n) => {
      const half = row.length / 2;
      const angle = place * frequency(n % half, row.length);
      return n < half
        ? value * Math.cos(angle) - row[n + half] * Math.sin(angle)
        : value * Math.cos(angle) + row[n - half] * Math.sin(angle);
    }),
  );

// ALiBi: 2^(-8i/heads), i = 1..heads, for a power of two (Press et al. 2022, 3).
const alibiSlopes = (heads) => Array.from({ length: heads }, (_, n) => 2 ** ((-8 * (n + 1)) / heads));

// The softmax of a row over its visible keys; hidden keys have weight 0.
function softmax(row, temperature) {
  const top = Math.max(...row);
  const exps = row.map((value) => Math.exp((value - top) / temperature));
  const sum = exps.reduce((a, b) => a + b);
  return exps.map((value) => value / sum);
}

// One head. plain: q, k and v before a rotation. The logit of a hidden key is -Infinity.
function attend(plain, { position, scale, causal, temperature }, slope) {
  const [q, k] = [plain.q, plain.k].map((matrix) => (position === "rope" ? rotated(matrix) : matrix));
  const factor = scale ? 1 / Math.sqrt(q[0].length) : 1;
  const bias = (i, j) => (position === "alibi" ? -slope * Math.abs(i - j) : 0);
  const logits = filled(q.length, k.length, (i, j) =>
    causal && j > i ? -Infinity : factor * dot(q[i], k[j]) + bias(i, j),
  );
  const weights = logits.map((row) => softmax(row, temperature));
  return { plain, q, k, v: plain.v, slope, logits, weights, out: product(weights, plain.v) };
}

// All steps. settings: x, matrices {Q, K, V, O}, heads, position (none, sinusoidal, rope or alibi), scale, causal,
// temperature. `added` is the matrix of positions that is added to x, or null.
function attention(settings) {
  const { x, matrices, heads, position } = settings;
  const width = matrices.Q[0].length / heads;
  const added = position === "sinusoidal" ? sinusoids(x.length, x[0].length) : null;
  const input = added ? filled(x.length, x[0].length, (i, n) => x[i][n] + added[i][n]) : x;
  const [q, k, v] = [matrices.Q, matrices.K, matrices.V].map((matrix) => product(input, matrix));
  const slopes = alibiSlopes(heads);
  const each = slopes.map((slope, head) => {
    const part = (matrix) => columns(matrix, head * width, (head + 1) * width);
    return attend({ q: part(q), k: part(k), v: part(v) }, settings, slope);
  });
  const concatenated = x.map((_, i) => each.flatMap(({ out }) => out[i]));
  return { added, input, q, k, v, width, heads: each, concatenated, y: product(concatenated, matrices.O) };
}

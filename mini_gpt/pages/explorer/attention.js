// Decode the page's attention.
// The page stores each row's largest logit and the quantised distances below it. The weights are computed from these.

import { bytesOf } from "../common/arrays.js";
import { indices } from "../common/numbers.js";
import { shown } from "../common/tokens.js";
import { MEAN, headsOf } from "./heads.js";

// The value of a key, computed again if others were used since; `most` values are kept.
function remembered(cache, key, most, compute) {
  const value = cache.get(key) ?? compute();
  cache.delete(key);
  cache.set(key, value);
  if (cache.size > most) cache.delete(cache.keys().next().value);
  return value;
}

export class Attention {
  constructor(data, levels) {
    Object.assign(this, data);
    this.isCross = "keys" in data; // queries and keys are different texts
    this.keys = data.keys ?? data.tokens; // of the columns; `tokens` are those of the rows, the queries
    [this.rowLabels, this.columnLabels] = [this.tokens.map(shown), this.keys.map(shown)];
    this.rows = this.tokens.length;
    this.columns = this.keys.length;
    this.levels_ = levels;
    this.longest = Math.max(this.rows, this.columns);
    this.rowMax = new Float32Array(bytesOf(data.row_max).buffer);
    this.perHead = data.causal ? (this.rows * (this.rows + 1)) / 2 : this.rows * this.columns;
    this.cache = new Map(); // weights of the heads that were shown last
    this.unpacked = new Map();
    this.vectors = data.vectors && vectorsOf(data.vectors);
    this.others = this.kept ? this.planes(levels) : null; // of a long text; null if all weights are in the page
    const weightAt = this.weightsAt(0, 0);
    const visible = this.tokens.map((_, i) => this.keys.filter((_, j) => weightAt(i, j) !== null).length);
    this.isMasked = Math.min(...visible) < this.columns; // whether a query of the first head does not see all keys
    this.widest = visible.lastIndexOf(Math.max(...visible)); // the last of the queries that see the most keys
  }
  // The planes of largest.py: arrays of bytes, with an entry for each head, query and kept key, or block, or with one
  // entry.
  planes(bytes) {
    const queries = this.layers * this.heads * this.rows;
    const blocks = Math.ceil(this.columns / this.block);
    let at = 0;
    const next = (each) => bytes.subarray(at, (at += queries * each));
    const [gaps, highGaps, levels, means] = [next(this.kept), next(this.kept), next(this.kept), next(blocks)];
    const [first, highFirst, last, highLast] = [next(1), next(1), next(1), next(1)];
    return { gaps, highGaps, levels, means, first, highFirst, last, highLast, blocks };
  }
  // The levels of a head's pairs, and 1 for each pair whose own weight is in the page.
  ofHead(key) {
    if (!this.others) return { levels: this.levels_.subarray(key * this.perHead, (key + 1) * this.perHead), own: null };
    return remembered(this.unpacked, key, 4, () => {
      const levels = new Uint8Array(this.perHead).fill(this.hidden);
      const own = new Uint8Array(this.perHead);
      const o = this.others;
      for (let i = 0; i < this.rows; i++) {
        const query = key * this.rows + i;
        const start = this.start(i);
        const last = o.last[query] + 256 * o.highLast[query];
        for (let j = o.first[query] + 256 * o.highFirst[query]; j < last; j++)
          levels[start + j] = o.means[query * o.blocks + Math.floor(j / this.block)];
        for (let n = query * this.kept, j = 0; n < (query + 1) * this.kept && o.levels[n] !== this.hidden; n++) {
          j += o.gaps[n] + 256 * o.highGaps[n];
          levels[start + j] = o.levels[n];
          own[start + j] = 1;
        }
      }
      return { levels, own };
    });
  }
  // Whether the weight is the mean of a block.
  isMean(layer, head, i, j) {
    return this.others !== null && this.ofHead(layer * this.heads + head).own[this.start(i) + j] === 0;
  }
  // The smallest of the query's own weights, which is at least as large as a mean.
  leastOwn(layer, head, i) {
    const { own } = this.ofHead(layer * this.heads + head);
    const weights = this.weights(layer, head);
    let least = 1;
    for (let j = 0; j < this.seen(i); j++)
      if (own[this.start(i) + j]) least = Math.min(least, weights[i * this.columns + j]);
    return least;
  }
  // Distance of a level's logit from the largest of its row; Infinity for a pair that is not visible.
  distanceOf(level) {
    return level === this.hidden ? Infinity : this.floor * (level / this.steps) ** 2;
  }
  // Functions of a query and a key: the distance, the weight or the logit; the latter two are null for a masked pair.
  distancesAt(layer, head) {
    const { levels } = this.ofHead(layer * this.heads + head);
    return (i, j) => (j < this.seen(i) ? this.distanceOf(levels[this.start(i) + j]) : Infinity);
  }
  weightsAt(layer, head) {
    const weights = this.weights(layer, head);
    const distanceAt = this.distancesAt(layer, head);
    return (i, j) => (distanceAt(i, j) === Infinity ? null : weights[i * this.columns + j]);
  }
  logitsAt(layer, head) {
    const distanceAt = this.distancesAt(layer, head);
    const first = (layer * this.heads + head) * this.rows;
    return (i, j) => (distanceAt(i, j) === Infinity ? null : this.rowMax[first + i] - distanceAt(i, j));
  }
  // As weightsAt, averaged over the heads of a layer.
  meansAt(layer) {
    const each = headsOf(this, layer).map((head) => this.weightsAt(layer, head));
    return (i, j) =>
      each.reduce((sum, at) => {
        const weight = at(i, j);
        return weight === null ? sum : (sum ?? 0) + weight / each.length;
      }, null);
  }
  // The query and the key of a pair, and their products by dimension times the scale, which add up to the logit before
  // anything else changes it; null if the page does not hold them.
  products(layer, head, i, j) {
    if (!this.vectors || Math.max(i, j) >= this.vectors.tokens) return null;
    const { queries, keys, added } = this.vectors.layers[layer];
    const [query, key] = [queries(i, head), keys(j, Math.floor((head * keys.heads) / this.heads))];
    const products = query.map((value, n) => value * key[n] * this.vectors.scale);
    return { query, key, products, sum: products.reduce((a, b) => a + b, 0), added };
  }
  seen(i) {
    return this.causal ? i + 1 : this.columns;
  }
  start(i) {
    return this.causal ? (i * (i + 1)) / 2 : i * this.columns;
  }
  // The token that is marked at first: the query that is typical of the head, or the key that this query reads the
  // most. For the mean of the heads: a query that sees the most keys, and a key that many queries see.
  opening(side, layer, head) {
    if (head === MEAN) return side === "query" ? this.widest : this.causal ? this.columns >> 1 : this.columns - 1;
    const query = this.typical[layer][head];
    if (side === "query") return query;
    const weights = this.weights(layer, head).subarray(query * this.columns, (query + 1) * this.columns);
    return weights.indexOf(Math.max(...weights));
  }
  // Whether the distance was clipped; the logit may be smaller.
  cut(layer, head, i, j) {
    return this.distancesAt(layer, head)(i, j) === this.floor;
  }
  // The largest error of a logit by quantisation.
  logitError(layer, head, i, j) {
    return (
      Math.sqrt(this.distancesAt(layer, head)(i, j) * this.floor) / this.steps + this.floor / (4 * this.steps ** 2)
    );
  }
  weights(layer, head) {
    const key = layer * this.heads + head;
    return remembered(this.cache, key, 36, () => {
      const { rows, columns } = this;
      const weights = new Float32Array(rows * columns);
      const { levels } = this.ofHead(key);
      const table = Float32Array.from({ length: 256 }, (_, level) => Math.exp(-this.distanceOf(level)));
      for (let i = 0; i < rows; i++) {
        const from = this.start(i);
        const seen = this.seen(i);
        let sum = 0;
        for (let j = 0; j < seen; j++) sum += table[levels[from + j]];
        for (let j = 0; sum > 0 && j < seen; j++) weights[i * columns + j] = table[levels[from + j]] / sum;
      }
      return weights;
    });
  }
}

// The arrays of vectors.py as functions of a token and a head.
function vectorsOf(held) {
  const read = ({ values, units, shape: [heads, width] }) => {
    const integers = new Int16Array(bytesOf(values).buffer);
    const unit = new Float32Array(bytesOf(units).buffer);
    const at = (token, head) =>
      indices(width).map((n) => integers[(token * heads + head) * width + n] * unit[head * width + n]);
    return Object.assign(at, { heads });
  };
  const layers = held.layers.map(({ queries, keys, added }) => ({ queries: read(queries), keys: read(keys), added }));
  return { ...held, layers };
}

// A smaller map: a point is the weight on `by` keys together, averaged over `by` queries; null if all its pairs are
// masked.
export function reducedMap(attention, layer, head, by) {
  const weightAt = attention.weightsAt(layer, head);
  const { rows, columns } = attention;
  const width = Math.ceil(columns / by);
  const sums = new Float32Array(width * Math.ceil(rows / by)).fill(-1); // -1: no visible pair
  for (let i = 0; i < rows; i++)
    for (let j = 0, seen = attention.seen(i), to = Math.floor(i / by) * width; j < seen; j++) {
      const weight = weightAt(i, j);
      const at = to + Math.floor(j / by);
      if (weight !== null) sums[at] = Math.max(0, sums[at]) + weight;
    }
  return (y, x) => {
    const sum = sums[y * width + x];
    return sum < 0 ? null : Math.min(1, sum / Math.min(by, rows - y * by));
  };
}

// Decimals that show two digits of an error, but at most four.
const decimalsOf = (error) => Math.max(0, Math.min(4, Math.ceil(-Math.log10(error)) + 1));
// The error with these decimals, rounded up.
export function roundedUp(error) {
  const unit = 10 ** -decimalsOf(error);
  return (Math.ceil(error / unit) * unit).toFixed(decimalsOf(error));
}
// A value with its error.
export const withError = (value, error) => `${value.toFixed(decimalsOf(error))} ± ${roundedUp(error)}`;

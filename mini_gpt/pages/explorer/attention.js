"use strict";
// Decode the page's attention, and draw tokens and weights.
// The page stores each row's largest logit and the quantised distances below it. The weights are computed from these.

function bytesOf(text) {
  const decoded = atob(text), bytes = new Uint8Array(decoded.length);
  for (let n = 0; n < decoded.length; n++) bytes[n] = decoded.charCodeAt(n);
  return bytes;
}

async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The value of a key, computed again if others were used since; `most` values are kept.
function remembered(cache, key, most, compute) {
  const value = cache.get(key) ?? compute();
  cache.delete(key);
  cache.set(key, value);
  if (cache.size > most) cache.delete(cache.keys().next().value);
  return value;
}

class Attention {
  constructor(data, levels) {
    Object.assign(this, data);
    this.keys = data.keys ?? data.tokens; // of the columns; `tokens` are those of the rows, the queries
    this.rows = this.tokens.length;
    this.columns = this.keys.length;
    this.levels_ = levels;
    this.longest = Math.max(this.rows, this.columns);
    this.rowMax = new Float32Array(bytesOf(data.row_max).buffer);
    this.perHead = data.causal ? (this.rows * (this.rows + 1)) / 2 : this.rows * this.columns;
    this.cache = new Map(); // weights of the heads that were shown last
    this.unpacked = new Map();
    this.others = this.kept ? this.planes(levels) : null; // of a long text; null if all weights are in the page
  }
  // The planes of largest.py: arrays of bytes, with an entry for each head, query and kept key, or block, or with one entry.
  planes(bytes) {
    const queries = this.layers * this.heads * this.rows, blocks = Math.ceil(this.columns / this.block);
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
      const levels = new Uint8Array(this.perHead).fill(this.hidden), own = new Uint8Array(this.perHead), o = this.others;
      for (let i = 0; i < this.rows; i++) {
        const query = key * this.rows + i, start = this.start(i), last = o.last[query] + 256 * o.highLast[query];
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
  // Whether the weight is the mean of a block; and the smallest of the query's own weights, which is at least as large.
  isMean(layer, head, i, j) { return this.others !== null && this.ofHead(layer * this.heads + head).own[this.start(i) + j] === 0; }
  leastOwn(layer, head, i) {
    const { own } = this.ofHead(layer * this.heads + head), weights = this.weights(layer, head);
    let least = 1;
    for (let j = 0; j < this.seen(i); j++) if (own[this.start(i) + j]) least = Math.min(least, weights[i * this.columns + j]);
    return least;
  }
  seen(i) { return this.causal ? i + 1 : this.columns; }
  start(i) { return this.causal ? (i * (i + 1)) / 2 : i * this.columns; }
  // Distance of a logit from the largest of its row; Infinity for a pair that is not visible.
  below(layer, head, i, j) {
    if (j >= this.seen(i)) return Infinity;
    const level = this.ofHead(layer * this.heads + head).levels[this.start(i) + j];
    return level === this.hidden ? Infinity : this.floor * (level / this.steps) ** 2;
  }
  // Whether the distance was clipped; the logit may be smaller.
  cut(layer, head, i, j) { return this.below(layer, head, i, j) === this.floor; }
  logit(layer, head, i, j) {
    return this.rowMax[(layer * this.heads + head) * this.rows + i] - this.below(layer, head, i, j);
  }
  // The largest error of a logit by quantisation.
  logitError(layer, head, i, j) { return Math.sqrt(this.below(layer, head, i, j) * this.floor) / this.steps + this.floor / (4 * this.steps ** 2); }
  weights(layer, head) {
    const key = layer * this.heads + head;
    return remembered(this.cache, key, 36, () => {
      const { rows, columns } = this, weights = new Float32Array(rows * columns), { levels } = this.ofHead(key);
      const table = Float32Array.from({ length: 256 }, (_, level) =>
        level === this.hidden ? 0 : Math.exp(-this.floor * (level / this.steps) ** 2));
      for (let i = 0; i < rows; i++) {
        const from = this.start(i), seen = this.seen(i);
        let sum = 0;
        for (let j = 0; j < seen; j++) sum += table[levels[from + j]];
        for (let j = 0; sum > 0 && j < seen; j++) weights[i * columns + j] = table[levels[from + j]] / sum;
      }
      return weights;
    });
  }
}

// A token's text, with signs for white space.
const shown = (token) => token.replace(/\n/g, "⏎").replace(/\r/g, "␍").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "·".repeat(s.length)) || "∅";

// A value and its error, with decimals that fit the error. The error is rounded up.
function withError(value, error) {
  const decimals = Math.max(0, Math.min(4, Math.ceil(-Math.log10(error)))), unit = 10 ** -decimals;
  return `${value.toFixed(decimals)} ± ${(Math.ceil(error / unit) * unit).toFixed(decimals)}`;
}

// Colours: like magma for weights, diverging for signed values.

const MAGMA = [[0, 0, 4], [40, 11, 84], [101, 21, 110], [159, 42, 99], [212, 72, 66], [245, 125, 21], [250, 193, 39], [252, 255, 164]];
function magma(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * (MAGMA.length - 1), low = Math.floor(at), part = at - low;
  return MAGMA[low].map((c, k) => Math.round(c + (MAGMA[low + 1][k] - c) * part));
}
const MAGMAS = Array.from({ length: 256 }, (_, n) => magma(n / 255));
function signed(value) {
  const v = Math.max(-1, Math.min(1, value)), toward = v < 0 ? [33, 102, 172] : [178, 24, 43];
  return toward.map((c) => Math.round(247 + (c - 247) * Math.abs(v)));
}

function paint(canvas, width, height, colourAt) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let y = 0, at = 0; y < height; y++)
    for (let x = 0; x < width; x++, at += 4) {
      const [r, g, b] = colourAt(x, y);
      image.data[at] = r; image.data[at + 1] = g; image.data[at + 2] = b; image.data[at + 3] = 255;
    }
  context.putImageData(image, 0, 0);
}

// A smaller map: a point is the weight on `by` keys together, averaged over `by` queries.
const reducedMap = (attention, layer, head, by) => {
  const weights = attention.weights(layer, head), { rows, columns } = attention;
  const width = Math.ceil(columns / by), sums = new Float32Array(width * Math.ceil(rows / by));
  for (let i = 0; i < rows; i++)
    for (let j = 0, seen = attention.seen(i), to = Math.floor(i / by) * width; j < seen; j++) sums[to + Math.floor(j / by)] += weights[i * columns + j];
  return (x, y) => MAGMAS[Math.round(255 * Math.sqrt(Math.min(1, sums[y * width + x] / Math.min(by, rows - y * by))))];
};

const weightMap = (attention, layer, head) => {
  const weights = attention.weights(layer, head), { columns } = attention;
  return (x, y) => MAGMAS[Math.round(255 * Math.sqrt(weights[y * columns + x]))];
};

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

class Attention {
  constructor(data, levels) {
    Object.assign(this, data);
    this.keys = data.keys ?? data.tokens; // of the columns; `tokens` are those of the rows, the queries
    this.rows = this.tokens.length;
    this.columns = this.keys.length;
    this.levels_ = levels;
    this.rowMax = new Float32Array(bytesOf(data.row_max).buffer);
    this.perHead = data.causal ? (this.rows * (this.rows + 1)) / 2 : this.rows * this.columns;
    this.cache = new Map();
  }
  seen(i) { return this.causal ? i + 1 : this.columns; }
  start(i) { return this.causal ? (i * (i + 1)) / 2 : i * this.columns; }
  // Distance of a logit from the largest of its row; Infinity for a pair that is not visible.
  below(layer, head, i, j) {
    if (j >= this.seen(i)) return Infinity;
    const level = this.levels_[(layer * this.heads + head) * this.perHead + this.start(i) + j];
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
    if (!this.cache.has(key)) {
      const { rows, columns } = this, weights = new Float32Array(rows * columns);
      const table = Float32Array.from({ length: 256 }, (_, level) =>
        level === this.hidden ? 0 : Math.exp(-this.floor * (level / this.steps) ** 2));
      for (let i = 0; i < rows; i++) {
        const from = key * this.perHead + this.start(i), seen = this.seen(i);
        let sum = 0;
        for (let j = 0; j < seen; j++) sum += table[this.levels_[from + j]];
        for (let j = 0; sum > 0 && j < seen; j++) weights[i * columns + j] = table[this.levels_[from + j]] / sum;
      }
      this.cache.set(key, weights);
    }
    return this.cache.get(key);
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

const weightMap = (attention, layer, head) => {
  const weights = attention.weights(layer, head), { columns } = attention;
  return (x, y) => MAGMAS[Math.round(255 * Math.sqrt(weights[y * columns + x]))];
};

// Positions of tokens, and positional encodings. As in mini_gpt/model/positions/, an encoding has some of these hooks:
//   embed(x, position)                   add a position to an embedding, once before the first layer
//   rotate(x, at, width, position, head) turn a head's query or key, which starts at x[at]; PoPE doubles its width
//   rotateKey                            the same for keys, if they are turned in another way
//   bias(head, query, key)               a number for the logit, by the positions of query and key
// Angles are rounded to float32, as in JAX: at position 100,000 the rounding is larger than the limit of the tests.

import { softplus } from "./arrays.js";
import { randomPositions } from "./random_positions.js";

// The positions of tokens, and the first and the last place of each token's segment. A separator starts a segment,
// which attention does not leave. Positions restart at a separator and at an operator, unless they are random.
// span: of the positions.
export function placesOf(tokens, { layout: { separator, operators }, config }, start) {
  const [positions, starts, ends] = [0, 1, 2].map(() => new Int32Array(tokens.length));
  let zero = operators.length ? -1 : 0;
  let first = 0;
  tokens.forEach((token, place) => {
    if (token === separator) first = place;
    if (token === separator || operators.includes(token)) zero = place;
    positions[place] = place - zero + start;
    starts[place] = first;
  });
  if (config.random_positions !== null) {
    const drawn = randomPositions(tokens[0], tokens.length, config.random_positions);
    positions.set(drawn.map((position) => position + start));
  }
  for (let place = tokens.length - 1; place >= 0; place--)
    ends[place] = starts[place + 1] === starts[place] ? ends[place + 1] : place;
  return { positions, starts, ends, span: Math.max(...positions) - Math.min(...positions) + 1 };
}

// base^(-2i/width), the radians per token of pair i
function geometric(base, width) {
  return Float64Array.from({ length: Math.ceil(width / 2) }, (_, i) => base ** ((-2 * i) / width));
}

// The radians per token of each pair of RoPE, with scaling to longer texts; see mini_gpt/model/positions/waves.py.
// length: of the text, for dynamic scaling.
function ropeFrequencies(rope, width, length) {
  const frequencies = scaledFrequencies(rope, width);
  frequencies.fill(0, Math.trunc((rope.turning * width) / 2)); // p-RoPE: the slowest pairs do not turn
  if (rope.scaling !== "dynamic") return frequencies;
  const stretch = Math.max(1, (rope.factor * length) / rope.original_context - (rope.factor - 1));
  return frequencies.map((frequency, i) => frequency * stretch ** ((-2 * i) / (width - 2)));
}

function scaledFrequencies(rope, width) {
  const { base, scaling, factor, original_context: context, beta_slow: slow, beta_fast: fast } = rope;
  const plain = geometric(base, width);
  // share: of the unscaled frequency in each pair's frequency
  const mixed = (share) => plain.map((frequency, i) => (1 - share(i)) * (frequency / factor) + share(i) * frequency);
  const limited = (x) => Math.min(1, Math.max(0, x));
  if (scaling === "linear") return plain.map((frequency) => frequency / factor);
  if (scaling === "ntk") return geometric(base * factor ** (width / (width - 2)), width);
  if (scaling === "yarn" || scaling === "llama3")
    return mixed((i) => limited(((context * plain[i]) / (2 * Math.PI) - slow) / (fast - slow)));
  if (scaling === "yarn_by_index" || scaling === "yarn_unrounded") {
    const pair = (turns) => (width * Math.log(context / (2 * Math.PI * turns))) / (2 * Math.log(base));
    const [low, high] = scaling === "yarn_by_index" ? [Math.floor, Math.ceil] : [Number, Number];
    const first = Math.max(low(pair(fast)), 0);
    const last = Math.min(high(pair(slow)), width - 1);
    return mixed((i) => 1 - limited((i - first) / (last - first || 1e-3)));
  }
  return plain;
}

const angle = (position, frequency) => Math.fround(position * Math.fround(frequency));

// Pairs of dimensions i and i + width/2 turn by an angle that grows with the position (Su et al. 2021).
export class Rope {
  constructor(rope, rotated, length) {
    this.half = rotated / 2;
    this.frequencies = ropeFrequencies(rope, rotated, length);
    const scale = rope.attention_factor ?? 0.1 * Math.log(rope.factor) + 1;
    this.temperature = rope.scaling.startsWith("yarn") ? scale : 1;
  }
  rotate(x, at, width, position) {
    const { half, frequencies, temperature } = this;
    if (temperature !== 1) for (let k = at; k < at + width; k++) x[k] *= temperature;
    for (let i = 0; i < half; i++) {
      const turn = angle(position, frequencies[i]);
      const cos = Math.cos(turn);
      const sin = Math.sin(turn);
      const first = x[at + i];
      const second = x[at + half + i];
      x[at + i] = first * cos - second * sin;
      x[at + half + i] = second * cos + first * sin;
    }
  }
}

// A trained vector for each position, added to the embedding.
export class Learned {
  constructor(table, width) {
    Object.assign(this, { table, width });
  }
  embed(x, position) {
    for (let k = 0; k < this.width; k++) x[k] += this.table[position * this.width + k];
  }
}

// Sines and cosines, added to the embedding (Vaswani et al. 2017).
export class Sinusoidal {
  constructor(base, amplitude, width) {
    Object.assign(this, { amplitude, frequencies: geometric(base, width) });
  }
  embed(x, position) {
    for (let k = 0; k < x.length; k++) {
      const turn = angle(position, this.frequencies[k >> 1]);
      x[k] += this.amplitude * (k % 2 ? Math.cos(turn) : Math.sin(turn));
    }
  }
}

// Logits become Σ softplus(q) softplus(k) cos((j - i) θ + δ) (Gopalakrishnan et al. 2025). A query or key becomes its
// real parts, then its imaginary parts: twice as wide. phases: δ of each key-value head and dimension, for keys.
export class Pope {
  constructor(base, width, phases) {
    Object.assign(this, { frequencies: geometric(base, 2 * width), phases });
  }
  rotate(x, at, width, position) {
    this.turn(x, at, width, position, () => 0);
  }
  rotateKey(x, at, width, position, head) {
    this.turn(x, at, width, position, (k) => this.phases[head * width + k]);
  }
  turn(x, at, width, position, phase) {
    for (let k = 0; k < width; k++) {
      const turn = Math.fround(angle(position, this.frequencies[k]) + phase(k));
      const size = softplus(x[at + k]);
      x[at + k] = size * Math.cos(turn);
      x[at + width + k] = size * Math.sin(turn);
    }
  }
}

// Positions of tokens, and positional encodings. As in mini_gpt/model/positions/, an encoding has some of these hooks:
//   embed(x, position)                   add a position to an embedding, once before the first layer
//   rotate(x, at, width, position, head) turn a head's query or key, which starts at x[at]; PoPE doubles its width
//   rotateKey                            the same for keys, if they are turned in another way
//   bias(head, query, key)               a number for the logit, by the positions of query and key
// Angles are rounded to float32, as in JAX: at position 100,000 the rounding is larger than the limit of the tests.

import { softplus } from "./arrays.js";

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
  return Float64Array.from({ length: width / 2 }, (_, i) => base ** ((-2 * i) / width));
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
  constructor({ amplitude, frequencies }) {
    Object.assign(this, { amplitude, frequencies });
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

// Random positions (Ruoss et al. 2023): sorted numbers below `count` in place of 0, 1, 2, … They are those of JAX. They
// depend only on the first token and the length of the text: mini_gpt/model/layout.py.

const ROTATIONS = [
  [13, 15, 26, 6],
  [17, 29, 16, 24],
];

// Threefry-2x32 with 20 rounds (Salmon et al. 2011): two random words of 32 bits, by a key of two words and a counter.
function threefry([first, second], [high, low]) {
  const keys = [first, second, first ^ second ^ 0x1bd11bda];
  let x = (high + keys[0]) | 0;
  let y = (low + keys[1]) | 0;
  for (let group = 0; group < 5; group++) {
    for (const bits of ROTATIONS[group % 2]) {
      x = (x + y) | 0;
      y = ((y << bits) | (y >>> (32 - bits))) ^ x;
    }
    x = (x + keys[(group + 1) % 3]) | 0;
    y = (y + keys[(group + 2) % 3] + group + 1) | 0;
  }
  return [x, y];
}

// The `length` places with the largest of `count` random numbers, sorted. Of equal numbers, the first is taken.
function randomPositions(firstToken, length, count) {
  const key = threefry([0, 0], [0, firstToken]); // jax.random.fold_in(jax.random.key(0), firstToken)
  const numbers = Uint32Array.from({ length: count }, (_, place) => {
    const [x, y] = threefry(key, [0, place]);
    return (x ^ y) >>> 9; // the 23 bits of a float32 in [0, 1)
  });
  const order = Uint32Array.from(numbers.keys()).sort((a, b) => numbers[b] - numbers[a] || a - b);
  return Int32Array.from(order.subarray(0, length)).sort();
}

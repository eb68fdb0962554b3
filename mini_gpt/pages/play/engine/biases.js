// Positional encodings that add a number to each attention logit. `bias(head, query, key)` takes positions.

import { softplus } from "./arrays.js";

// A penalty linear in the distance, with a slope for each head (Press et al. 2022).
export class Alibi {
  constructor(slopes) {
    this.slopes = slopes;
  }
  bias(head, query, key) {
    return -this.slopes[head] * Math.abs(query - key);
  }
}

// 2^(-last · i/H), i = 1..H. If H is between powers P and 2P of two: all slopes for P, then every other for 2P.
export function alibiSlopes(heads, last = 8) {
  const power = 2 ** Math.floor(Math.log2(heads));
  const exponent = (i) => (i < power ? (i + 1) / power : (2 * (i - power) + 1) / (2 * power));
  return Array.from({ length: heads }, (_, i) => 2 ** (-last * exponent(i)));
}

// Head h of the first heads sees h + 1 tokens; the other heads have no encoding (Jelassi et al. 2024).
export class HardAlibi {
  constructor(limited) {
    this.limited = limited;
  }
  bias(head, query, key) {
    return head < this.limited && Math.abs(query - key) > head ? -Infinity : 0;
  }
}

// A trained number for each head and bucket of distances (Raffel et al. 2020). A later key has that of distance 0.
export class T5 {
  constructor(table, { num_buckets: buckets, max_distance: longest }, heads) {
    const exact = buckets / 2; // buckets of one distance each; the others grow logarithmically
    const growth = (d) => Math.log(d / exact) / Math.log(longest / exact);
    const wide = (d) => exact + Math.floor(growth(d) * (buckets - exact) + 1e-9);
    const bucket = (d) => (d < exact ? d : Math.min(wide(d), buckets - 1));
    Object.assign(this, { table, heads, longest });
    this.buckets = Int32Array.from({ length: longest + 1 }, (_, d) => bucket(d)); // of each distance
  }
  bias(head, query, key) {
    return this.table[this.buckets[Math.min(Math.max(query - key, 0), this.longest)] * this.heads + head];
  }
}

// A trained penalty p · ln(1 + a · distance) of each head and layer (Chi et al. 2022).
export class Kerple {
  constructor(p, a) {
    Object.assign(this, { p: p.map(softplus), a: a.map(softplus) });
  }
  bias(head, query, key) {
    return -this.p[head] * Math.log1p(this.a[head] * Math.abs(query - key));
  }
}

// A trained function of distance / query position, both on a logarithmic scale: a hidden layer with ReLU, in each layer
// of the model (Li et al. 2024).
export class Fire {
  constructor({ up, up_bias, down, down_bias, c, factor }, threshold, heads) {
    Object.assign(this, { up, up_bias, down, down_bias, c: c[0], longest: Math.abs(threshold * factor[0]), heads });
  }
  bias(head, query, key) {
    const { up, up_bias, down, down_bias, heads } = this;
    const psi = (x) => Math.log1p(Math.abs(this.c * x));
    const share = psi(Math.abs(query - key)) / (psi(Math.max(this.longest, query)) + 1e-6);
    let sum = down_bias[head];
    for (let unit = 0; unit < up.length; unit++)
      sum += Math.max(0, share * up[unit] + up_bias[unit]) * down[unit * heads + head];
    return sum;
  }
}

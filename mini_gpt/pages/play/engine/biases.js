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

// Each head sees keys up to a distance; null: all (Jelassi et al. 2024).
export class HardAlibi {
  constructor(reach) {
    this.reach = reach;
  }
  bias(head, query, key) {
    return Math.abs(query - key) > (this.reach[head] ?? Infinity) ? -Infinity : 0;
  }
}

// A trained number for each head and bucket of distances (Raffel et al. 2020). A later key has that of distance 0.
// buckets: of each distance up to the longest one.
export class T5 {
  constructor(table, buckets, heads) {
    Object.assign(this, { table, buckets, heads });
  }
  bias(head, query, key) {
    const distance = Math.min(Math.max(query - key, 0), this.buckets.length - 1);
    return this.table[this.buckets[distance] * this.heads + head];
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

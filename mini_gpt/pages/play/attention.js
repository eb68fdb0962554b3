"use strict";
// Multi-head attention of one layer: project, split into heads, attend, concatenate, project.
// Keys and values of all places are kept (a KV cache), so that new tokens at the end need no second pass over the others.

const LLAMA4_SPAN = 8192, LLAMA4_FACTOR = 0.1; // of the released code
const CANON_TAPS = 4; // tokens that a canon layer sees, the newest included

class Attention {
  constructor(model, layer, edits) {
    const { config } = model, { path } = layer.attention, of = (name) => model.values(`${path}/variants/${name}`);
    Object.assign(this, { model, layer, edits, config, variants: config.variants, ...layer.attention });
    this.heads = config.num_heads;
    this.groups = config.num_kv_heads; // key-value heads; heads / groups query heads share one
    this.width = config.head_width;
    this.keyWidth = layer.kind.position === "pope" ? 2 * this.width : this.width;
    this.scale = config.scale_attention && edits.scale !== "off" ? 1 / Math.sqrt(config.scale_width) : 1;
    this.window = edits.window === undefined ? layer.kind.window : edits.window;
    this.temperature = edits.temperature ?? 1;
    this.queryNorm = of("query_norm/scale");
    this.keyNorm = of("key_norm/scale");
    this.queryFactor = of("query_factor");
    this.canon = of("canon");
    this.gate = config.variants.gate === "none" ? null : model.linear(`${path}/variants/gate`);
    const zero = config.variants.sink === "zero" ? new Float32Array(this.heads) : null;
    this.sink = config.variants.sink === "trained" ? of("sink") : zero;
    this.forget = layer.kind.position === "fox" ? model.linear(`${path}/position/gate`) : null;
    this.contextual = layer.kind.position === "cope" ? model.values(`${path}/position/table`) : null;
    for (const name of ["inputs", "queries", "keys", "values", "decays", "gates", "outputs"]) this[name] = new Float32Array(0);
  }

  // Make room for a text, and prepare what depends on its length.
  begin(text) {
    const { heads, groups, width, keyWidth } = this, length = text.tokens.length;
    const widths = { inputs: this.canon ? this.config.d_model : 0, queries: heads * keyWidth, keys: groups * keyWidth };
    Object.assign(widths, { values: groups * width, decays: this.forget ? heads : 0, gates: this.gate?.outputs ?? 0 });
    widths.outputs = heads * width;
    for (const name in widths) this[name] = grown(this[name], length * widths[name]);
    this.text = text;
    this.encoding = this.model.encoding(this.layer, this.edits, text.span);
    this.row = new Float64Array(length);
    this.penalties = new Float64Array(length); // of selective attention
    this.first = new Float64Array(length); // the first head's logits, for selective attention
  }

  // 1. and 2. Project the rows of x, the places from `from` on, to queries, keys and values, and split them into heads.
  project(x, from) {
    const { model, variants, heads, groups, width, keyWidth, text } = this, rows = x.length / model.config.d_model;
    if (this.canon) x = this.convolved(x, from);
    const [q, k, v] = [this.query, this.key, this.value].map((linear) => {
      const out = product(x, linear, new Float32Array(rows * linear.outputs)), most = variants.clip_qkv;
      return most === null ? out : out.map((entry) => Math.min(Math.max(entry, -most), most));
    });
    this.normalise(q, this.queryNorm, heads);
    this.normalise(k, this.keyNorm, groups);
    for (let r = 0; r < rows; r++) {
      const place = from + r, position = text.positions[place];
      for (let h = 0; h < heads; h++) {
        const at = (place * heads + h) * keyWidth, start = (r * heads + h) * width, factor = this.lengthFactor(h, place);
        this.queries.set(q.subarray(start, start + width), at);
        this.encoding.rotate?.(this.queries, at, width, position);
        if (factor !== 1) for (let c = at; c < at + keyWidth; c++) this.queries[c] *= factor;
      }
      for (let g = 0; g < groups; g++) {
        const at = (place * groups + g) * keyWidth, start = (r * groups + g) * width;
        this.keys.set(k.subarray(start, start + width), at);
        if (this.encoding.rotateKey) this.encoding.rotateKey(this.keys, at, width, position, g);
        else this.encoding.rotate?.(this.keys, at, width, position);
      }
    }
    this.values.set(v, from * groups * width);
    if (this.gate) {
      const gates = product(x, this.gate, new Float32Array(rows * this.gate.outputs));
      this.gates.set(gates.map(sigmoid), from * this.gate.outputs);
    }
    if (this.forget) {
      const logits = product(x, this.forget, new Float32Array(rows * heads));
      logits.forEach((logit, n) => {
        const at = from * heads + n; // the sum over all places so far
        this.decays[at] = (at < heads ? 0 : this.decays[at - heads]) + logSigmoid(logit);
      });
    }
  }

  // x plus a causal convolution of the last four places of the segment (canon-A, Allen-Zhu 2025)
  convolved(x, from) {
    const D = this.config.d_model, { starts } = this.text, mixed = x.slice();
    this.inputs.set(x, from * D);
    for (let r = 0; r * D < x.length; r++)
      for (let age = 0; age < CANON_TAPS && from + r - age >= starts[from + r]; age++)
        for (let k = 0; k < D; k++) mixed[r * D + k] += this.canon[age * D + k] * this.inputs[(from + r - age) * D + k];
    return mixed;
  }

  // Divide queries or keys by their root mean square: each head apart, or all heads of a token together.
  normalise(x, scale, heads) {
    const { qk_norm: kind, qk_norm_epsilon: epsilon } = this.variants;
    if (kind === "none") return;
    norm(x, { kind: "rmsnorm", epsilon, scale, bias: null, width: kind === "all_heads" ? heads * this.width : this.width }, x);
  }

  // The factor of a query that grows with the visible keys (ssmax) or with the position (Llama 4).
  lengthFactor(head, place) {
    if (this.variants.query_scale === "ssmax") {
      const [first, last] = this.visible(place);
      return this.queryFactor[head] * Math.log(last - first + 1);
    }
    if (this.variants.query_scale === "llama4")
      return 1 + LLAMA4_FACTOR * Math.log1p(Math.floor((this.text.positions[place] + 1) / LLAMA4_SPAN));
    return 1;
  }

  // The first and the last key that a query sees.
  visible(query) {
    const { starts, ends } = this.text, ahead = { causal: 0, shifted: 1, none: Infinity }[this.edits.mask ?? "causal"];
    const reach = (this.window ?? Infinity) - 1;
    return [Math.max(starts[query], query - reach), Math.min(ends[query], query + Math.min(ahead, reach))];
  }

  // Write the logits of a head's query with the keys that it sees into `row`; return the first and the last key.
  logits(head, query, row) {
    const { heads, groups, keyWidth, queries, keys, scale, encoding, decays, text } = this;
    const [first, last] = this.visible(query), at = (query * heads + head) * keyWidth, cap = this.variants.soft_cap;
    const group = Math.floor((head * groups) / heads), position = text.positions[query];
    for (let key = first; key <= last; key++) {
      let logit = scale * dot(queries, at, keys, (key * groups + group) * keyWidth, keyWidth);
      if (cap !== null) logit = cap * Math.tanh(logit / cap);
      if (encoding.bias) logit += encoding.bias(head, position, text.positions[key]);
      if (this.forget) logit += decays[query * heads + head] - decays[key * heads + head];
      row[key] = logit;
    }
    if (this.contextual) this.addContextual(row, at, first, last);
    return [first, last];
  }

  // CoPE: a key's position is the number of open gates σ(logit) from it to the query (Golovneva et al. 2024). Vectors of
  // two whole positions are mixed, and multiplied with the query.
  addContextual(row, at, first, last) {
    const { width, contextual, queries } = this, rows = contextual.length / width;
    const byPosition = Float64Array.from({ length: rows }, (_, p) => dot(queries, at, contextual, p * width, width));
    for (let key = last, gates = 0; key >= first; key--) {
      gates += sigmoid(row[key]);
      const position = Math.min(gates, rows - 1), low = Math.floor(position), part = position - low;
      row[key] += (1 - part) * byPosition[low] + part * byPosition[Math.min(low + 1, rows - 1)];
    }
  }

  // Replace the logits of a row by weights.
  weigh(row, head, first, last) {
    if (this.variants.normaliser === "stick_breaking") stickBreaking(row, first, last);
    else softmax(row, first, last, this.sink ? this.sink[head] / this.temperature : null);
  }

  // Call visit(head, first, last) with the logits of each of these heads in `this.row`. Queries must come in order.
  eachHead(query, heads, visit) {
    const { row, penalties, first: firstHead, variants, temperature } = this;
    if (variants.selective && query === 0) penalties.fill(0);
    if (variants.selective) this.logits(0, query, firstHead);
    for (const head of heads) {
      const [first, last] = this.logits(head, query, row);
      if (variants.selective) for (let key = first; key <= last; key++) row[key] -= penalties[key];
      if (temperature !== 1) for (let key = first; key <= last; key++) row[key] /= temperature;
      visit(head, first, last);
    }
    if (variants.selective) this.select(query);
  }

  // A query lowers the logits of keys for later queries (Leviathan et al. 2025), but not of its own key, nor of a key
  // that is the first of its document.
  select(query) {
    const [first] = this.visible(query);
    for (let key = first; key < query; key++)
      if (this.visible(key)[0] < key) this.penalties[key] += Math.max(0, this.first[key]);
  }

  // 3. Attend: the heads' outputs at a place, weighted means of values. They are also 4., concatenated.
  attend(query) {
    const { heads, groups, width, values, outputs, row, gate, gates } = this;
    const all = Array.from({ length: heads }, (_, head) => head);
    this.eachHead(query, all, (head, first, last) => {
      this.weigh(row, head, first, last);
      const at = (query * heads + head) * width, group = Math.floor((head * groups) / heads), sums = new Float64Array(width);
      for (let key = first; key <= last; key++) {
        const weight = row[key], from = (key * groups + group) * width;
        for (let c = 0; c < width; c++) sums[c] += weight * values[from + c];
      }
      const factor = (c) => (!gate ? 1 : gate.outputs === heads ? gates[query * heads + head] : gates[at + c]);
      for (let c = 0; c < width; c++) outputs[at + c] = factor(c) * sums[c];
    });
  }

  // 5. Project the concatenated heads of these places.
  output(from, to) {
    const inputs = this.heads * this.width, x = this.outputs.subarray(from * inputs, to * inputs);
    const out = product(x, this.out, new Float32Array((to - from) * this.out.outputs));
    return this.outputNorm ? norm(out, this.outputNorm) : out;
  }

  // The logits and weights of one head, [L × L]. Yields between rows.
  *maps(head) {
    const length = this.text.tokens.length, logits = new Float32Array(length ** 2).fill(-Infinity);
    const weights = new Float32Array(length ** 2), { row } = this;
    for (let query = 0; query < length; query++) {
      this.eachHead(query, [head], (_, first, last) => {
        logits.set(row.subarray(first, last + 1), query * length + first);
        this.weigh(row, head, first, last);
        weights.set(row.subarray(first, last + 1), query * length + first);
      });
      yield;
    }
    return { length, logits, weights };
  }
}

// Weights σ(z), of what the newer keys left; the rest goes to the query's own key, the last one (Tan et al. 2025).
function stickBreaking(row, first, last) {
  let left = 0; // the logarithm of what is left
  for (let key = last - 1; key >= first; key--) {
    const logit = row[key];
    row[key] = Math.exp(logSigmoid(logit) + left);
    left += logSigmoid(-logit);
  }
  row[last] = Math.exp(left);
}

// Variants of attention in one layer: the fields model.variants, and two encodings that depend on the text, FoX and
// CoPE. Without variants, nothing here changes a number.

import { dot, grown, logSigmoid, norm, product, sigmoid } from "./arrays.js";

export class Variants {
  constructor(model, { kind, attention: { path } }) {
    const { config } = model;
    const { variants } = config;
    const own = (name) => model.values(`${path}/${name}`);
    Object.assign(this, { config, fields: variants, heads: config.num_heads, groups: config.num_kv_heads });
    const norm = (name) => ({ scale: own(`on_heads/${name}/scale`), bias: own(`on_heads/${name}/bias`) });
    this.queryNorm = norm("query_norm");
    this.keyNorm = norm("key_norm");
    this.queryFactor = own("on_heads/factor");
    this.canon = own("on_input/taps");
    this.gate = variants.gate === "none" ? null : model.linear(`${path}/gate`);
    this.sink = { none: null, zero: new Float32Array(this.heads), trained: own("core/sink") }[variants.sink];
    this.sticks = variants.normaliser === "stick_breaking";
    this.forget = kind.position === "fox" ? model.linear(`${path}/on_input/gate`) : null;
    this.contextual = kind.position === "cope" ? own("core/score_mods/table") : null;
    for (const name of ["inputs", "gates", "decays"]) this[name] = new Float32Array(0);
  }

  begin(text) {
    const length = text.tokens.length;
    this.text = text;
    if (this.canon) this.inputs = grown(this.inputs, length * this.config.d_model);
    if (this.gate) this.gates = grown(this.gates, length * this.gate.outputs);
    if (this.forget) this.decays = grown(this.decays, length * this.heads);
    this.selected = this.fields.selective ? new Float64Array(length) : null; // subtracted from the logits of each key
    this.firstHead = new Float64Array(length); // its logits for one query
  }

  // The input of attention at the places from `from` on. Gates that depend on it are kept.
  input(x, from) {
    if (this.canon) x = this.convolved(x, from);
    if (this.gate) {
      const logits = product(x, this.gate);
      this.gates.set(logits.map(sigmoid), from * this.gate.outputs);
    }
    if (this.forget) {
      const logits = product(x, this.forget);
      logits.forEach((logit, n) => {
        const at = from * this.heads + n; // FoX: the sum of all log gates so far
        this.decays[at] = (at < this.heads ? 0 : this.decays[at - this.heads]) + logSigmoid(logit);
      });
    }
    return x;
  }

  // Canon-A: x plus a causal convolution over places of the segment (Allen-Zhu 2025).
  convolved(x, from) {
    const D = this.config.d_model;
    const taps = this.canon.length / D; // tokens that it sees, the newest included
    const mixed = x.slice();
    this.inputs.set(x, from * D);
    for (let r = 0; r * D < x.length; r++)
      for (let age = 0; age < taps && from + r - age >= this.text.starts[from + r]; age++)
        for (let k = 0; k < D; k++) mixed[r * D + k] += this.canon[age * D + k] * this.inputs[(from + r - age) * D + k];
    return mixed;
  }

  // Limit the entries of queries, keys or values, as in MPT and OLMo.
  clipped(x) {
    const most = this.fields.clip_qkv;
    return most === null ? x : x.map((entry) => Math.min(Math.max(entry, -most), most));
  }

  // Divide queries and keys by their root mean square: each head apart, or all heads of a token together. Or LayerNorm.
  normalise(q, k) {
    const { qk_norm: kind, qk_norm_epsilon: epsilon } = this.fields;
    const width = this.config.head_width;
    if (kind === "none") return;
    const type = kind === "layernorm" ? kind : "rmsnorm";
    const fields = (heads) => ({ kind: type, epsilon, width: kind === "all_heads" ? heads * width : width });
    norm(q, { ...fields(this.heads), ...this.queryNorm }, q);
    norm(k, { ...fields(this.groups), ...this.keyNorm }, k);
  }

  // Multiply queries by a factor that grows with the keys that they see (ssmax) or with their position (Llama 4).
  scaleQueries(attention, from, to) {
    const { keyWidth, queries, text } = attention;
    const kind = this.fields.query_scale;
    if (kind === "none") return;
    const { llama4 } = this.config.tables;
    for (let place = from; place < to; place++) {
      const [first, last] = attention.visible(place);
      for (let head = 0; head < this.heads; head++) {
        const bySeen = () => this.queryFactor[head] * Math.log(last - first + 1);
        const byPosition = () => 1 + llama4.factor * Math.log1p(Math.floor((text.positions[place] + 1) / llama4.span));
        const factor = kind === "ssmax" ? bySeen() : byPosition();
        for (let c = place * keyWidth; c < (place + 1) * keyWidth; c++) queries[head][c] *= factor;
      }
    }
  }

  capped(logit) {
    const cap = this.fields.soft_cap;
    return cap === null ? logit : cap * Math.tanh(logit / cap);
  }

  // FoX: a logit gets the sum of the log gates of the places after its key, up to the query (Lin et al. 2025).
  addToLogits(attention, head, query, row, first, last) {
    const { heads, decays } = this;
    if (this.forget)
      for (let key = first; key <= last; key++) row[key] += decays[query * heads + head] - decays[key * heads + head];
    if (this.contextual) this.addContextual(attention, head, query, row, first, last);
  }

  // CoPE: a key's position is the number of open gates σ(logit) from it to the query (Golovneva et al. 2024). The
  // vectors of two whole positions are mixed, and multiplied with the query.
  addContextual({ queries, width }, head, query, row, first, last) {
    const table = this.contextual;
    const rows = table.length / width;
    const own = queries[head];
    const at = query * width;
    const byPosition = Float64Array.from({ length: rows }, (_, p) => dot(own, at, table, p * width, width));
    for (let key = last, gates = 0; key >= first; key--) {
      gates += sigmoid(row[key]);
      const position = Math.min(gates, rows - 1);
      const low = Math.floor(position);
      const part = position - low;
      row[key] += (1 - part) * byPosition[low] + part * byPosition[Math.min(low + 1, rows - 1)];
    }
  }

  // Selective attention: a query lowers the logits of its keys for later queries, by the positive logits of the first
  // head; but not of its own key, nor of the first key of a document (Leviathan et al. 2025).
  beforeQuery(attention, query) {
    if (!this.selected) return;
    if (query === 0) this.selected.fill(0);
    attention.logits(0, query, this.firstHead);
  }

  subtractSelected(row, first, last) {
    if (this.selected) for (let key = first; key <= last; key++) row[key] -= this.selected[key];
  }

  afterQuery(attention, query) {
    if (!this.selected) return;
    for (let key = attention.visible(query)[0]; key < query; key++)
      if (attention.visible(key)[0] < key) this.selected[key] += Math.max(0, this.firstHead[key]);
  }

  // Multiply the heads' outputs by gates, one for each head or entry (Qiu et al. 2025).
  gateOutputs({ outputs, heads, width }, query) {
    if (!this.gate) return;
    const each = (heads * width) / this.gate.outputs; // entries that share a gate
    for (let c = 0; c < heads * width; c++)
      outputs[query * heads * width + c] *= this.gates[query * this.gate.outputs + Math.floor(c / each)];
  }
}

// Weights σ(z) of what the newer keys left over; the rest goes to the query's own key, the last one (Tan et al. 2025).
export function stickBreaking(row, first, last) {
  let left = 0; // the logarithm of what is left over
  for (let key = last - 1; key >= first; key--) {
    const logit = row[key];
    row[key] = Math.exp(logSigmoid(logit) + left);
    left += logSigmoid(-logit);
  }
  row[last] = Math.exp(left);
}

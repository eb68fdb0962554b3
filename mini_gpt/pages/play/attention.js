"use strict";
// Multi-head attention of one layer, in five steps: project, split into heads, attend, concatenate, project.
// Keys and values of all places are kept (a KV cache): new tokens at the end need no second pass over the others.
// Calls of variants.js do nothing in a model without variants.

class Attention {
  constructor(model, layer, edits) {
    const { config } = model, { kind, attention } = layer;
    Object.assign(this, { model, layer, edits, config, projections: attention });
    this.heads = config.num_heads;
    this.groups = config.num_kv_heads; // key-value heads; heads / groups query heads share one
    this.width = config.head_width; // of a head
    this.keyWidth = kind.position === "pope" ? 2 * this.width : this.width;
    this.scale = config.scale_attention && edits.scale !== "off" ? 1 / Math.sqrt(config.scale_width) : 1;
    this.temperature = edits.temperature ?? 1;
    this.window = (edits.window === undefined ? kind.window : edits.window) ?? Infinity;
    this.ahead = { causal: 0, shifted: 1, none: Infinity }[edits.mask ?? "causal"]; // later keys that a query sees
    this.variants = new Variants(model, layer);
    for (const name of ["queries", "keys", "values", "outputs"]) this[name] = new Float32Array(0);
  }

  // Make room for a text, and prepare what depends on its length.
  begin(text) {
    const { heads, groups, width, keyWidth } = this, length = text.tokens.length;
    this.text = text;
    this.encoding = this.model.encoding(this.layer, this.edits, text.span);
    this.queries = grown(this.queries, length * heads * keyWidth);
    this.keys = grown(this.keys, length * groups * keyWidth);
    this.values = grown(this.values, length * groups * width);
    this.outputs = grown(this.outputs, length * heads * width);
    this.row = new Float64Array(length); // logits, then weights, of one query of one head
    this.variants.begin(text);
  }

  // 1. Project the input x of the places from `from` on to queries, keys and values, and 2. split them into heads.
  project(x, from) {
    const { variants, heads, groups, width, encoding } = this, { query, key, value } = this.projections;
    x = variants.input(x, from);
    const [q, k, v] = [query, key, value].map((linear) => variants.clipped(product(x, linear)));
    variants.normalise(q, k);
    this.split(q, this.queries, heads, from, (...at) => encoding.rotate?.(...at));
    this.split(k, this.keys, groups, from, (...at) => (encoding.rotateKey ?? encoding.rotate)?.apply(encoding, at));
    this.values.set(v, from * groups * width);
    variants.scaleQueries(this, from, from + q.length / (heads * width));
  }

  // Write queries or keys to their places. A positional encoding can turn each head by its position.
  split(x, to, heads, from, rotate) {
    const { width, keyWidth, text } = this;
    for (let n = 0; n * width < x.length; n++) {
      const at = (from * heads + n) * keyWidth, place = from + Math.floor(n / heads);
      to.set(x.subarray(n * width, (n + 1) * width), at);
      rotate(to, at, width, text.positions[place], n % heads);
    }
  }

  // The mask: the first and the last key that a query sees.
  visible(query) {
    const { text, window, ahead } = this;
    const first = Math.max(text.starts[query], query - (window - 1));
    return [first, Math.min(text.ends[query], query + ahead, query + (window - 1))];
  }

  // Write the logits of a query with the keys that it sees into `row`; return the first and the last key.
  logits(head, query, row) {
    const { heads, keyWidth, queries, keys, scale, encoding, variants, text, groups } = this;
    const [first, last] = this.visible(query), at = (query * heads + head) * keyWidth, group = this.group(head);
    for (let key = first; key <= last; key++) {
      let logit = variants.capped(scale * dot(queries, at, keys, (key * groups + group) * keyWidth, keyWidth));
      if (encoding.bias) logit += encoding.bias(head, text.positions[query], text.positions[key]);
      row[key] = logit;
    }
    variants.addToLogits(this, head, query, row, first, last);
    return [first, last];
  }

  // The key-value head of a query head.
  group(head) {
    return Math.floor((head * this.groups) / this.heads);
  }

  // Call visit(head, first, last) for each of these heads, with its logits in `row`. Queries must come in order.
  eachHead(query, heads, visit) {
    const { row, variants, temperature } = this;
    variants.beforeQuery(this, query);
    for (const head of heads) {
      const [first, last] = this.logits(head, query, row);
      variants.subtractSelected(row, first, last);
      if (temperature !== 1) for (let key = first; key <= last; key++) row[key] /= temperature;
      visit(head, first, last);
    }
    variants.afterQuery(this, query);
  }

  // Replace the logits in `row` by weights.
  weigh(head, first, last) {
    const { row, variants, temperature } = this;
    if (variants.sticks) stickBreaking(row, first, last);
    else softmax(row, first, last, variants.sink && variants.sink[head] / temperature);
  }

  // 3. Attend: a head's output is the mean of the values, with these weights. 4. The outputs are stored side by side,
  // which concatenates the heads.
  attend(query) {
    const { heads, groups, width, values, outputs, row, variants } = this;
    this.eachHead(query, [...Array(heads).keys()], (head, first, last) => {
      this.weigh(head, first, last);
      const at = (query * heads + head) * width, group = this.group(head), sums = new Float64Array(width);
      for (let key = first; key <= last; key++) {
        const weight = row[key], from = (key * groups + group) * width;
        for (let c = 0; c < width; c++) sums[c] += weight * values[from + c];
      }
      outputs.set(sums, at);
    });
    variants.gateOutputs(this, query);
  }

  // 5. Project the concatenated heads of these places.
  output(from, to) {
    const { out, outputNorm } = this.projections;
    const added = product(this.outputs.subarray(from * out.inputs, to * out.inputs), out);
    return outputNorm ? norm(added, outputNorm) : added;
  }

  // The logits and weights of one head, [L × L]. Yields between rows.
  *maps(head) {
    const length = this.text.tokens.length, { row } = this;
    const logits = new Float32Array(length ** 2).fill(-Infinity), weights = new Float32Array(length ** 2);
    for (let query = 0; query < length; query++) {
      this.eachHead(query, [head], (_, first, last) => {
        logits.set(row.subarray(first, last + 1), query * length + first);
        this.weigh(head, first, last);
        weights.set(row.subarray(first, last + 1), query * length + first);
      });
      yield;
    }
    return { length, logits, weights };
  }
}

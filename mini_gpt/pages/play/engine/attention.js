// Multi-head attention of one layer, in five steps: project, split into heads, attend, concatenate, project.
// Keys and values of all places are kept (a KV cache): new tokens at the end need no second pass over the others.
// Calls of variants.js do nothing in a model without variants.

import { grown, norm, product, softmax } from "./arrays.js";
import { Variants, stickBreaking } from "./variants.js";

export const ROWS = 16; // places in a block

export class Attention {
  constructor(model, layer, edits) {
    const { config } = model;
    const { kind, attention } = layer;
    Object.assign(this, { model, layer, edits, projections: attention });
    this.heads = config.num_heads;
    this.groups = config.num_kv_heads; // key-value heads; heads / groups query heads share one
    this.width = config.head_width; // of a head
    this.keyWidth = kind.position === "pope" ? 2 * this.width : this.width;
    this.scale = config.scale_attention && edits.scale !== "off" ? 1 / Math.sqrt(config.scale_width) : 1;
    this.temperature = edits.temperature ?? 1;
    this.window = (edits.window === undefined ? kind.window : edits.window) ?? Infinity;
    this.ahead = { causal: 0, shifted: 1, none: Infinity }[edits.mask ?? "causal"]; // later keys that a query sees
    this.variants = new Variants(model, layer);
    const empty = (count) => Array.from({ length: count }, () => new Float32Array(0));
    // An array for each head: its vectors at all places.
    Object.assign(this, { queries: empty(this.heads), keys: empty(this.groups), values: empty(this.groups) });
    this.outputs = new Float32Array(0);
  }

  // Make room for a text, and prepare what depends on its length.
  begin(text) {
    const { heads, width, keyWidth } = this;
    const length = text.tokens.length;
    this.text = text;
    this.encoding = this.model.encoding(this.layer, this.edits, text.span);
    for (const name of ["queries", "keys"]) this[name] = this[name].map((array) => grown(array, length * keyWidth));
    this.values = this.values.map((array) => grown(array, length * width));
    this.outputs = grown(this.outputs, length * heads * width);
    this.row = new Float64Array(length); // logits, then weights, of one query of one head
    this.variants.begin(text);
  }

  // 1. Project the input x of the places from `from` on to queries, keys and values, and 2. split them into heads.
  project(x, from) {
    const { variants, heads, width, encoding } = this;
    const { query, key, value } = this.projections;
    x = variants.input(x, from);
    const [q, k, v] = [query, key, value].map((linear) => variants.clipped(product(x, linear)));
    variants.normalise(q, k);
    this.split(q, this.queries, from, (...at) => encoding.rotate?.(...at));
    this.split(k, this.keys, from, (...at) => (encoding.rotateKey ?? encoding.rotate)?.apply(encoding, at));
    this.split(v, this.values, from);
    variants.scaleQueries(this, from, from + q.length / (heads * width));
  }

  // Write queries, keys or values to the arrays of their heads. A positional encoding can turn them by their position.
  split(x, heads, from, rotate) {
    const { width, keyWidth, text } = this;
    const each = rotate ? keyWidth : width;
    for (let n = 0; n * width < x.length; n++) {
      const head = n % heads.length;
      const place = from + Math.floor(n / heads.length);
      heads[head].set(x.subarray(n * width, (n + 1) * width), place * each);
      rotate?.(heads[head], place * each, width, text.positions[place], head);
    }
  }

  // The mask: the first and the last key that a query sees.
  visible(query) {
    const { text, window, ahead } = this;
    const first = Math.max(text.starts[query], query - (window - 1));
    return [first, Math.min(text.ends[query], query + ahead, query + (window - 1))];
  }

  // Multiply the queries of these places with the keys that one of them sees. products: of each head, [queries × keys].
  compare(heads, from, to) {
    const { keyWidth, queries, keys } = this;
    const { kernel } = this.model;
    const seen = [];
    for (let query = from; query < to; query++) seen.push(this.visible(query));
    const first = Math.min(...seen.map(([first]) => first));
    const keyCount = Math.max(...seen.map(([, last]) => last)) + 1 - first;
    const products = [];
    for (const head of heads) {
      const weights = keys[this.group(head)].subarray(first * keyWidth, (first + keyCount) * keyWidth);
      const x = queries[head].subarray(from * keyWidth, to * keyWidth);
      products[head] = product(x, { kernel, weights, inputs: keyWidth, outputs: keyCount });
    }
    this.compared = { from, first, keys: keyCount, products };
  }

  // Write the logits of a query with the keys that it sees into `row`; return the first and the last key.
  logits(head, query, row) {
    const { scale, encoding, variants, text, compared } = this;
    const [first, last] = this.visible(query);
    const products = compared.products[head];
    const at = (query - compared.from) * compared.keys - compared.first;
    for (let key = first; key <= last; key++) {
      let logit = variants.capped(scale * products[at + key]);
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
  attend(from, to) {
    const { heads, width, outputs, row, variants } = this;
    const { kernel } = this.model;
    const all = [...Array(heads).keys()];
    this.compare(all, from, to);
    const { first: start, keys, products: weights } = this.compared; // weights take the place of products
    for (let query = from; query < to; query++)
      this.eachHead(query, all, (head, first, last) => {
        this.weigh(head, first, last);
        const at = (query - from) * keys;
        weights[head].fill(0, at, at + keys).set(row.subarray(first, last + 1), at + first - start);
      });
    let transposed;
    let group = -1;
    for (const head of all) {
      if (this.group(head) !== group) transposed = this.transposed((group = this.group(head)), start, keys);
      const means = product(weights[head], { kernel, weights: transposed, inputs: keys, outputs: width });
      for (let n = 0; n < to - from; n++)
        outputs.set(means.subarray(n * width, (n + 1) * width), ((from + n) * heads + head) * width);
    }
    for (let query = from; query < to; query++) variants.gateOutputs(this, query);
  }

  // The values of some keys of a head, as [width × keys].
  transposed(group, first, keys) {
    const { width } = this;
    const values = this.values[group];
    const found = new Float32Array(width * keys);
    for (let key = 0; key < keys; key++)
      for (let c = 0; c < width; c++) found[c * keys + key] = values[(first + key) * width + c];
    return found;
  }

  // 5. Project the concatenated heads of these places.
  output(from, to) {
    const { out, outputNorm } = this.projections;
    const added = product(this.outputs.subarray(from * out.inputs, to * out.inputs), out);
    return outputNorm ? norm(added, outputNorm) : added;
  }

  // The logits and weights of one head, [L × L]. Yields between rows.
  *maps(head) {
    const length = this.text.tokens.length;
    const { row } = this;
    const heads = this.variants.selected ? [0, head] : [head];
    const logits = new Float32Array(length ** 2).fill(-Infinity);
    const weights = new Float32Array(length ** 2);
    for (let query = 0; query < length; query++) {
      if (query % ROWS === 0) this.compare(heads, query, Math.min(query + ROWS, length));
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

// The forward pass: embeddings, blocks of attention and feed-forward, and the residual stream between them.
// Functions with a star compute in blocks and yield between them, so that a worker can read its messages.

import { commonStart } from "../../common/arrays.js";
import { ACTIVATIONS, grown, norm, product } from "./arrays.js";
import { Attention, ROWS } from "./attention.js";
import { checkPositions, checkText, editHeads } from "./edits.js";
import { placesOf } from "./positions.js";

export class Pass {
  constructor(model, edits = {}) {
    const { config } = model;
    Object.assign(this, { model, edits, config, tokens: [], length: 0, complete: false, predicted: [] });
    this.blocks = model.layers.map((layer, n) => new Block(this, layer, n));
    // The residual stream before each layer, and after the last one.
    this.stream = Array.from({ length: config.num_layers + 1 }, () => new Float32Array(0));
    // Whether new tokens change earlier places, so that nothing can come from the cache.
    this.needsWholeText =
      config.variants.selective ||
      config.random_positions !== null ||
      (edits.rope?.scaling ?? config.rope.scaling) === "dynamic" ||
      (edits.mask ?? "causal") !== "causal" ||
      Object.values(edits.heads ?? {}).includes("mean");
    this.donor = edits.patch ? new Pass(model, { ...edits, patch: undefined }) : null;
  }

  // Compute all places that are not in the cache; return their number.
  *run(tokens) {
    if (this.complete && commonStart(tokens, this.tokens) === Math.max(tokens.length, this.tokens.length)) return 0;
    this.begin(tokens);
    if (this.donor) yield* this.donor.run(this.edits.patch.tokens);
    const kept = this.length;
    const whole = this.needsWholeText;
    while (this.length < tokens.length) {
      const from = this.length;
      const to = whole ? tokens.length : Math.min(from + ROWS, tokens.length);
      for (let place = from; place < to; place++) this.embed(place);
      for (const block of this.blocks) yield* block.run(from, to);
      this.length = to;
    }
    this.complete = true;
    return tokens.length - kept;
  }

  begin(tokens) {
    const { config, model, edits } = this;
    const shared = Math.min(this.length, commonStart(tokens, this.tokens));
    const kept = this.needsWholeText ? 0 : shared;
    this.complete = false;
    checkText(tokens, model, edits);
    this.length = kept;
    // The last place that is kept can have another next token.
    this.predicted.length = Math.max(0, Math.min(this.predicted.length, kept - 1));
    this.tokens = [...tokens];
    this.text = { tokens: this.tokens, ...placesOf(this.tokens, model, edits.start ?? 0) };
    checkPositions(this.text, model, edits);
    this.stream = this.stream.map((array) => grown(array, tokens.length * config.d_model));
    for (const block of this.blocks) block.attention.begin(this.text);
  }

  embed(place) {
    const { model, config } = this;
    const D = config.d_model;
    const x = this.rows(0, place, place + 1);
    const at = this.tokens[place] * D;
    x.set(model.embedding.subarray(at, at + D));
    if (config.scale_embeddings) for (let k = 0; k < D; k++) x[k] *= Math.sqrt(D);
    this.blocks[0].attention.encoding.embed?.(x, this.text.positions[place]);
    if (model.embeddingNorm) norm(x, model.embeddingNorm, x);
  }

  // The residual stream before layer n, or after the last layer, at these places.
  rows(n, from, to) {
    return this.stream[n].subarray(from * this.config.d_model, to * this.config.d_model);
  }

  // The logits of the next token, by the stream before layer n, at these places: the logit lens, for n < layers.
  logits(n, from, to) {
    const { model, config } = this;
    const cap = config.output_soft_cap;
    let x = this.rows(n, from, to);
    if (model.finalNorm) x = norm(x, model.finalNorm);
    if (model.predictionHead) {
      const dense = product(x, model.predictionHead.dense);
      x = norm(dense.map(ACTIVATIONS[config.activation]), model.predictionHead.norm);
    }
    const logits = product(x, model.unembedding);
    return cap === null ? logits : logits.map((logit) => cap * Math.tanh(logit / cap));
  }
}

// One layer: x + attention(norm(x)), then x + feed_forward(norm(x)), or with the norms at other places.
class Block {
  constructor(pass, layer, n) {
    const { edits, config } = pass;
    const off = (name) => (edits.layers ?? []).includes(n) || (edits[name] ?? []).includes(n);
    Object.assign(this, { pass, layer, n, config, attention: new Attention(pass.model, layer, edits) });
    Object.assign(this, { attentionOff: off("attentions"), mlpOff: off("feedForwards") });
  }

  *run(from, to) {
    const { pass, n, attention } = this;
    for (let at = from; at < to; at += ROWS) {
      attention.project(this.branchInput(pass.rows(n, at, Math.min(at + ROWS, to)), this.layer.attentionNorm), at);
      yield;
    }
    for (let at = from; at < to; at += ROWS) {
      attention.attend(at, Math.min(at + ROWS, to));
      yield;
    }
    editHeads(this, from, to);
    for (let at = from; at < to; at += ROWS) {
      this.finish(at, Math.min(at + ROWS, to));
      yield;
    }
  }

  // Add the outputs of attention and of the feed-forward to the stream.
  finish(from, to) {
    const { pass, n, config, layer } = this;
    const before = pass.rows(n, from, to);
    const added = this.attentionOff ? new Float32Array(before.length) : this.attention.output(from, to);
    const middle = this.addBranch(before, added, layer.attentionNorm);
    const input = this.branchInput(config.parallel_residual === "none" ? middle : before, layer.mlpNorm);
    const more = this.mlpOff ? new Float32Array(before.length) : this.feedForward(input);
    pass.rows(n + 1, from, to).set(this.addBranch(middle, more, layer.mlpNorm));
  }

  feedForward(x) {
    const { up, gate, down, outputNorm } = this.layer.mlp;
    const units = product(x, up);
    const activate = ACTIVATIONS[this.config.activation];
    if (gate) {
      const gates = product(x, gate);
      for (let f = 0; f < units.length; f++) units[f] *= activate(gates[f]);
    } else for (let f = 0; f < units.length; f++) units[f] = activate(units[f]);
    const out = product(units, down);
    return outputNorm ? norm(out, outputNorm) : out;
  }

  branchInput(x, weights) {
    return this.config.norm_placement === "pre" ? norm(x, weights) : x;
  }

  addBranch(x, added, weights) {
    if (this.config.residual) for (let k = 0; k < x.length; k++) added[k] += x[k];
    return this.config.norm_placement === "post" ? norm(added, weights) : added;
  }
}

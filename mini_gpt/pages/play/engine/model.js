// A trained model as it is packed in the page: its config, and its parameters by name.

import { unpack } from "../../common/arrays.js";
import { Alibi, Fire, HardAlibi, Kerple, T5 } from "./biases.js";
import { ropeOf } from "./edits.js";
import { Kernel } from "./kernel.js";
import { Learned, Pope, Rope, Sinusoidal } from "./positions.js";

export class Model {
  // packed: the dict of pack.py, with the compressed parameters as base64
  static async unpack(packed) {
    return new Model(packed, new Float32Array((await unpack(packed.data)).buffer));
  }

  constructor({ config, layout, parameters }, values) {
    Object.assign(this, { config, layout, parameters: new Map(), kernel: Kernel.of(values) });
    values = this.kernel?.parameters ?? values;
    let at = 0;
    for (const { name, shape } of parameters) {
      const size = shape.reduce((product, length) => product * length, 1);
      this.parameters.set(name, { shape, values: values.subarray(at, (at += size)) });
    }
    if (at !== values.length) throw new Error(`found ${values.length} numbers for ${at} entries of parameters`);
    this.embedding = this.values("embedding");
    this.vocabulary = this.parameters.get("embedding").shape[0];
    this.embeddingNorm = config.embedding_norm ? this.norm("embedding_norm") : null;
    this.layers = config.layers.map((kind, n) => this.layer(kind, `blocks/${n}`));
    this.finalNorm = config.norm_placement === "post" ? null : this.norm("final_norm");
    this.predictionHead = config.prediction_head
      ? { dense: this.linear("output/dense"), norm: this.norm("output/norm") }
      : null;
    const weights = config.tie_embeddings ? this.embedding : this.values("unembedding");
    const bias = this.values("output/bias");
    this.unembedding = { kernel: this.kernel, weights, bias, inputs: config.d_model, outputs: this.vocabulary };
  }

  layer(kind, path) {
    const { config } = this;
    const hasNorms = config.norm_placement !== "none";
    const outputNorm = (name) => (config.output_norm ? this.norm(`${path}/${name}/output_norm`) : null);
    const attention = { path: `${path}/attention`, outputNorm: outputNorm("attention") };
    for (const name of ["query", "key", "value", "out"]) attention[name] = this.linear(`${path}/attention/${name}`);
    const mlp = { up: this.linear(`${path}/mlp/up`), down: this.linear(`${path}/mlp/down`) };
    mlp.gate = this.parameters.has(`${path}/mlp/gate/kernel`) ? this.linear(`${path}/mlp/gate`) : null;
    mlp.outputNorm = outputNorm("mlp");
    const attentionNorm = hasNorms ? this.norm(`${path}/attention_norm`) : null;
    const ownNorm = hasNorms && config.parallel_residual !== "one_norm";
    const mlpNorm = ownNorm ? this.norm(`${path}/mlp_norm`) : attentionNorm;
    return { kind, attention, mlp, attentionNorm, mlpNorm };
  }

  // The entries of a parameter; null if the model does not have it.
  values(name) {
    return this.parameters.get(name)?.values ?? null;
  }

  // A linear layer for `product`.
  linear(path) {
    const { values: weights, shape } = this.parameters.get(`${path}/kernel`);
    const [outputs, inputs] = shape;
    return { kernel: this.kernel, weights, bias: this.values(`${path}/bias`), inputs, outputs };
  }

  norm(path) {
    const { norm: kind, norm_epsilon: epsilon, d_model: width } = this.config;
    return { kind, epsilon, width, scale: this.values(`${path}/scale`), bias: this.values(`${path}/bias`) };
  }

  // The positional encoding of a layer, with the edits. length: of the text.
  encoding({ kind, attention: { path } }, edits, length) {
    const { config } = this;
    const { tables } = config;
    const own = (name) => this.values(`${path}/core/score_mods/${name}`);
    if (kind.position === "learned") return new Learned(this.values("positions/learned/embedding"), config.d_model);
    if (kind.position === "sinusoidal") return new Sinusoidal(tables.sinusoidal);
    if (kind.position === "rope") return new Rope(ropeOf(config, kind, edits), config.rotated_width, length);
    if (kind.position === "pope")
      return new Pope(edits.rope?.base ?? kind.rope_base, config.head_width, this.values("positions/pope/phases"));
    if (kind.position === "alibi") return new Alibi(tables.slopes.map((slope) => slope * (edits.slopes ?? 1)));
    if (kind.position === "hard_alibi") return new HardAlibi(tables.reach);
    if (kind.position === "t5") return new T5(this.values("positions/t5/bias_table"), tables.buckets, config.num_heads);
    if (kind.position === "kerple") return new Kerple(own("p"), own("a"));
    if (kind.position === "fire") {
      const names = ["up", "up_bias", "down", "down_bias", "c", "factor"];
      const weights = Object.fromEntries(names.map((name) => [name, own(name)]));
      return new Fire(weights, config.fire.threshold, config.num_heads);
    }
    return {}; // none; fox and cope act in attention
  }
}

"""GPT-2, GPT-NeoX, Llama and MPT: causal language models."""

from typing import Any, ClassVar

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import QKV, Architecture, Ids
from mini_gpt.hugging_face.settings import Settings


class Rotary(Architecture):
    """An architecture with RoPE. Queries and keys are half-split, as in mini_gpt."""

    position = "rope"
    activation_field = "hidden_act"
    context = ("max_position_embeddings", 2048)
    sizes: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    layers = "layers"
    base_field: str
    fraction_field: str
    fraction_by_default: float

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        # No YaRN: Transformers' ramp is linear in the pair index. The ramp of the paper is linear in rotations.
        return super().supported(model) | {"rope.scaling": ("none", "linear", "ntk"), "rope.turning": (1.0,)}

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        rope, width = config.model.rope, config.model.rotated_width
        base = rope.base * rope.factor ** (width / (width - 2)) if rope.scaling == "ntk" else rope.base
        linear = {"rope_type": "linear", "type": "linear", "factor": rope.factor}  # "type": for versions before 4.45
        scaling = linear if rope.scaling == "linear" else None
        return super().describe(config, ids) | {self.base_field: base, "rope_scaling": scaling}

    def fields(self, settings: Settings) -> dict[str, Any]:
        """Return also the fields of RoPE, from rope_scaling or from rope_parameters (Transformers 5)."""
        old = settings.section("rope_scaling")
        found = old if old.values else settings.section("rope_parameters")  # as Transformers 5 does
        kind_field = "type" if found.get("rope_type") is None else "rope_type"  # null counts as missing
        kind = found.get(kind_field, "default")
        if kind not in ("default", "linear"):
            raise found.error(kind_field, "must be default or linear to be imported")
        factor = found.number("factor", 0.0) if kind == "linear" else 1.0
        if factor < 1:
            raise found.error("factor", "must be at least 1")
        fraction = settings.number(self.fraction_field, self.fraction_by_default)
        return super().fields(settings) | {
            "model.rope.base": found.number("rope_theta", settings.number(self.base_field, 10_000.0)),
            "model.rope.fraction": found.number("partial_rotary_factor", fraction),
            "model.rope.scaling": "linear" if factor > 1 else "none",
            "model.rope.factor": factor,
        }


class GPT2(Architecture):
    """GPT-2 (Radford et al. 2019): learned positions. Matrices are stored [in, out], as in mini_gpt."""

    model_type, title, class_name, position = "gpt2", "GPT-2", "GPT2LMHeadModel", "learned"
    always_biased = tied_by_default = True
    activation_field, activation_by_default = "activation_function", "gelu_new"
    context = ("n_positions", 1024)
    sizes, sizes_by_default = ("n_embd", "n_layer", "n_head"), (768, 12, 12)
    epsilon = ("layer_norm_epsilon", 1e-5)
    exported: ClassVar = {
        "n_positions": "max_positions",
        "n_inner": "d_ff",
        "embd_pdrop": "embedding_dropout",
        "resid_pdrop": "sublayer_dropout",
        "attn_pdrop": "attention_dropout",
    }
    prefix, buffers = "transformer.", r"h\.\d+\.attn\.(masked_)?bias"
    tables: ClassVar = {"wte": "embedding", "wpe": "positions/learned/embedding"}
    layers, final_norm, transposed = "h", "ln_f", False
    layer = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

    def fields(self, settings: Settings) -> dict[str, Any]:
        neutral = {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "add_cross_attention": False}
        settings.require(neutral)
        fields = super().fields(settings)
        d_ff = settings.whole("n_inner", 4 * fields["model.d_model"])
        return fields | {"model.max_positions": fields["context_length"], "model.d_ff": d_ff}


class GPTNeoX(Rotary):
    """GPT-NeoX (Black et al. 2022) with sequential residuals: RoPE, LayerNorm, an MLP of two matrices."""

    model_type, title, class_name = "gpt_neox", "GPT-NeoX", "GPTNeoXForCausalLM"
    always_biased = True
    sizes_by_default = (6144, 44, 64, 24_576)
    epsilon = ("layer_norm_eps", 1e-5)
    fixed: ClassVar = {"attention_bias": True, "use_parallel_residual": False}
    if_missing: ClassVar = {"use_parallel_residual": True}
    exported: ClassVar = {
        "hidden_dropout": "sublayer_dropout",
        "attention_dropout": "attention_dropout",
        "rotary_pct": "rope.fraction",
    }
    base_field, fraction_field, fraction_by_default = "rotary_emb_base", "rotary_pct", 0.25
    prefix, buffers = "gpt_neox.", r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    tables: ClassVar = {"embed_in": "embedding"}
    final_norm, head, interleaved = "final_layer_norm", "embed_out", True
    layer = (
        *("input_layernorm", "attention.query_key_value", "attention.dense"),
        *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    )


class Llama(Rotary):
    """Llama (Touvron et al. 2023): RoPE, RMSNorm, SwiGLU."""

    model_type, title, class_name, norm = "llama", "Llama", "LlamaForCausalLM", "rmsnorm"
    activation_by_default = "silu"
    activations: ClassVar = {"silu": "swiglu", "swish": "swiglu"}
    sizes_by_default = (4096, 32, 32, 11_008)
    epsilon = ("rms_norm_eps", 1e-6)
    exported: ClassVar = {
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_width",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
        "attention_dropout": "attention_dropout",
    }
    base_field, fraction_field, fraction_by_default = "rope_theta", "partial_rotary_factor", 1.0
    prefix, buffers = "model.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    tables: ClassVar = {"embed_tokens": "embedding"}
    final_norm = "norm"
    layer = (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    parameters = ("attention_norm", *QKV.split(), "attention/out", "mlp_norm", "mlp/gate", "mlp/up", "mlp/down")

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | {"num_kv_heads": (model.num_kv_heads,), "rope.fraction": (1.0,)}

    def fields(self, settings: Settings) -> dict[str, Any]:
        for where in (settings, settings.section("rope_parameters")):  # Transformers' Llama ignores this field
            where.require({"partial_rotary_factor": 1.0})
        fields, biased = super().fields(settings), settings.boolean("attention_bias", False)
        heads = fields["model.num_heads"]
        settings.require({"head_dim": fields["model.d_model"] // heads})
        settings.require({"mlp_bias": biased}, if_missing={"mlp_bias": False})
        kv_heads = settings.whole("num_key_value_heads", heads)
        return fields | {"model.num_kv_heads": kv_heads, "model.use_bias": biased}


class MPT(Architecture):
    """MPT (MosaicML 2023) without biases: ALiBi with the paper's slopes for any number of heads."""

    model_type, title, class_name, position = "mpt", "MPT", "MptForCausalLM", "alibi"
    tied_by_default = True
    activations: ClassVar = {"gelu": "gelu_exact"}
    context = ("max_seq_len", 2048)
    sizes, sizes_by_default = ("d_model", "n_layers", "n_heads"), (2048, 24, 16)
    epsilon = ("layer_norm_epsilon", 1e-5)
    fixed: ClassVar = {"expansion_ratio": 4, "no_bias": True}
    attention: ClassVar = {"alibi": True, "alibi_bias_max": 8}
    prefix = "transformer."
    tables: ClassVar = {"wte": "embedding"}
    layers, final_norm = "blocks", "norm_f"
    layer = ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | {"d_ff": (4 * model.d_model,), "use_bias": (False,)}

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        return super().describe(config, ids) | {"attn_config": self.attention}

    def fields(self, settings: Settings) -> dict[str, Any]:
        neutral = {"qk_ln": False, "prefix_lm": False, "clip_qkv": None, "softmax_scale": None}
        settings.section("attn_config").require(self.attention | neutral)
        settings.require({"logit_scale": None})
        fields = super().fields(settings)
        return fields | {"model.d_ff": 4 * fields["model.d_model"]}

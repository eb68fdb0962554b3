"""GPT-2, GPT-Neo, OPT, MPT and Bloom: causal language models without RoPE."""

from typing import Any, ClassVar

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import FOUR_WIDTHS, JOINED, Architecture, Arrays, Ids
from mini_gpt.hugging_face.fields import Field, first_window, shortest, window_in_some_layers
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.tensors import Shape, Tensor

USUAL_D_FF = Field("", "d_ff", FOUR_WIDTHS, written=False)  # no field of config.json changes it


class GPT2(Architecture):
    """GPT-2 (Radford et al. 2019): learned positions. Matrices are stored [in, out], as in mini_gpt.

    Models without positions, or with sinusoidal ones, are exported with a table of these.
    """

    model_type, title, class_name, position = "gpt2", "GPT-2", "GPT2LMHeadModel", "learned"
    always_biased = tied_by_default = True
    activation_field, activation_by_default = "activation_function", "gelu_new"
    context = ("n_positions", 1024)
    sizes, sizes_by_default = ("n_embd", "n_layer", "n_head"), (768, 12, 12)
    aliases: ClassVar = {"max_position_embeddings": "n_positions"}
    epsilon = ("layer_norm_epsilon", 1e-5)
    neutral: ClassVar = {
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "add_cross_attention": False,
    }
    table: ClassVar = (Field("n_inner", "d_ff", FOUR_WIDTHS),)
    dropouts = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
    prefix, buffers = "transformer.", r"h\.\d+\.attn\.(masked_)?bias"
    tables: ClassVar = {"wte": "embedding", "wpe": "positions/learned/embedding"}
    layers, final_norm, transposed = "h", "ln_f", False
    layer, parameters = "ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj", JOINED

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | ({"position": (model.position,)} if self.needs_table(model) else {})

    def needs_table(self, model: ModelConfig) -> bool:
        return set(model.position_pattern) in ({"none"}, {"sinusoidal"})


class GPTNeo(Architecture):
    """GPT-Neo (Black et al. 2021) and TinyStories: scores without a scale, and windows in every second layer."""

    model_type, title, class_name, position = "gpt_neo", "GPT-Neo", "GPTNeoForCausalLM", "learned"
    needs: ClassVar = {"scale_attention": False, "use_bias": True, "qkv_bias": False, "attention_out_bias": True}
    tied_by_default = True
    activation_field, activation_by_default = "activation_function", "gelu_new"
    context = ("max_position_embeddings", 2048)
    sizes, sizes_by_default = ("hidden_size", "num_layers", "num_heads"), (2048, 24, 16)
    epsilon = ("layer_norm_epsilon", 1e-5)
    table: ClassVar = (Field("intermediate_size", "d_ff", FOUR_WIDTHS),)
    dropouts = ("embed_dropout", "resid_dropout", "attention_dropout")
    prefix, buffers = "transformer.", r"h\.\d+\.attn\.attention\.(masked_)?bias"
    tables: ClassVar = {"wte": "embedding", "wpe": "positions/learned/embedding"}
    layers, final_norm = "h", "ln_f"
    layer = (
        "ln_1 attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj attn.attention.out_proj "
        "ln_2 mlp.c_fc mlp.c_proj"
    )

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | window_in_some_layers(model)

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        kinds = ["global" if kind.window is None else "local" for kind in config.model.layer_kinds]
        own = {"attention_types": [[kinds, 1]], "window_size": first_window(config.model, 256)}
        return super().describe(config, ids) | own

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields, window = super().fields(settings), settings.whole("window_size", 256)
        layers, types = fields["model.num_layers"], settings.get("attention_types", [[["global", "local"], 12]])
        try:
            kinds = [kind for pattern, times in types for _ in range(min(times, layers)) for kind in pattern]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
            raise settings.error("attention_types", f"must give global or local for each of the {layers} layers")
        if settings.get("attention_layers", kinds) != kinds:
            raise settings.error("attention_layers", "must be the same as in attention_types")
        return fields | {"model.attention_window": shortest([window if kind == "local" else None for kind in kinds])}


class OPT(Architecture):
    """OPT (Zhang et al. 2022) with norms first: learned positions, of which the file has two more rows at the start."""

    model_type, title, class_name, position = "opt", "OPT", "OPTForCausalLM", "learned"
    needs: ClassVar = {"norm_epsilon": 1e-5}
    always_biased = tied_by_default = True
    activation_field, activation_by_default = "activation_function", "relu"
    context = ("max_position_embeddings", 2048)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")
    sizes_by_default = (768, 12, 12, 3072)
    epsilon = None
    fixed: ClassVar = {"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True}
    neutral: ClassVar = {"_remove_final_layer_norm": False}
    dropouts = (None, "dropout", "attention_dropout")
    prefix = "model.decoder."
    tables: ClassVar = {"embed_tokens": "embedding", "embed_positions": "file/positions"}
    layers, final_norm = "layers", "final_layer_norm"
    layer = (
        "self_attn_layer_norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
        "final_layer_norm fc1 fc2"
    )
    skipped = 2  # rows before that of the first token

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        return super().describe(config, ids) | {"word_embed_proj_dim": config.model.d_model}

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        settings.require({"word_embed_proj_dim": fields["model.d_model"]})
        return fields

    def shapes(self, model: ModelConfig) -> dict[str, Shape]:
        return {"file/positions": (model.max_positions + self.skipped, model.d_model)}

    def fold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        return arrays | {"positions/learned/embedding": arrays.pop("file/positions")[self.skipped :]}

    def unfold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        return arrays | {"file/positions": np.pad(arrays["positions/learned/embedding"], ((self.skipped, 0), (0, 0)))}


class MPT(Architecture):
    """MPT (MosaicML 2023) without biases: ALiBi with the paper's slopes, or steeper or flatter ones (alibi_bias_max).

    Transformers ignores alibi_bias_max, so that models with another one than 8 are imported but not exported.
    """

    model_type, title, class_name, position = "mpt", "MPT", "MptForCausalLM", "alibi"
    tied_by_default = True
    activations: ClassVar = {"gelu": "gelu_exact"}
    context = ("max_seq_len", 2048)
    limits_length = True
    sizes, sizes_by_default = ("d_model", "n_layers", "n_heads"), (2048, 24, 16)
    epsilon = ("layer_norm_epsilon", 1e-5)
    needs: ClassVar = {"use_bias": False}
    fixed: ClassVar = {"expansion_ratio": 4, "no_bias": True}
    neutral: ClassVar = {"logit_scale": None}
    attention: ClassVar = {"alibi": True}
    table: ClassVar = (USUAL_D_FF,)
    prefix = "transformer."
    tables: ClassVar = {"wte": "embedding"}
    layers, final_norm = "blocks", "norm_f"
    layer, parameters = "norm_1 attn.Wqkv attn.out_proj norm_2 ffn.up_proj ffn.down_proj", JOINED

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        own = {"variants.clip_qkv": (model.variants.clip_qkv,), "alibi_exponent": (8.0,)}
        return super().supported(model) | own

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        attention = self.attention | {"alibi_bias_max": 8, "clip_qkv": config.model.variants.clip_qkv}
        return super().describe(config, ids) | {"attn_config": attention}

    def fields(self, settings: Settings) -> dict[str, Any]:
        attention = settings.section("attn_config")
        attention.require(self.attention | {"qk_ln": False, "prefix_lm": False, "softmax_scale": None})
        fields = super().fields(settings)
        fields["model.variants.clip_qkv"] = attention.number("clip_qkv", 0.0) or None
        return fields | {"model.alibi_exponent": attention.number("alibi_bias_max", 8.0)}


class Bloom(Architecture):
    """Bloom (BigScience 2022): ALiBi, and a norm after the embedding."""

    model_type, title, class_name, position = "bloom", "Bloom", "BloomForCausalLM", "alibi"
    needs: ClassVar = {"embedding_norm": True, "alibi_exponent": 8.0}
    always_biased = tied_by_default = True
    context = ("seq_length", 2048)
    sizes, sizes_by_default = ("hidden_size", "n_layer", "n_head"), (64, 2, 8)
    aliases: ClassVar = {"n_embed": "hidden_size"}
    activations: ClassVar = {"gelu": "gelu"}  # always the tanh form
    epsilon = ("layer_norm_epsilon", 1e-5)
    table: ClassVar = (USUAL_D_FF,)
    fixed: ClassVar = {"apply_residual_connection_post_layernorm": False}
    dropouts = (None, "hidden_dropout", "attention_dropout")
    prefix = "transformer."
    tables: ClassVar = {"word_embeddings": "embedding"}
    layers, final_norm, interleaved = "h", "ln_f", True
    layer = (
        "input_layernorm self_attention.query_key_value self_attention.dense "
        "post_attention_layernorm mlp.dense_h_to_4h mlp.dense_4h_to_h"
    )
    parameters = JOINED

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        embedding_norm = self._module(f"{self.prefix}word_embeddings_layernorm", ["embedding_norm"], model)
        return super().tensors(model) + embedding_norm

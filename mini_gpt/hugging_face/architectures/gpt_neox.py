"""GPT-NeoX (Black et al. 2022) with sequential residuals: RoPE, LayerNorm, an MLP of two matrices."""

from typing import Any

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architectures import rotary
from mini_gpt.hugging_face.architectures.settings import ACTIVATION_NAMES, ACTIVATIONS, Settings
from mini_gpt.hugging_face.architectures.tensors import Tensor, linear, norm

TITLE, CLASS = "GPT-NeoX", "GPTNeoXForCausalLM"
ALWAYS_BIASED = True
PREFIX = "gpt_neox."
BUFFERS = r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"


def can(model: ModelConfig) -> dict[str, tuple]:
    """Return {model field of ours: the values that this architecture supports}."""
    return {
        "num_kv_heads": (model.num_heads,),
        "norm": ("layernorm",),
        "activation": tuple(ACTIVATION_NAMES),
        "rope.scaling": rotary.SCALINGS,
    }


def describe(config: Config) -> dict[str, Any]:
    """Return the fields of config.json that only GPT-NeoX has."""
    model = config.model
    return {
        "max_position_embeddings": config.context_length,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.d_ff,
        "hidden_act": ACTIVATION_NAMES[model.activation],
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "use_parallel_residual": False,
        "hidden_dropout": model.sublayer_dropout,
        "attention_dropout": model.attention_dropout,
        "rotary_pct": model.rope.fraction,
        "rotary_emb_base": rotary.base(model),
        "rope_scaling": rotary.scaling(model),
    }


def fields(settings: Settings) -> dict[str, Any]:
    """Return the equivalent config fields of ours. Raises UserError for an unsupported setting."""
    settings.must_be("use_parallel_residual", False, default=True)
    settings.must_be("layer_norm_eps", 1e-5, default=1e-5)
    settings.must_be("attention_bias", True, default=True)
    heads = settings.whole("num_attention_heads", 64)
    return {
        "context_length": settings.whole("max_position_embeddings", 2048),
        "model.d_model": settings.whole("hidden_size", 6144),
        "model.num_layers": settings.whole("num_hidden_layers", 44),
        "model.num_heads": heads,
        "model.num_kv_heads": heads,
        "model.d_ff": settings.whole("intermediate_size", 24_576),
        "model.norm": "layernorm",
        "model.use_bias": True,
        "model.activation": settings.one_of("hidden_act", ACTIVATIONS, "gelu"),
        "model.tie_embeddings": settings.boolean("tie_word_embeddings", False),
        **rotary.fields(settings, base_name="rotary_emb_base", fraction_name="rotary_pct", fraction=0.25),
    }


def tensors(model: ModelConfig) -> list[Tensor]:
    """Return all tensors of a model, and the parameters that they hold."""
    listed = [Tensor(f"{PREFIX}embed_in.weight", ("embedding",))]
    for layer in range(model.num_layers):
        theirs, ours = f"{PREFIX}layers.{layer}", f"blocks/{layer}"
        three = (f"{ours}/attention/{name}" for name in ("query", "key", "value"))
        listed += norm(f"{theirs}.input_layernorm", f"{ours}/attention_norm", biased=True)
        listed += norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm", biased=True)
        listed += linear(f"{theirs}.attention.query_key_value", *three, biased=True, heads=model.num_heads)
        listed += linear(f"{theirs}.attention.dense", f"{ours}/attention/out", biased=True)
        listed += linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}/mlp/up", biased=True)
        listed += linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}/mlp/down", biased=True)
    listed += norm(f"{PREFIX}final_layer_norm", "final_norm", biased=True)
    return listed + ([] if model.tie_embeddings else [Tensor("embed_out.weight", ("unembedding",))])

"""Llama (Touvron et al. 2023): RoPE, RMSNorm, SwiGLU."""

from typing import Any

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architectures import rotary
from mini_gpt.hugging_face.architectures.settings import Settings
from mini_gpt.hugging_face.architectures.tensors import Tensor, linear, norm

TITLE, CLASS = "Llama", "LlamaForCausalLM"
ALWAYS_BIASED = False
PREFIX = "model."
BUFFERS = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def can(model: ModelConfig) -> dict[str, tuple]:
    """Return {model field of ours: the values that this architecture supports}."""
    return {
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "rope.fraction": (1.0,),
        "rope.scaling": rotary.SCALINGS,
    }


def describe(config: Config) -> dict[str, Any]:
    """Return the fields of config.json that only Llama has."""
    model = config.model
    return {
        "max_position_embeddings": config.context_length,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": model.use_bias,
        "mlp_bias": model.use_bias,
        "attention_dropout": model.attention_dropout,
        "rope_theta": rotary.base(model),
        "rope_scaling": rotary.scaling(model),
    }


def fields(settings: Settings) -> dict[str, Any]:
    """Return the equivalent config fields of ours. Raises UserError for an unsupported setting."""
    width, heads = settings.whole("hidden_size", 4096), settings.whole("num_attention_heads", 32)
    settings.one_of("hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu")
    settings.must_be("rms_norm_eps", 1e-5, default=1e-6)
    settings.must_be("head_dim", width // heads, default=width // heads)
    for where in (settings, settings.section("rope_parameters")):  # Transformers' Llama ignores it
        where.must_be("partial_rotary_factor", 1.0, default=1.0)
    biased = settings.boolean("attention_bias", False)
    settings.must_be("mlp_bias", biased, default=False)
    return {
        "context_length": settings.whole("max_position_embeddings", 2048),
        "model.d_model": width,
        "model.num_layers": settings.whole("num_hidden_layers", 32),
        "model.num_heads": heads,
        "model.num_kv_heads": settings.whole("num_key_value_heads", heads),
        "model.d_ff": settings.whole("intermediate_size", 11_008),
        "model.norm": "rmsnorm",
        "model.use_bias": biased,
        "model.activation": "swiglu",
        "model.tie_embeddings": settings.boolean("tie_word_embeddings", False),
        **rotary.fields(settings, base_name="rope_theta", fraction_name="partial_rotary_factor", fraction=1.0),
    }


def tensors(model: ModelConfig) -> list[Tensor]:
    """Return all tensors of a model, and the parameters that they hold."""
    listed = [Tensor(f"{PREFIX}embed_tokens.weight", ("embedding",))]
    for layer in range(model.num_layers):
        theirs, ours = f"{PREFIX}layers.{layer}", f"blocks/{layer}"
        listed += norm(f"{theirs}.input_layernorm", f"{ours}/attention_norm", biased=False)
        listed += norm(f"{theirs}.post_attention_layernorm", f"{ours}/mlp_norm", biased=False)
        products = {
            "self_attn.q_proj": "attention/query",
            "self_attn.k_proj": "attention/key",
            "self_attn.v_proj": "attention/value",
            "self_attn.o_proj": "attention/out",
            "mlp.gate_proj": "mlp/gate",
            "mlp.up_proj": "mlp/up",
            "mlp.down_proj": "mlp/down",
        }
        for their_name, our_name in products.items():
            listed += linear(f"{theirs}.{their_name}", f"{ours}/{our_name}", biased=model.use_bias)
    listed += norm(f"{PREFIX}norm", "final_norm", biased=False)
    return listed + ([] if model.tie_embeddings else [Tensor("lm_head.weight", ("unembedding",))])

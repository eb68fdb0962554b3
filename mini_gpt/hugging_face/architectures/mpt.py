"""ALiBi: MPT (MosaicML 2023), without biases; its slopes are the paper's for any number of heads, as ours."""

from typing import Any

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architectures.settings import Settings
from mini_gpt.hugging_face.architectures.tensors import Tensor, linear, norm

TITLE, CLASS = "MPT", "MptForCausalLM"
ALWAYS_BIASED = False
PREFIX = "transformer."
BUFFERS = "(?!)"


def can(model: ModelConfig) -> dict[str, tuple]:
    """Return {model field of ours: the values that this architecture supports}."""
    return {
        "num_kv_heads": (model.num_heads,),
        "norm": ("layernorm",),
        "activation": ("gelu_exact",),
        "d_ff": (4 * model.d_model,),
        "use_bias": (False,),
    }


def describe(config: Config) -> dict[str, Any]:
    """Return the fields of config.json that only MPT has."""
    model = config.model
    return {
        "max_seq_len": config.context_length,
        "d_model": model.d_model,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "expansion_ratio": 4,
        "layer_norm_epsilon": 1e-5,
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
    }


def fields(settings: Settings) -> dict[str, Any]:
    """Return the equivalent config fields of ours. Raises UserError for an unsupported setting."""
    width, heads = settings.whole("d_model", 2048), settings.whole("n_heads", 16)
    attention = settings.section("attn_config")
    for name, wanted in {"alibi": True, "alibi_bias_max": 8, "qk_ln": False, "prefix_lm": False}.items():
        attention.must_be(name, wanted, default=wanted)
    for name in ("clip_qkv", "softmax_scale"):
        attention.must_be(name, None, default=None)
    settings.must_be("logit_scale", None, default=None)
    settings.must_be("layer_norm_epsilon", 1e-5, default=1e-5)
    settings.must_be("expansion_ratio", 4, default=4)
    settings.must_be("no_bias", True, default=True)
    return {
        "context_length": settings.whole("max_seq_len", 2048),
        "model.position": "alibi",
        "model.d_model": width,
        "model.num_layers": settings.whole("n_layers", 24),
        "model.num_heads": heads,
        "model.num_kv_heads": heads,
        "model.d_ff": 4 * width,
        "model.norm": "layernorm",
        "model.use_bias": False,
        "model.activation": "gelu_exact",
        "model.tie_embeddings": settings.boolean("tie_word_embeddings", True),
    }


def tensors(model: ModelConfig) -> list[Tensor]:
    """Return all tensors of a model, and the parameters that they hold."""
    listed = [Tensor(f"{PREFIX}wte.weight", ("embedding",))]
    for layer in range(model.num_layers):
        theirs, ours = f"{PREFIX}blocks.{layer}", f"blocks/{layer}"
        three = (f"{ours}/attention/{name}" for name in ("query", "key", "value"))
        listed += norm(f"{theirs}.norm_1", f"{ours}/attention_norm", biased=False)
        listed += norm(f"{theirs}.norm_2", f"{ours}/mlp_norm", biased=False)
        listed += linear(f"{theirs}.attn.Wqkv", *three, biased=False)
        listed += linear(f"{theirs}.attn.out_proj", f"{ours}/attention/out", biased=False)
        listed += linear(f"{theirs}.ffn.up_proj", f"{ours}/mlp/up", biased=False)
        listed += linear(f"{theirs}.ffn.down_proj", f"{ours}/mlp/down", biased=False)
    listed += norm(f"{PREFIX}norm_f", "final_norm", biased=False)
    return listed + ([] if model.tie_embeddings else [Tensor("lm_head.weight", ("unembedding",))])

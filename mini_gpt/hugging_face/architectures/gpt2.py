"""GPT-2 (Radford et al. 2019): learned positions. Its matrices are stored [in, out], as ours."""

from typing import Any

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architectures.settings import ACTIVATION_NAMES, ACTIVATIONS, Settings
from mini_gpt.hugging_face.architectures.tensors import Tensor, linear, norm

TITLE, CLASS = "GPT-2", "GPT2LMHeadModel"
ALWAYS_BIASED = True
PREFIX = "transformer."  # missing in files that were saved without the output layer
BUFFERS = r"h\.\d+\.attn\.(masked_)?bias"


def can(model: ModelConfig) -> dict[str, tuple]:
    """Return {model field of ours: the values that this architecture supports}."""
    return {
        "num_kv_heads": (model.num_heads,),
        "norm": ("layernorm",),
        "activation": tuple(ACTIVATION_NAMES),
    }


def describe(config: Config) -> dict[str, Any]:
    """Return the fields of config.json that only GPT-2 has."""
    model = config.model
    return {
        "n_positions": model.max_positions,
        "n_embd": model.d_model,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.d_ff,
        "activation_function": ACTIVATION_NAMES[model.activation],
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": model.embedding_dropout,
        "resid_pdrop": model.sublayer_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def fields(settings: Settings) -> dict[str, Any]:
    """Return the equivalent config fields of ours. Raises UserError for an unsupported setting."""
    settings.must_be("layer_norm_epsilon", 1e-5, default=1e-5)
    settings.must_be("scale_attn_by_inverse_layer_idx", False, default=False)
    settings.must_be("scale_attn_weights", True, default=True)
    settings.must_be("add_cross_attention", False, default=False)
    width, positions = settings.whole("n_embd", 768), settings.whole("n_positions", 1024)
    return {
        "context_length": positions,
        "model.position": "learned",
        "model.max_positions": positions,
        "model.d_model": width,
        "model.num_layers": settings.whole("n_layer", 12),
        "model.num_heads": settings.whole("n_head", 12),
        "model.num_kv_heads": settings.whole("n_head", 12),
        "model.d_ff": settings.whole("n_inner", 4 * width),
        "model.norm": "layernorm",
        "model.use_bias": True,
        "model.activation": settings.one_of("activation_function", ACTIVATIONS, "gelu_new"),
        "model.tie_embeddings": settings.boolean("tie_word_embeddings", True),
    }


def tensors(model: ModelConfig) -> list[Tensor]:
    """Return all tensors of a model, and the parameters that they hold."""
    listed = [Tensor(f"{PREFIX}wte.weight", ("embedding",))]
    listed += [Tensor(f"{PREFIX}wpe.weight", ("positions/learned/embedding",))]
    for layer in range(model.num_layers):
        theirs, ours = f"{PREFIX}h.{layer}", f"blocks/{layer}"
        product = lambda name, *modules: linear(name, *modules, biased=True, transposed=False)
        listed += norm(f"{theirs}.ln_1", f"{ours}/attention_norm", biased=True)
        listed += product(f"{theirs}.attn.c_attn", *(f"{ours}/attention/{name}" for name in ("query", "key", "value")))
        listed += product(f"{theirs}.attn.c_proj", f"{ours}/attention/out")
        listed += norm(f"{theirs}.ln_2", f"{ours}/mlp_norm", biased=True)
        listed += product(f"{theirs}.mlp.c_fc", f"{ours}/mlp/up")
        listed += product(f"{theirs}.mlp.c_proj", f"{ours}/mlp/down")
    listed += norm(f"{PREFIX}ln_f", "final_norm", biased=True)
    return listed + ([] if model.tie_embeddings else [Tensor("lm_head.weight", ("unembedding",))])

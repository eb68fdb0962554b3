"""Pack a trained model for the playground, whose engine computes the forward pass in the browser."""

import base64
import dataclasses
import math
import operator
import re
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.attention import pattern
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.attention.variants import LLAMA4_FACTOR, LLAMA4_SPAN
from mini_gpt.model.positions.absolute import Sinusoidal
from mini_gpt.model.positions.biases import HardAlibi, alibi_slopes, t5_bucket
from mini_gpt.pages.play import limits
from mini_gpt.runtime.errors import UserError, require

MOST_PARAMETERS = 30_000_000
NEEDED = {  # the only value that the engine supports
    "heads": None,  # `removed.whole` gives it
    "encoder_layers": 0,
    "share_embeddings": True,
    "cross_positions": False,
    "causal": True,
    "block": "attention",
    "variants.differential": False,
    "variants.latent": None,
    "sinusoidal.columns": None,
}
# The values that the engine knows, of fields with a choice. A new value is refused until the engine knows it too.
KNOWN = {
    "position": (
        *("none", "learned", "sinusoidal", "rope", "pope", "alibi"),
        *("hard_alibi", "t5", "kerple", "fire", "fox", "cope"),
    ),
    "norm": ("layernorm", "rmsnorm"),
    "norm_placement": ("pre", "post", "none"),
    "parallel_residual": ("none", "two_norms", "one_norm"),
    "activation": ("gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu"),
    "rope.scaling": tuple(limits.SCALINGS),
    "variants.qk_norm": ("none", "plain", "weighted", "all_heads", "layernorm"),
    "variants.query_scale": ("none", "ssmax", "llama4"),
    "variants.normaliser": ("softmax", "stick_breaking"),
    "variants.sink": ("none", "zero", "trained"),
    "variants.gate": ("none", "head", "entry"),
}


def packed(model: LoadedModel) -> dict[str, Any]:
    """Return what the engine needs of a model, in types of JSON: `described`, and the parameters as `data`.

    data: float32 entries, little endian, compressed by zlib, in base64. Kernels are [outputs, inputs], so that the
    engine reads them in the order of memory. Raises the errors of `described`, and UserError for a model that is too
    large.
    """
    if any(edit is not None for edit in model.edits or ()):
        raise ValueError("a model with edits can't be packed")
    found = described(model)
    count = model_parameters.count(model.parameters)
    if count > MOST_PARAMETERS:
        raise UserError(
            f"--suite=play: found {count:,} parameters; a page has at most {MOST_PARAMETERS:,}; "
            "use python -m mini_gpt.play, which computes on a server"
        )
    arrays = {name: np.asarray(array) for name, array in _in_order(model).items()}
    entries = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays.values())
    return {**found, "data": base64.b64encode(zlib.compress(entries, 6)).decode()}


def described(model: LoadedModel) -> dict[str, Any]:
    """Return config, layout, and names and shapes of the parameters. Raises UserError for an unsupported field."""
    config = model.config.model
    for name, value in NEEDED.items():
        found = operator.attrgetter(name)(config)
        if found != value:
            raise UserError(f"model.{name}: found {found!r}; the playground needs {value!r}")
    for name, known in KNOWN.items():
        for found in pattern(operator.attrgetter(name)(config)):
            require(found in known, f"model.{name}", found, f"the playground knows {', '.join(known)}")
    # The tokens at which segments start, and those at which positions restart.
    tokens = {"separator": model.layout.separator_id, "operators": model.layout.operator_ids}
    shapes = [{"name": name, "shape": array.shape} for name, array in _in_order(model).items()]
    return {"config": fields(config), "layout": tokens, "parameters": shapes}


def _in_order(model: LoadedModel) -> dict[str, Any]:
    """Return the parameters by name, with the layers apart and kernels as [outputs, inputs].

    The name of a module in a list of attention has no index: the engine does not know what else is in the list.
    """
    arrays = model_parameters.by_name(model_parameters.with_layers(model.parameters, stacked=False))
    names = {name: re.sub(r"/(on_input|on_heads|score_mods)/[0-9]+/", r"/\1/", name) for name in arrays}
    return {names[name]: array.T if name.endswith("/kernel") else array for name, array in arrays.items()}


def fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields as nested dicts, with the kind of each layer, tables of encodings, and the limits of edits."""
    layers = [kind._asdict() for kind in config.layer_kinds]
    own = {"layers": layers, "rotated_width": config.rotated_width, "tables": tables(config)}
    return dataclasses.asdict(config) | own | {"edits": limits.described(config)}


def tables(config: ModelConfig) -> dict[str, Any]:
    """Return the numbers of what the model uses, which the engine then need not compute.

    sinusoidal: amplitude, and frequencies in radians per token.
    slopes: of ALiBi, for each head.
    reach: the largest distance that each head of Hard-ALiBi sees; None: any.
    buckets: of T5, for each distance up to the longest one.
    llama4: the constants of its scale of queries.
    """
    found: dict[str, Any] = {}
    if config.variants.query_scale == "llama4":
        found["llama4"] = {"span": LLAMA4_SPAN, "factor": LLAMA4_FACTOR}
    for name in config.position_pattern:
        if name == "sinusoidal":
            encoding = Sinusoidal(config, rngs=nnx.Rngs(0))
            found[name] = {"amplitude": encoding.amplitude, "frequencies": encoding.frequencies}
        elif name == "alibi":
            found["slopes"] = alibi_slopes(config.num_heads, config.alibi_exponent)
        elif name == "hard_alibi":
            reach = HardAlibi(config, rngs=nnx.Rngs(0)).reach
            found["reach"] = [None if distance == math.inf else distance for distance in reach]
        elif name == "t5":
            sizes = dataclasses.asdict(config.t5)
            offsets = -jnp.arange(config.t5.max_distance + 1)
            found["buckets"] = np.asarray(t5_bucket(offsets, causal=config.causal, **sizes)).tolist()
    return found

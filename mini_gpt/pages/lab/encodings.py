"""What each positional encoding computes on the small models of the lab, with its initial parameters."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config import attention, loading
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import MASKING_BIAS
from mini_gpt.model.positions.absolute import InputEncoding
from mini_gpt.model.positions.base import Encoding
from mini_gpt.model.positions.biases import Bias
from mini_gpt.model.positions.rotary import Rotation
from mini_gpt.runtime.errors import UserError

HEADS = (1, 2)
CONSTANTS = {"sinusoidal": ("frequencies",), "rope": ("frequencies",), "alibi": ("slopes",)}  # that the page names
TITLES = {"rope": "RoPE", "alibi": "ALiBi", "hard_alibi": "Hard-ALiBi", "t5": "T5", "kerple": "KERPLE", "fire": "FIRE"}


def computed(width: int, length: int) -> dict[str, dict[str, Any]]:
    """Return {name: title, kind, trained and numbers} of the encodings that the page can compute with.

    The constants that the page names are among the numbers.

    It cannot with encodings that depend on the content of tokens or refuse so small a model, and with rotations that
    are not linear or change the width of a head. Each number of heads and each mask has numbers of its own. A shorter
    sentence has the first ones.

    width: of the model.
    length: of the longest sentence, in words.
    """
    models = {
        f"{heads},{str(causal).lower()}": _config(width, heads, causal, length)
        for heads, causal in itertools.product(HEADS, (False, True))
    }
    found: dict[str, dict[str, Any]] = {"none": {"title": "none", "kind": "none", "trained": False, "numbers": {}}}
    for encoding in map(attention.encoding, attention.ENCODINGS):
        kind, compute = next((row for base, row in KINDS.items() if issubclass(encoding, base)), ("none", None))
        if compute is None or encoding.causal_only:
            continue
        try:
            parameters, numbers = jax.jit(functools.partial(_numbers, encoding, compute, models, length))()
        except UserError:
            continue
        if kind == "rotation" and any(np.isnan(x).any() for x in jax.tree.leaves(numbers)):
            continue
        title, numbers = TITLES.get(encoding.name, encoding.name), jax.tree.map(rounded, numbers)
        found[encoding.name] = {"title": title, "kind": kind, "trained": bool(parameters), "numbers": numbers}
    return found


def _numbers(encoding: type[Encoding], compute: Callable[..., Any], models: dict[str, ModelConfig], length: int) -> Any:
    """Return the initial parameters, and the numbers of each model."""
    made = {key: encoding(config, rngs=nnx.Rngs(0)) for key, config in models.items()}
    parameters = jax.tree.leaves([nnx.state(each, nnx.Param) for each in made.values()])
    places_BL = jnp.arange(length)[None]
    shown = CONSTANTS.get(encoding.name, ())
    numbers = {key: {name: jnp.array(getattr(each, name)) for name in shown} for key, each in made.items()}
    return parameters, {key: numbers[key] | compute(each, models[key], places_BL) for key, each in made.items()}


def _config(width: int, heads: int, causal: bool, length: int) -> ModelConfig:
    # Embeddings have a standard deviation of 1, as the numbers of the lab's words.
    fields: dict[str, Any] = {"model.d_model": width, "model.num_heads": heads, "model.scale_embeddings": True}
    fields |= {"model.dtype": "float32", "context_length": length}
    config = loading.from_dict(loading.flatten(loading.defaults()) | fields)
    return dataclasses.replace(config.model, causal=causal)


def _table(encoding: InputEncoding, config: ModelConfig, places_BL: jax.Array) -> dict[str, jax.Array]:
    return {"table": encoding.vectors(places_BL[0], config.d_model)}


def rotations(encoding: Rotation, config: ModelConfig, places_BL: jax.Array) -> dict[str, jax.Array]:
    """Return the matrices_HLKK of queries and of keys, for row · matrix."""
    return {
        "queries": _matrices(encoding.rotate, config, places_BL),
        "keys": _matrices(encoding.rotate_keys, config, places_BL),
    }


def _matrices(rotate: Callable[..., jax.Array], config: ModelConfig, places_BL: jax.Array) -> jax.Array:
    """Return matrices_HLKK, with NaN if there are none, because the rotation is not linear or changes the width."""
    length, width, heads = places_BL.size, config.head_width, config.num_heads
    some_BLHK = np.random.default_rng(0).normal(size=(1, length, heads, width))
    identity_KLHK = np.broadcast_to(np.eye(width)[:, None, None], (width, length, heads, width))
    x_BLHK = jnp.asarray(np.concatenate([some_BLHK, identity_KLHK]), jnp.float32)
    rotated_BLHK = rotate(x_BLHK, jnp.tile(places_BL, (width + 1, 1)))
    rotated_LHK, matrices_KLHK = rotated_BLHK[0], rotated_BLHK[1:]
    expected_LHK = jnp.einsum("lhk,klhe->lhe", x_BLHK[0], matrices_KLHK, precision="highest")
    is_linear = (x_BLHK.shape == rotated_BLHK.shape) & jnp.allclose(rotated_LHK, expected_LHK, atol=1e-4)
    return jnp.where(is_linear, matrices_KLHK.transpose(2, 1, 0, 3), jnp.nan)


def _bias(encoding: Bias, config: ModelConfig, places_BL: jax.Array) -> dict[str, jax.Array]:
    """Return the bias_HLS; JSON has no -inf."""
    bias_BHLS = encoding.bias(places_BL, places_BL)
    shape = (1, config.num_heads, places_BL.size, places_BL.size)
    return {"bias": jnp.maximum(jnp.broadcast_to(bias_BHLS, shape)[0], MASKING_BIAS)}


def rounded(values: jax.Array | np.ndarray) -> list[Any]:
    """Return nested lists with seven digits, and no -0."""
    return np.reshape([float(f"{value:.7g}") + 0.0 for value in np.ravel(values)], values.shape).tolist()


KINDS: dict[type[Encoding], tuple[str, Callable[..., dict[str, jax.Array]]]] = {
    InputEncoding: ("table", _table),
    Rotation: ("rotation", rotations),
    Bias: ("bias", _bias),
}

"""The core of attention of a small config, with random parameters, and its maps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.insight.observing import AttentionMaps
from mini_gpt.model import positions
from mini_gpt.model.attention import reference
from mini_gpt.model.attention.context import Context, Coordinates, Mask
from mini_gpt.model.attention.multi_head import MultiHeadAttention


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def small_config(**fields):
    """Return the config of a model with heads of width 16. The names of fields are without `model.`."""
    heads = fields.get("num_heads", 4)
    base = {"model.num_heads": heads, "model.d_model": 16 * heads, "model.num_layers": 1, "model.dtype": "float32"}
    base |= {"model.position": "none", "train.objective": "next_token" if fields.get("causal", True) else "masked"}
    return loading.load("configs/default.py", base | {f"model.{name}": value for name, value in fields.items()}).model


def make_core(scale=1.0, **fields):
    """Return a core of a config, with its initial parameters."""
    config = small_config(**fields)
    core = MultiHeadAttention(config, config.layer_kinds[0], rngs=nnx.Rngs(0)).core
    core.scale = scale
    return core


def random_core(**fields):
    """Return the definition and the parameters of (core, encodings that layers share), with scale 0.3."""
    config = small_config(**fields)
    definition, weights = nnx.split((make_core(0.3, **fields), positions.shared(config, rngs=nnx.Rngs(0))))
    return definition, jax.tree.map(lambda leaf: leaf + draw(*leaf.shape, seed=9), weights)


def row_context(mask: Any, length: int, positions_BL=None, segments_BL=None, sums_BLH=None) -> Context:
    """Return the context of self-attention."""
    tokens = Coordinates.of(length, positions_BL, segments_BL)._replace(sums_BLH=sums_BLH)
    return Context(tokens, tokens, mask)


def visible_BLS(length, causal=True, window=None, segments_BL=None):
    return row_context(Mask(causal, window), length, segments_BL=segments_BL).visible()


class GivenMask(NamedTuple):
    """Takes the place of a mask."""

    visible_BLS: jax.Array

    def visible(self, queries: Coordinates, keys: Coordinates) -> jax.Array:
        return self.visible_BLS


def attend_with_maps(core, *heads_and_context):
    """Return the output of reference attention, and its maps."""
    definition, parameters = nnx.split(core)

    @jax.jit
    def attend(parameters):
        call = lambda core: reference.attend(core, *heads_and_context)
        out, state = nnx.capture(call, nnx.Intermediate)(nnx.merge(definition, parameters))
        return out, nnx.to_pure_dict(state)

    out, seen = attend(parameters)
    return out, AttentionMaps(*(seen[name][-1] for name in ("logits", "weights", "visible")))

"""The input, the queries and the keys of each layer's self-attention, as a pass of the model multiplies them."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from mini_gpt.data.layout import keys_of
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import running
from mini_gpt.model.attention import reference
from mini_gpt.model.attention.core import Core
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.runtime import sharding


class Vectors(NamedTuple):
    """Of one layer and one text. G: heads of keys.

    input_LD: the input of the projections, after the norm.
    queries_LHK, keys_LGK: after norms and rotations; their products times the scale are the logits before a bias.
    """

    input_LD: Any
    queries_LHK: Any
    keys_LGK: Any


class _Kept:
    """Takes the place of a layer's core and of its projection to queries, and keeps what they get."""

    def __init__(self, attention: MultiHeadAttention):
        self.core, self.query = attention.core, attention.query
        attention.core = attention.query = self  # type: ignore[assignment]

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        self.input_BLD = x_BLD
        return self.query(x_BLD)

    def choose(self, q_BLHK: jax.Array, k_BSGK: jax.Array, *_: Any) -> Any:
        self.vectors = Vectors(self.input_BLD[0], q_BLHK[0], k_BSGK[0])
        return functools.partial(reference.attend, self.core)


def of_layers(model: LoadedModel, tokens_L: np.ndarray) -> list[Vectors]:
    """Return the vectors of each layer of a model without an encoder, in NumPy."""
    tokens_BL = sharding.put_whole(sharding.pad_rows(tokens_L[None], model.mesh), model.mesh)
    return jax.device_get(_of_layers(model, tokens_BL))


@jax.jit
def _of_layers(model: LoadedModel, tokens_BL: jax.Array) -> list[Vectors]:
    module = running.unstack(model.edited())
    kept = [_Kept(block.attention) for block in module.blocks]
    module.hidden(*model.with_layout(tokens_BL, tokens_BL, keys_of(tokens_BL[:, 0])))
    return sharding.replicate([each.vectors for each in kept], model.mesh)


def cores(model: LoadedModel) -> list[Core]:
    """Return the core of each layer's self-attention."""
    return [block.attention.core for block in running.unstack(model.merge()).blocks]

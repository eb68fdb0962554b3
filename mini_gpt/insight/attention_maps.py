"""Every layer's attention for given tokens, captured from the model that trains."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.attention.reference import AttentionMaps
from mini_gpt.model.gpt import Trace, text_layout
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding

MOST_ENTRIES = 2**27  # of a layer's maps at a time, half a gigabyte


def rows_at_a_time(batch_tokens: int, mesh: Mesh, config: ModelConfig, length: int, windows: int) -> int:
    """Gives how many of some windows go through a model whose maps are asked for; a multiple of the mesh's shards."""
    shards = sharding.shards(mesh)
    fitting = max(1, MOST_ENTRIES // (config.num_heads * length**2) // shards) * shards
    return min(shards * max(1, batch_tokens // length // shards), fitting, -(-windows // shards) * shards)


def attention_maps(
    definition: nnx.GraphDef,
    parameters: Parameters,
    tokens_BL: np.ndarray,
    mesh: Mesh,
    *,
    isolate_at: int | None = None,
) -> list[AttentionMaps]:
    """Gives each layer's logits_BHLS before the mask, weights_BHLS (float32) and visible_BLS (bool), in NumPy."""
    maps = each_layer(definition, parameters, tokens_BL, mesh, _whole, (), isolate_at=isolate_at)
    return [AttentionMaps(*layer) for layer in maps]


def each_layer(
    definition: nnx.GraphDef,
    parameters: Parameters,
    tokens_BL: np.ndarray,
    mesh: Mesh,
    reduce: Callable[..., Any],
    arguments: tuple,
    *,
    isolate_at: int | None = None,
    text_BL: np.ndarray | None = None,
) -> list[Any]:
    """Gives `reduce(trace, tokens_BL, *arguments)` of each layer in NumPy: what is not asked for is never whole.

    The batch is divided over the mesh, and so are the arguments, whose first axis is the batch's. `reduce` is traced,
    and a function of a module. text_BL: the text of which the tokens hide a part, by which documents are told apart.
    """
    put = sharding.put_whole((tokens_BL, tokens_BL if text_BL is None else text_BL, *arguments), mesh)
    return jax.device_get(_each_layer(definition, mesh, isolate_at, reduce, parameters, *put))


@functools.partial(jax.jit, static_argnames=("definition", "mesh", "isolate_at", "reduce"))
def _each_layer(definition, mesh, isolate_at, reduce, parameters, tokens_BL, text_BL, *arguments):
    model, layers = model_parameters.merge(definition, parameters), []
    with sharding.over(mesh):
        layout = text_layout(model.config, text_BL, isolate_at)
        model.hidden(tokens_BL, *layout, record=lambda trace: layers.append(reduce(trace, tokens_BL, *arguments)))
    return jax.lax.with_sharding_constraint(layers, NamedSharding(mesh, PartitionSpec()))


def _whole(trace: Trace, tokens_BL: jax.Array) -> AttentionMaps:
    del tokens_BL
    return trace.attention

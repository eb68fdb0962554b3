"""Blocks whose parameters are stacked along a first axis, for a scan over the layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def unstack(definition: nnx.GraphDef, stacked: nnx.State) -> list[Any]:
    """Return the separate blocks."""
    return [nnx.merge(definition, at(stacked, layer)) for layer in range(len(jax.tree.leaves(stacked)[0]))]


def at(tree: Any, index: int) -> Any:
    """Return the arrays of one layer."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def stack_blocks(make_block: Callable[[nnx.Rngs], Any], layers: int, rngs: nnx.Rngs) -> Any:
    """Return a block with the stacked parameters of all layers, equal to those of separately made blocks."""
    start = rngs.params.count[...]
    block = make_block(rngs)
    counts_N = start + (rngs.params.count[...] - start) * jnp.arange(layers + 1, dtype=start.dtype)
    key = rngs.params.key[...]

    def parameters_from(count: jax.Array) -> nnx.State:
        rngs = nnx.Rngs(params=key)
        rngs.params.count[...] = count
        return nnx.state(make_block(rngs))

    nnx.update(block, jax.vmap(parameters_from)(counts_N[:-1]))
    rngs.params.count[...] = counts_N[-1]
    return block

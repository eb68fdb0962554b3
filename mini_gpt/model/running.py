"""Other ways to run the blocks: a scan over stacked layers, recomputed activations, and kernels for GPUs."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.layers import PRODUCT, Keys
from mini_gpt.runtime import devices

T = TypeVar("T")

# {model.remat: what a block saves for its backward pass}. dots: the matrix products, which are slow to recompute.
SAVED = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
}


def make_blocks(config: ModelConfig, block: type, *, rngs: nnx.Rngs) -> Any:
    """Return a list of the blocks, or for a scan one block with the stacked parameters of all layers."""
    if config.scan_layers:
        return _stacked(lambda rngs: block(config, config.layer_kinds[0], rngs=rngs), config.num_layers, rngs)
    return nnx.List([block(config, kind, rngs=rngs) for kind in config.layer_kinds])


def make_runner(config: ModelConfig) -> Callable[..., jax.Array] | None:
    """Return run(blocks, x_BLD, context, keys) -> x_BLD, or None if a loop over the blocks is enough.

    keys: a dropout key for each layer, or None for each layer. The same config gives the same function: NNX compares
    the attributes of models by equality, and another function would compile again.
    """
    if config.scan_layers or config.remat != "none":
        return _runner(config)
    if devices.has_triton():
        from mini_gpt.model import gpu_norm  # imports Pallas

        return gpu_norm.run if gpu_norm.fits(config) else None
    return None


@functools.cache
def _runner(config: ModelConfig) -> Callable[..., jax.Array]:
    return functools.partial(_scan if config.scan_layers else _in_order, config)


def unstack(model: Any) -> Any:
    """Return a model, or an encoder, after its blocks have become a list that a loop runs; the model is changed."""
    if not isinstance(model.blocks, nnx.List):
        block: Any = type(model.blocks)
        definitions, (_, state) = _definitions(model.config, block), nnx.split(model.blocks)
        layers = range(model.config.num_layers)
        blocks = [nnx.merge(definitions[layer % len(definitions)], layer_of(state, layer)) for layer in layers]
        model.blocks = nnx.List(blocks)
    model.run_blocks = None
    return model


def layer_of(tree: T, index: int) -> T:
    """Return the arrays of one layer."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


@functools.cache
def _definitions(config: ModelConfig, block: type) -> tuple[nnx.GraphDef, ...]:
    """Return the definitions of the blocks of one period of the patterns over the layers."""
    kinds = config.layer_kinds[: config.period]
    make = lambda kind: nnx.eval_shape(lambda: block(config, kind, rngs=nnx.Rngs(0)))
    return tuple(nnx.split(make(kind))[0] for kind in kinds)


def _in_order(config: ModelConfig, blocks: Any, x_BLD: jax.Array, context: Context, keys: Keys) -> jax.Array:
    """Run the blocks, and recompute their activations in the backward pass as `model.remat` is set."""
    for block, key in zip(blocks, keys, strict=True):
        layer: Any = functools.partial(block, context=context, dropout_key=key)
        if config.remat != "none":
            layer = jax.checkpoint(layer, policy=SAVED[config.remat], prevent_cse=not config.scan_layers)
        x_BLD = layer(x_BLD)
    return x_BLD


def _scan(config: ModelConfig, stacked: nnx.Module, x_BLD: jax.Array, context: Context, keys: Keys) -> jax.Array:
    """Run all layers in a scan; each step runs one period of the patterns over the layers."""
    definitions, (_, state) = _definitions(config, type(stacked)), nnx.split(stacked)  # type: ignore[arg-type]
    keys_N = None if keys[0] is None else jnp.stack(keys)

    def period(x_BLD: jax.Array, part: tuple) -> tuple[jax.Array, None]:
        state, keys_P = part
        blocks = [nnx.merge(definition, layer_of(state, layer)) for layer, definition in enumerate(definitions)]
        return _in_order(config, blocks, x_BLD, context, [None] * len(blocks) if keys_P is None else keys_P), None

    split_into_periods = lambda leaf: leaf.reshape(-1, len(definitions), *leaf.shape[1:])
    return jax.lax.scan(period, x_BLD, jax.tree.map(split_into_periods, (state, keys_N)))[0]


def _stacked(make_block: Callable[[nnx.Rngs], nnx.Module], layers: int, rngs: nnx.Rngs) -> nnx.Module:
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

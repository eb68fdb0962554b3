"""Attention maps of every layer, reductions of these maps, and the statistics that training logs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.model.attention.reference import AttentionMaps
from mini_gpt.model.gpt import Trace
from mini_gpt.model.layout import keys_of
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

MOST_ENTRIES = 2**27  # most entries of one layer's maps in a batch: half a gigabyte
LOGGED_TOKENS = 64  # first tokens of the maps that training logs


def rows_at_a_time(model: LoadedModel, length: int, windows: int) -> int:
    """Return the batch size for which attention maps fit in memory, a multiple of the number of shards."""
    shards = sharding.shards(model.mesh)
    fitting = max(1, MOST_ENTRIES // (model.config.model.num_heads * length**2) // shards) * shards
    return min(model.rows_at_a_time(length), fitting, -(-windows // shards) * shards)


def relative_entropy(weights_BHLS: jax.Array, seen_BHL: jax.Array) -> jax.Array:
    """Return entropy_BHL of attention weights, divided by the log of the number of keys that are seen; in 0..1.

    The weights are divided by their sum first, which is below 1 with a sink.
    """
    share_BHLS = weights_BHLS / jnp.maximum(weights_BHLS.sum(-1, keepdims=True), 1e-30)
    return jax.scipy.special.entr(share_BHLS).sum(-1) / jnp.log(jnp.maximum(seen_BHL, 2))


def attention_maps(model: LoadedModel, tokens_BL: np.ndarray) -> list[AttentionMaps]:
    """Return each layer's logits_BHLS before the mask, weights_BHLS (float32) and visible_BLS (bool), in NumPy."""
    layers = each_layer(model, sharding.pad_rows(tokens_BL, model.mesh), _maps)
    return [AttentionMaps(*(array[: len(tokens_BL)] for array in layer)) for layer in layers]


def each_layer(
    model: LoadedModel,
    tokens_BL: np.ndarray,
    reduce: Callable[..., Any],
    arguments: tuple = (),
    *,
    text_BL: np.ndarray | None = None,
    rows_B: np.ndarray | None = None,
) -> list[Any]:
    """Return `reduce(trace, *arguments)` of each layer in NumPy, without keeping the traces.

    The batch and the arguments are sharded by rows. reduce: a module-level function that jit can trace. text_BL: the
    text before tokens were masked, to find document boundaries; by default tokens_BL. rows_B: a seed for the random
    positions of each row; by default the row's first token.
    """
    text_BL, rows_B = tokens_BL if text_BL is None else text_BL, tokens_BL[:, 0] if rows_B is None else rows_B
    inputs, arguments = sharding.put_whole(((tokens_BL, text_BL, rows_B), arguments), model.mesh)
    return jax.device_get(_each_layer(model, inputs, arguments, reduce=reduce))


def attention_statistics(
    model: LoadedModel, tokens_BL: np.ndarray, is_query_BL: np.ndarray, source_BS: np.ndarray | None = None
) -> tuple[dict[str, float], np.ndarray]:
    """Return {curve: value} over the queries with True in is_query_BL, and weights_NHLS of the first row.

    The weights are for the row's first LOGGED_TOKENS tokens without padding. Padding is False in is_query_BL.
    attention/logit_variance/layer_N: variance of the scaled logits, with biases, over visible pairs. At initialization
    it is about 1 or less with the scale 1/sqrt(K), and K times that without it (Vaswani et al. 2017, footnote 4).
    attention/entropy/layer_N, and layer_N/head_M for each head: mean entropy of the weights in nats. It is near 0
    if the softmax is saturated.
    """
    layers = jax.device_get(
        _each_layer(model, (tokens_BL, tokens_BL, tokens_BL[:, 0], source_BS), (is_query_BL,), reduce=_statistics)
    )
    curves = {}
    for number, (variance, entropy, entropy_H, _) in enumerate(layers):
        curves[f"attention/logit_variance/layer_{number}"] = float(variance)
        curves[f"attention/entropy/layer_{number}"] = float(entropy)
        curves |= {f"attention/entropy/layer_{number}/head_{head}": float(mean) for head, mean in enumerate(entropy_H)}
    shown = min(LOGGED_TOKENS, int(is_query_BL[0].sum()))
    return curves, np.stack([maps_HLS[:, :shown, :shown] for *_, maps_HLS in layers])


@functools.partial(jax.jit, static_argnames="reduce")
def _each_layer(model: LoadedModel, inputs: tuple, arguments: tuple, *, reduce) -> list[Any]:
    """inputs: tokens_BL, text_BL, rows_B and, with an encoder, source_BS."""
    module, (tokens_BL, text_BL, rows_B, *source) = model.merge(), inputs
    inputs = model.with_layout(tokens_BL, text_BL, keys_of(rows_B), *source)
    with sharding.use_mesh(model.mesh):
        reduce_trace = lambda trace: reduce(trace, *arguments)
        _, _, layers = module.forward(inputs, head_mask_NBH=model.head_mask_NBH, trace=reduce_trace)
    return sharding.replicate(layers, model.mesh)


def _maps(trace: Trace) -> AttentionMaps:
    return trace.attention


def _statistics(trace: Trace, is_query_BL: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    logits_BHLS, weights_BHLS, _ = trace.attention
    visible_BHLS = trace.attention.seen_BHLS & is_query_BL[:, None, :, None]
    entropy_BHL = jnp.sum(jax.scipy.special.entr(weights_BHLS), axis=-1)
    entropy_H = jnp.mean(entropy_BHL, axis=(0, 2), where=is_query_BL[:, None])
    variance = jnp.var(logits_BHLS, where=visible_BHLS)
    return variance, jnp.mean(entropy_H), entropy_H, weights_BHLS[0, :, :LOGGED_TOKENS, :LOGGED_TOKENS]

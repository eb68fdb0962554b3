"""Attention maps of every layer, reductions of these maps, and the statistics that training logs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data.layout import keys_of
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import observing
from mini_gpt.insight.observing import AttentionMaps, Layer
from mini_gpt.runtime import sharding, token_ids

KINDS = ("encoder", "decoder", "cross")  # of attention in a model with an encoder
LOGGED_TOKENS = 64  # first tokens of the maps that training logs


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
    """Return `reduce(layer, *arguments)` of each layer in NumPy, without keeping the activations.

    The batch and the arguments are sharded by rows.

    reduce: a module-level function that jit can layer.
    text_BL: the text before tokens were masked, to find document boundaries; by default tokens_BL.
    rows_B: a seed for the random positions of each row; by default the row's first token.
    """
    token_ids.check(tokens_BL, len(model.parameters["embedding"]), "tokens_BL")
    text_BL, rows_B = tokens_BL if text_BL is None else text_BL, tokens_BL[:, 0] if rows_B is None else rows_B
    inputs, arguments = sharding.put_whole(((tokens_BL, text_BL, rows_B), arguments), model.mesh)
    return jax.device_get(_each_layer(model, inputs, arguments, reduce=reduce))


def maps_by_kind(model: LoadedModel, tokens_BL: np.ndarray, source_BS: np.ndarray) -> dict[str, list[AttentionMaps]]:
    """Return {kind: the attention maps of each layer} of a model with an encoder, in NumPy. Kinds: KINDS.

    encoder: [B, H, S, S], source by source.
    decoder: [B, H, L, L], target by target.
    cross: [B, H, L, S], target by source.
    tokens_BL: the decoder's input.
    source_BS: -1 is padding, which no other token sees; its own rows mean nothing.
    """
    padded_BL, padded_BS = (sharding.pad_rows(array, model.mesh) for array in (tokens_BL, source_BS))
    found = each_layer_by_kind(model, padded_BL, padded_BS, dict.fromkeys(KINDS, _maps))
    own = lambda array: array[: len(tokens_BL)]
    return {kind: jax.tree.map(own, layers) for kind, layers in found.items()}  # a mapped dict would be sorted


def each_layer_by_kind(
    model: LoadedModel,
    tokens_BL: np.ndarray,
    source_BS: np.ndarray,
    reduce: Mapping[str, Callable[..., Any]],
    arguments: Mapping[str, tuple] = MappingProxyType({}),
) -> dict[str, list[Any]]:
    """Return {kind: `reduce[kind](layer, *arguments[kind])` of each layer} of a model with an encoder, in NumPy.

    As `each_layer`. The layers of "decoder" and "cross" are the same blocks; those of "cross" have the maps of
    cross-attention in the place of self-attention.
    """
    token_ids.check(tokens_BL, len(model.parameters["embedding"]), "tokens_BL")
    token_ids.check(source_BS, len(model.parameters["embedding"]), "source_BS", padding=True)
    inputs = sharding.put_whole((tokens_BL, source_BS), model.mesh)
    found = {}
    for kind in reduce:  # a program each: one with all kinds can deadlock on several CPU devices (jax 0.10)
        own = sharding.put_whole(arguments.get(kind, ()), model.mesh)
        found[kind] = jax.device_get(_each_layer_of_kind(model, inputs, own, kind=kind, reduce=reduce[kind]))
    return found


def attention_statistics(
    model: LoadedModel, tokens_BL: np.ndarray, is_query_BL: np.ndarray
) -> tuple[dict[str, float], np.ndarray]:
    """Return {curve: value} over the queries with True in is_query_BL, and weights_NHLS of the first row.

    The weights are for the row's first LOGGED_TOKENS tokens without padding, and NaN for masked pairs. Padding is False
    in is_query_BL.
    attention/logit_variance/layer_N: variance of the scaled logits, with biases, over visible pairs. At initialization
    it is about 1 or less with the scale 1/sqrt(K), and K times that without it (Vaswani et al. 2017, footnote 4).
    attention/entropy/layer_N, and layer_N/head_M for each head: mean entropy of the weights in nats. It is near 0
    if the softmax is saturated.
    """
    config, inputs = model.config.model, (tokens_BL, tokens_BL, tokens_BL[:, 0])
    layers = jax.device_get(_each_layer(model, inputs, (is_query_BL,), reduce=_statistics))
    numbers, shown = config.head_numbers, min(LOGGED_TOKENS, int(is_query_BL[0].sum()))
    maps_NHLS = np.full((len(layers), config.num_heads, shown, shown), np.nan, np.float32)
    for maps_HLS, heads, layer in zip(maps_NHLS, numbers, layers, strict=True):
        maps_HLS[[*heads]] = layer[-1][:, :shown, :shown]
    return _curves(layers, numbers), maps_NHLS


def statistics_by_kind(
    model: LoadedModel, tokens_BL: np.ndarray, is_query_BL: np.ndarray, source_BS: np.ndarray
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the curves of `attention_statistics` and {kind: weights_NHLS of the first row} of all three kinds.

    The names of the curves of encoder and cross-attention begin with attention/encoder and attention/cross.
    """
    count = len(tokens_BL)
    padded = (sharding.pad_rows(array, model.mesh) for array in (tokens_BL, is_query_BL, source_BS))
    tokens_BL, is_query_BL, source_BS = padded
    is_own_B1 = (np.arange(len(tokens_BL)) < count)[:, None]
    is_query_BL, is_source_BS = is_query_BL & is_own_B1, (source_BS >= 0) & is_own_B1
    arguments = {"encoder": (is_source_BS,), "decoder": (is_query_BL,), "cross": (is_query_BL,)}
    found = each_layer_by_kind(model, tokens_BL, source_BS, dict.fromkeys(KINDS, _statistics), arguments)
    source, target = (min(LOGGED_TOKENS, int(is_token_BL[0].sum())) for is_token_BL in (is_source_BS, is_query_BL))
    shown = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    curves: dict[str, float] = {}
    maps = {}
    for kind, (rows, columns) in shown.items():
        numbers, name = [range(model.config.model.num_heads)] * len(found[kind]), f"attention/{kind}"
        curves |= _curves(found[kind], numbers, "attention" if kind == "decoder" else name)
        maps[kind] = np.stack([maps_HLS[:, :rows, :columns] for *_, maps_HLS in found[kind]])
    return curves, maps


def _curves(layers: list[Any], heads: Sequence[Sequence[int]], prefix: str = "attention") -> dict[str, float]:
    curves = {}
    for number, (variance, entropy, entropy_H, _) in enumerate(layers):
        curves[f"{prefix}/logit_variance/layer_{number}"] = float(variance)
        curves[f"{prefix}/entropy/layer_{number}"] = float(entropy)
        entropies = zip(heads[number], entropy_H, strict=True)
        curves |= {f"{prefix}/entropy/layer_{number}/head_{head}": float(mean) for head, mean in entropies}
    return curves


@functools.partial(jax.jit, static_argnames="reduce")
def _each_layer(model: LoadedModel, inputs: tuple, arguments: tuple, *, reduce) -> list[Any]:
    """inputs: tokens_BL, text_BL and rows_B."""
    tokens_BL, text_BL, rows_B = inputs
    layers = observing.layers(model.edited(), model.with_layout(tokens_BL, text_BL, keys_of(rows_B)))
    return sharding.replicate([reduce(layer, *arguments) for layer in layers], model.mesh)


@functools.partial(jax.jit, static_argnames=("kind", "reduce"))
def _each_layer_of_kind(model: LoadedModel, inputs: tuple, arguments: tuple, *, kind: str, reduce) -> list[Any]:
    """inputs: tokens_BL and source_BS."""
    tokens_BL, source_BS = inputs
    inputs = model.with_layout(tokens_BL, source_BS=source_BS)
    if kind == "encoder":
        _, _, layers = observing.observed(model.edited(), lambda module: module.encode(*inputs[3:])[0])
    else:
        layers = observing.layers(model.edited(), inputs)
    if kind == "cross":
        maps = [layer.cross_attention for layer in layers if layer.cross_attention is not None]
        layers = [layer._replace(attention=attention) for layer, attention in zip(layers, maps, strict=True)]
    return sharding.replicate([reduce(layer, *arguments) for layer in layers], model.mesh)


def _maps(layer: Layer) -> AttentionMaps:
    return layer.attention


def _statistics(layer: Layer, is_query_BL: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    logits_BHLS, weights_BHLS, _ = layer.attention
    visible_BHLS = layer.attention.seen_BHLS & is_query_BL[:, None, :, None]
    entropy_BHL = jnp.sum(jax.scipy.special.entr(weights_BHLS), axis=-1)
    entropy_H = jnp.mean(entropy_BHL, axis=(0, 2), where=is_query_BL[:, None])
    variance = jnp.var(logits_BHLS, where=visible_BHLS)
    shown_HLS = jnp.where(layer.attention.seen_BHLS, weights_BHLS, jnp.nan)[0, :, :LOGGED_TOKENS, :LOGGED_TOKENS]
    return variance, jnp.mean(entropy_H), entropy_H, shown_HLS

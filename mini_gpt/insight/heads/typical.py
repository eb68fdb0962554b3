"""The query of a text that shows best what a head does."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.heads.scores import by_offset

Array = jax.Array | np.ndarray
LEAST = 1e-3  # weight above that of uniform attention; less can be rounding


def queries(weights_HLS: Array, seen_HLS: Array, templates_TLS: Array) -> jax.Array:
    """Return query_HK, int32: each head's typical query of each kind of key (T), and as last the one of no kind.

    Of a kind: the query whose weight on such keys is the most above that of uniform attention; -1: none is above it.
    Of no kind: the query whose weights differ the least from the head's mean weights at each distance.
    """
    uniform_HLS = seen_HLS / jnp.maximum(seen_HLS.sum(-1, keepdims=True), 1)
    above_HTL = jnp.einsum("hls,tls->htl", weights_HLS - uniform_HLS, templates_TLS.astype(jnp.float32))
    of_kind_HT = jnp.where(above_HTL.max(-1) > LEAST, above_HTL.argmax(-1), -1)
    length, keys = seen_HLS.shape[1:]
    square = ((0, 0), (0, max(0, keys - length)), (0, max(0, length - keys)))
    weights_HLO, seen_HLO = (by_offset(jnp.pad(x.astype(jnp.float32), square)) for x in (weights_HLS, seen_HLS))
    mean_H1O = weights_HLO.sum(1, keepdims=True) / jnp.maximum(seen_HLO.sum(1, keepdims=True), 1)
    differs_HL = jnp.abs(weights_HLO - mean_H1O).sum(-1)[:, :length]
    mean_H1 = jnp.where(seen_HLS.any(-1), differs_HL, jnp.inf).argmin(-1)[:, None]
    return jnp.concatenate([of_kind_HT, mean_H1], axis=1).astype(jnp.int32)


def telling(weights_HLS: Any, *, of_itself: bool) -> Any:
    """Return score_H (NumPy or JAX): the mean over queries of the largest weight on a key other than the first.

    of_itself: whether the text attends to itself; then a query's own place does not count either.
    """
    others_HLS = weights_HLS * (np.arange(weights_HLS.shape[-1]) > 0)
    if of_itself:
        others_HLS = others_HLS * ~np.eye(weights_HLS.shape[-1], dtype=bool)
    return others_HLS.max(axis=-1).mean(axis=-1)


def telling_head(score_NH: np.ndarray) -> tuple[int, int]:
    """Return the (layer, head) with the highest score of `telling`."""
    layer, head = np.unravel_index(score_NH.argmax(), score_NH.shape)
    return int(layer), int(head)


def of_labels(query_NHK: np.ndarray, kinds: Sequence[str], labels: Sequence[Sequence[str]] | None) -> list[list[int]]:
    """Return query[layer][head]: that of the head's label; of no kind, if the label is none or has no typical query.

    query_NHK: `queries` of each layer.
    kinds: of the templates.
    labels: label[layer][head], or None.
    """
    found_NH = query_NHK[..., -1].copy()
    for layer, head in np.ndindex(*found_NH.shape):
        label = labels[layer][head] if labels else ""
        if label in kinds and query_NHK[layer, head, kinds.index(label)] >= 0:
            found_NH[layer, head] = query_NHK[layer, head, kinds.index(label)]
    return found_NH.tolist()

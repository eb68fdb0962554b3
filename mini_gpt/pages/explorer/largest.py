"""The attention of a long text in little space: the largest weights of each query, and means of the others.

A page for GPT-2's 144 heads and 1,024 tokens would have 75 million weights. A query's largest weights are what a reader
looks for, so these are exact up to quantisation. The other weights are replaced by the mean of their block of keys.
"""

import base64
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention
from mini_gpt.insight.heads import typical
from mini_gpt.insight.observing import Layer

KEPT = 32  # largest weights of a query. All others are below 1 / 33.
BLOCK = 32  # keys
MOST_ROWS = 12 * 12 * 1024  # queries of all heads: GPT-2's with a text of its context length
LONGEST = 1024  # tokens
FLOOR = 16.0  # nats; logits this far below the row's largest are clipped: their weight is ≤ 1.2e-7 of the largest
MOST_STEPS = 254  # of quantisation
HIDDEN = 255  # code of a masked pair


def packed(model: LoadedModel, tokens: np.ndarray, templates_TLS: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Return what the page holds of the attention to a text, from a pass that keeps no maps, and typical query_NHK.

    planes: for each head and query, the gaps between the places of the kept keys (low and high bytes), their levels,
      the levels of the blocks' means, and the first and the last visible key.
    error: the largest difference between a kept weight and the one that the page computes.
    """
    rows = model.rows_at_a_time(len(tokens), "maps", 1)
    templates_BTLS = np.broadcast_to(templates_TLS, (rows, *templates_TLS.shape))
    layers = attention.each_layer(model, np.resize(tokens, (rows, len(tokens))), _largest, (templates_BTLS,))
    *of_heads, query_NHK, score_NH = zip(*layers, strict=True)
    top_XL1, logits_XLK, indices_XLK, weights_XLK, means_XLC, counts_XLC, first_XL, last_XL = map(
        np.concatenate, of_heads
    )
    is_kept_XLK = indices_XLK < len(tokens)
    levels_XLK = np.where(is_kept_XLK, _levels(top_XL1 - logits_XLK), HIDDEN).astype(np.uint8)
    below_XLC = np.log(np.maximum(weights_XLK.max(axis=-1, keepdims=True), 1e-30) / np.maximum(means_XLC, 1e-30))
    levels_XLC = np.where(counts_XLC > 0, _levels(below_XLC), HIDDEN).astype(np.uint8)
    gaps_XLK = np.where(is_kept_XLK, np.diff(indices_XLK, axis=-1, prepend=0), 0)
    wide = [gaps_XLK, first_XL, last_XL]
    low, high = ([(array & 255).astype(np.uint8) for array in wide], [(array >> 8).astype(np.uint8) for array in wide])
    planes = [low[0], high[0], levels_XLK, levels_XLC, low[1], high[1], low[2], high[2]]
    restored_XLK, restored_XLC = _restored(levels_XLK), _restored(levels_XLC)
    sum_XL1 = restored_XLK.sum(axis=-1, keepdims=True) + (restored_XLC * counts_XLC).sum(axis=-1, keepdims=True)
    error_XLK = np.where(is_kept_XLK, restored_XLK / np.maximum(sum_XL1, 1e-30) - weights_XLK, 0)
    fields = {
        "causal": model.config.model.causal,
        "telling": typical.telling_head(np.stack(score_NH)),
        "steps": MOST_STEPS,
        "floor": FLOOR,
        "hidden": HIDDEN,
        "kept": levels_XLK.shape[-1],
        "block": BLOCK,
        "row_max": base64.b64encode(top_XL1.astype("<f4").tobytes()).decode(),
        "logits": base64.b64encode(zlib.compress(b"".join(plane.tobytes() for plane in planes), 9)).decode(),
        "error": float(np.abs(error_XLK).max()),
    }
    return fields, np.stack(query_NHK)


def _levels(below: np.ndarray) -> np.ndarray:
    """Quantise distances of logits from the largest of their row."""
    return np.round(MOST_STEPS * np.sqrt(np.clip(below, 0, FLOOR) / FLOOR))


def _restored(levels: np.ndarray) -> np.ndarray:
    """Return the weights before they are divided by their sum, float64."""
    return np.where(levels == HIDDEN, 0, np.exp(-FLOOR * (levels / MOST_STEPS) ** 2))


def _largest(layer: Layer, templates_BTLS: jax.Array) -> tuple[jax.Array, ...]:
    """Return the parts of `packed` for the first row of a layer; X are its heads, K the kept keys, C blocks of keys.

    The largest logits_XL1; logits, places and weights_XLK of the kept keys in order of place, with the place L if fewer
    keys are visible; means and numbers_XLC of the other visible keys; the first and the last visible key_XL, + 1;
    the typical queries_XK; how telling each head is.
    """
    logits_XLS, weights_XLS, seen_XLS = (maps[0] for maps in (*layer.attention[:2], layer.attention.seen_BHLS))
    length = seen_XLS.shape[-1]
    _, indices_XLK = jax.lax.top_k(jnp.where(seen_XLS, weights_XLS, -1), min(KEPT, length))
    is_seen_XLK = jnp.take_along_axis(seen_XLS, indices_XLK, axis=-1)
    indices_XLK = jnp.sort(jnp.where(is_seen_XLK, indices_XLK, length), axis=-1)
    logits_XLK, weights_XLK = (
        jnp.take_along_axis(maps_XLS, jnp.minimum(indices_XLK, length - 1), axis=-1)
        for maps_XLS in (logits_XLS, weights_XLS)
    )
    is_kept_XLK = indices_XLK < length
    heads, queries = (axis[..., None] for axis in jnp.indices(indices_XLK.shape[:2], sparse=True))
    others_XLS = seen_XLS.at[heads, queries, indices_XLK].set(False, mode="drop")
    counts_XLC = _sum_in_blocks(others_XLS)
    means_XLC = _sum_in_blocks(jnp.where(others_XLS, weights_XLS, 0)) / jnp.maximum(counts_XLC, 1)
    top_XL1 = jnp.where(seen_XLS, logits_XLS, -jnp.inf).max(-1, keepdims=True)
    return (
        jnp.where(jnp.isfinite(top_XL1), top_XL1, 0),
        logits_XLK,
        indices_XLK,
        jnp.where(is_kept_XLK, weights_XLK, 0),
        means_XLC,
        counts_XLC,
        jnp.argmax(seen_XLS, axis=-1),
        jnp.where(seen_XLS.any(-1), length - jnp.argmax(seen_XLS[..., ::-1], axis=-1), 0),
        typical.queries(weights_XLS, seen_XLS, templates_BTLS[0]),
        typical.telling(weights_XLS, of_itself=True),
    )


def _sum_in_blocks(x_XLS: jax.Array) -> jax.Array:
    padded = jnp.pad(x_XLS, ((0, 0), (0, 0), (0, -x_XLS.shape[-1] % BLOCK)))
    return padded.reshape(*x_XLS.shape[:2], -1, BLOCK).sum(-1)

"""Measurements for the checks: predictions, losses, and statistics of each layer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import batches
from mini_gpt.data.batches import in_full_batches
from mini_gpt.evaluation import memory
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, observing
from mini_gpt.insight.diagnosis.blocks import Layer
from mini_gpt.runtime import progress, sharding

WINDOWS, FEWER_WINDOWS, WINDOW_TOKENS = 64, 16, 20_000


def windows(tokens: np.ndarray, length: int, first: int | None, most: int | None = None) -> np.ndarray:
    """Return evenly spaced windows, int32.

    first: see `batches.windows`.
    most: see `count`.
    """
    starts = batches.evenly_spaced(len(tokens), length, count(len(tokens), length, most))
    return batches.windows(tokens, starts, length, first)


def blocks(texts: Sequence[np.ndarray], length: int, first: int | None) -> np.ndarray:
    """Return the whole blocks of texts, int32; a block begins in place of the last token of the one before.

    first: see `batches.windows`.
    """
    starts = [range(0, len(text) - length + 1, length - 1) for text in texts]
    return np.concatenate([batches.windows(*pair, length, first) for pair in zip(texts, starts, strict=True)])


def count(num_tokens: int, length: int, most: int | None = None) -> int:
    """Return the number of windows: 2 to WINDOWS, with about WINDOW_TOKENS tokens if windows are long.

    most: tokens in all windows; None: no other limit.
    """
    return min(most_windows(length), max(2, min(num_tokens, most or num_tokens) // length))


def most_windows(length: int) -> int:
    return min(WINDOWS, max(FEWER_WINDOWS, WINDOW_TOKENS // length))


def place(model: LoadedModel) -> int:
    """Return the position of the prediction that changed inputs are compared by: the last, or the middle if masked."""
    return model.config.context_length // 2 if model.masked else model.config.context_length - 1


def predictions(model: LoadedModel, text_BL: np.ndarray, at: int) -> np.ndarray:
    """Return log-probabilities_BV at position `at`; under the masked objective its token is masked."""

    def compute(part_BL: np.ndarray) -> jax.Array:
        inputs = sharding.put_whole((_masked(model, part_BL, at), part_BL), model.mesh)
        return _predictions(model, *inputs, np.int32(at))

    return in_parts(model, text_BL, compute)[:, : model.vocab_size]


def layers(model: LoadedModel, windows_BM: np.ndarray) -> list[Layer]:
    """Return the statistics of each block for the windows without their last token."""

    def compute(text_BL: np.ndarray) -> list[Layer]:
        return attention.each_layer(model, _masked(model, text_BL, place(model)), statistics, text_BL=text_BL)

    return in_parts(model, windows_BM[:, :-1], compute, "maps")


def in_parts(
    model: LoadedModel, rows_BL: np.ndarray, compute: Callable[[np.ndarray], Any], kept: memory.Kept = "losses"
) -> Any:
    """Return `compute(rows_BL)`, a pytree of arrays with a batch axis; compute it in batches that fit in memory.

    kept: see `LoadedModel.rows_at_a_time`.
    """
    length, parts = model.config.context_length, []
    for count, part in in_full_batches(rows_BL, model.rows_at_a_time(length, kept, len(rows_BL))):
        parts.append(first_rows(compute(np.stack(part)), count))
        progress.advance(count * length)
    return joined(parts)


def first_rows(results: Any, count: int) -> Any:
    """Return a pytree of the first `count` rows of arrays, in NumPy."""
    return jax.tree.map(lambda array: np.asarray(array)[:count], results)


def joined(parts: list[Any]) -> Any:
    """Return a pytree of the concatenated arrays of several ones."""
    return jax.tree.map(lambda *pieces: np.concatenate(pieces), *parts)


def _masked(model: LoadedModel, text_BL: np.ndarray, at: int) -> np.ndarray:
    """Return the inputs: under the masked objective, the mask token is at position `at`."""
    inputs_BL = text_BL.copy()
    if model.masked:
        inputs_BL[:, at] = model.mask_id
    return inputs_BL


@jax.jit
def _predictions(model: LoadedModel, inputs_BL: jax.Array, text_BL: jax.Array, at: jax.Array) -> jax.Array:
    x_BD = model.hidden(inputs_BL, text_BL)[:, at]
    logits_BV = model.merge().logits(x_BD.astype(jnp.float32))
    return sharding.replicate(jax.nn.log_softmax(logits_BV), model.mesh)


def statistics(layer: observing.Layer, is_token_BL: jax.Array | None = None) -> Layer:
    """Return the statistics of one block; self-attention only. is_token_BL: by default, there is no padding."""
    is_token_BL = jnp.ones(layer.before_BLD.shape[:2], bool) if is_token_BL is None else is_token_BL
    maps, is_token_BL1 = layer.attention, is_token_BL[..., None]
    before_BLD, after_BLD, units_BLF = (
        x.astype(jnp.float32) for x in (layer.before_BLD, layer.after_BLD, layer.units_BLF)
    )
    seen_BHLS = maps.seen_BHLS & is_token_BL[:, None, :, None]
    seen_BHL = seen_BHLS.sum(-1)
    entropy_BHL = attention.relative_entropy(maps.weights_BHLS, seen_BHL)
    norms_BL = jnp.linalg.norm(before_BLD, axis=-1) * jnp.linalg.norm(after_BLD, axis=-1)
    cosine_BL = (before_BLD * after_BLD).sum(-1) / jnp.maximum(norms_BL, 1e-30)
    of_rows: Any = (
        jnp.mean(entropy_BHL, axis=(1, 2), where=seen_BHL > 1),
        jnp.std(maps.logits_BHLS, axis=(1, 2, 3), where=seen_BHLS),
        jnp.sqrt(jnp.mean(jnp.square(after_BLD), axis=(1, 2), where=is_token_BL1)),
        jnp.mean(cosine_BL, axis=1, where=is_token_BL),
        jnp.mean(units_BLF, axis=1, where=is_token_BL1),
        jnp.mean(jnp.square(units_BLF), axis=1, where=is_token_BL1),
    )
    return Layer(*of_rows)

"""Measurements for the checks: predictions, losses, and statistics of each layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import batches
from mini_gpt.data.batches import in_full_batches
from mini_gpt.insight import attention
from mini_gpt.insight.diagnosis.blocks import Layer
from mini_gpt.model import memory
from mini_gpt.model.gpt import Trace
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding
from mini_gpt.runtime.progress import Advance, silent

WINDOWS, FEWER_WINDOWS, WINDOW_TOKENS = 64, 16, 20_000
PLACES = 8  # positions of a window, in `sampled_predictions`


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return evenly spaced windows, int32."""
    return batches.windows(tokens, batches.evenly_spaced(len(tokens), length, count(len(tokens), length)), length)


def count(num_tokens: int, length: int) -> int:
    """Return the number of windows: 2 to WINDOWS, with about WINDOW_TOKENS tokens if windows are long."""
    return min(most_windows(length), max(2, num_tokens // length))


def most_windows(length: int) -> int:
    return min(WINDOWS, max(FEWER_WINDOWS, WINDOW_TOKENS // length))


def place(model: LoadedModel) -> int:
    """Return the position of the examined prediction: the last, or under the masked objective the middle."""
    return model.config.context_length // 2 if model.masked else model.config.context_length - 1


def targets(model: LoadedModel, windows_BM: np.ndarray) -> np.ndarray:
    """Return targets_BX, the tokens that the model must predict: at `place` if masked, else all but the first."""
    at = place(model)
    return windows_BM[:, at : at + 1] if model.masked else windows_BM[:, 1:]


def predictions(model: LoadedModel, text_BL: np.ndarray, at: int, *, advance: Advance = silent) -> np.ndarray:
    """Return log-probabilities_BV at position `at`; under the masked objective its token is masked."""
    return _at_places(model, text_BL, [at], advance)[:, 0]


def sampled_predictions(
    model: LoadedModel, windows_BM: np.ndarray, *, advance: Advance = silent
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probabilities_SV, targets_S) at up to PLACES positions of each window, position by position."""
    length, shift = windows_BM.shape[1] - 1, 0 if model.masked else 1
    places = sorted({*np.linspace(length // 4, length - 1, PLACES).astype(int).tolist()})
    # Under the masked objective, each place needs its own pass.
    together = [[at] for at in places] if model.masked else [places]
    found = [_at_places(model, windows_BM[:, :-1], some, advance) for some in together]
    log_PBV = np.concatenate([log_BPV.swapaxes(0, 1) for log_BPV in found])
    return log_PBV.reshape(-1, log_PBV.shape[-1]), np.concatenate([windows_BM[:, at + shift] for at in places])


def nll(model: LoadedModel, windows_BM: np.ndarray, *, advance: Advance = silent) -> np.ndarray:
    """Return nll_BX, the loss of each of the `targets` in nats."""
    if model.masked:
        log_BV = predictions(model, windows_BM[:, :-1], place(model), advance=advance)
        return -np.take_along_axis(log_BV, targets(model, windows_BM), axis=1)
    compute = lambda part_BM: model.nll(*sharding.put_whole((part_BM[:, :-1], part_BM[:, 1:]), model.mesh))
    return in_parts(model, windows_BM, compute, advance=advance)


def layers(model: LoadedModel, windows_BM: np.ndarray, *, advance: Advance = silent) -> list[Layer]:
    """Return the statistics of each block for the windows without their last token."""
    inputs = lambda text_BL: _inputs(model, text_BL, place(model))
    compute = lambda text_BL: attention.each_layer(model, inputs(text_BL), statistics, text_BL=text_BL)
    return in_parts(model, windows_BM[:, :-1], compute, "maps", advance=advance)


def in_parts(
    model: LoadedModel,
    rows_BL: np.ndarray,
    compute: Callable[[np.ndarray], Any],
    kept: memory.Kept = "losses",
    *,
    advance: Advance = silent,
) -> Any:
    """Return `compute(rows_BL)`, a pytree of arrays with a batch axis; compute it in batches that fit in memory.

    kept: see `LoadedModel.rows_at_a_time`. advance: called with the number of tokens of each batch, without padding.
    """
    length, parts = model.config.context_length, []
    for count, part in in_full_batches(rows_BL, model.rows_at_a_time(length, kept, len(rows_BL))):
        results = compute(np.stack(part))
        parts.append(jax.tree.map(lambda array, count=count: np.asarray(array)[:count], results))
        advance(count * length)
    return jax.tree.map(lambda *pieces: np.concatenate(pieces), *parts)


def _at_places(model: LoadedModel, text_BL: np.ndarray, places: list[int], advance: Advance) -> np.ndarray:
    """Return log-probabilities_BPV at some positions; under the masked objective, their tokens are masked."""
    put = lambda part_BL: sharding.put_whole((_inputs(model, part_BL, places), part_BL), model.mesh)
    compute = lambda part_BL: _predictions(model, *put(part_BL), np.array(places))
    return in_parts(model, text_BL, compute, advance=advance)[..., : model.vocab_size]


def _inputs(model: LoadedModel, text_BL: np.ndarray, at: int | list[int]) -> np.ndarray:
    inputs_BL = text_BL.copy()
    if model.masked:
        inputs_BL[:, at] = model.vocab_size
    return inputs_BL


@jax.jit
def _predictions(model: LoadedModel, inputs_BL: jax.Array, text_BL: jax.Array, at_P: jax.Array) -> jax.Array:
    x_BPD = model.hidden(inputs_BL, text_BL)[:, at_P]
    logits_BPV = model.merge().logits(x_BPD.astype(jnp.float32))
    return sharding.replicate(jax.nn.log_softmax(logits_BPV), model.mesh)


def statistics(trace: Trace, is_token_BL: jax.Array | None = None) -> Layer:
    """Return the statistics of one block; self-attention only. is_token_BL: by default, there is no padding."""
    maps = trace.attention
    before_BLD, after_BLD, units_BLF = (
        x.astype(jnp.float32) for x in (trace.before_BLD, trace.after_BLD, trace.units_BLF)
    )
    is_token_BL = jnp.ones(before_BLD.shape[:2], bool) if is_token_BL is None else is_token_BL
    seen_BHLS = maps.seen_BHLS & is_token_BL[:, None, :, None]
    seen_BHL = seen_BHLS.sum(-1)
    entropy_BHL = attention.relative_entropy(maps.weights_BHLS, seen_BHL)
    is_token_BL1 = is_token_BL[..., None]
    root_mean_square = lambda x: jnp.sqrt(jnp.mean(jnp.square(x), axis=(1, 2), where=is_token_BL1))
    norms_BL = jnp.linalg.norm(before_BLD, axis=-1) * jnp.linalg.norm(after_BLD, axis=-1)
    cosine_BL = (before_BLD * after_BLD).sum(-1) / jnp.maximum(norms_BL, 1e-30)
    statistics: Any = (
        jnp.mean(entropy_BHL, axis=(1, 2), where=seen_BHL > 1),
        jnp.std(maps.logits_BHLS, axis=(1, 2, 3), where=seen_BHLS),
        root_mean_square(before_BLD),
        root_mean_square(after_BLD),
        jnp.mean(cosine_BL, axis=1, where=is_token_BL),
        jnp.mean(units_BLF, axis=1, where=is_token_BL1),
        jnp.mean(jnp.square(units_BLF), axis=1, where=is_token_BL1),
    )
    return Layer(*statistics)

"""Generation for any causal model: with a KV cache, or where that would be wrong, by a full pass for each token.

A new token changes what earlier tokens compute in two kinds of models: with selective attention, and with RoPE's
dynamic scaling once the text is longer than the original context, because all angles change with the length. It would
not be enough to keep keys before their rotation, as Peng et al. 2023 (3.3) do: the keys and values of the second layer
depend on the rotation in the first. Transformers keeps rotated keys, and so writes another text; with use_cache=False
it writes this one.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.fields import convert
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache as caches
from mini_gpt.generation import decoding
from mini_gpt.generation.prompts import Prompt, prepare
from mini_gpt.generation.sampling import Sampling, draw, noise


def stream(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    length: int,
    sampling: Sampling = decoding.DEFAULT_SAMPLING,
    seed: int = 0,
    sources: Sequence[Prompt] | None = None,
) -> Iterator[np.ndarray]:
    """Yield sampled tokens_BN, int32, as `decoding.stream` does for models with a KV cache; it takes its arguments."""
    seed = convert("seed", seed, int)
    prepared, padded, capacity = prepare(model, prompts, sources, length)
    if caches.without_cache(prepared.config.model, capacity) is None:
        yield from decoding.stream(model, prompts, length=length, sampling=sampling, seed=seed, sources=sources)
        return
    tokens_BT = jnp.pad(padded.tokens_BL, ((0, 0), (0, capacity - padded.tokens_BL.shape[1])))
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    for number in range(length):
        tokens_BT, new_B = _next(prepared, sampling, tokens_BT, padded.lengths_B + number, keys_B)
        yield np.asarray(new_B)[:, None]


@functools.partial(jax.jit, static_argnums=1)
def _next(
    model: LoadedModel, sampling: Sampling, tokens_BT: jax.Array, lengths_B: jax.Array, keys_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the texts with one more token each, and these tokens."""
    logits_BV, rows_B = next_logits(model, tokens_BT, lengths_B), jnp.arange(len(tokens_BT))
    seen_BV = None
    if sampling.repetition_penalty != 1:
        is_text_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B[:, None], tokens_BT].max(is_text_BT)
    new_B = draw(logits_BV, seen_BV, noise(keys_B, lengths_B, logits_BV.shape[1]), sampling)
    return tokens_BT.at[rows_B, lengths_B].set(new_B), new_B


def next_logits(model: LoadedModel, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Return the logits_BV after the last token of each row, float32; rows are padded on the right."""
    indices_BT, last_B1 = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape), lengths_B[:, None] - 1
    positions_BT, segments_BT = model.layout.positions_and_segments(model.config.model, tokens_BT)
    positions_BT = indices_BT if positions_BT is None else positions_BT
    # Padding, which no token sees, must not lengthen the row: it has the position of the last token.
    positions_BT = jnp.take_along_axis(positions_BT, jnp.minimum(indices_BT, last_B1), axis=1)
    module = model.edited()
    x_BTD = module.hidden(model.layout.decoder_tokens(tokens_BT), positions_BT, segments_BT)
    return module.logits(jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1))[:, 0]

"""Generate text token by token with a KV cache."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.fields import convert
from mini_gpt.data.batches import in_full_batches
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache as caches
from mini_gpt.generation.cache import Cache, Text
from mini_gpt.generation.prompts import Prompt, Prompts, prepare
from mini_gpt.generation.sampling import Sampling, draw, noise
from mini_gpt.runtime import progress

CHUNK = 16  # tokens that one call of the compiled loop samples for each row
DEFAULT_SAMPLING, GREEDY = Sampling(), Sampling(temperature=0)
ROWS = 64  # sources whose targets are decoded at the same time


class _State(NamedTuple):
    """What a decoding step changes.

    tokens_B: the last sampled tokens.
    seen_BV: True for tokens in a row's text; None without a repetition penalty.
    """

    tokens_B: jax.Array
    seen_BV: jax.Array | None
    keys_B: jax.Array
    cache: Cache | Text


def stream(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    length: int,
    sampling: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    sources: Sequence[Prompt] | None = None,
) -> Iterator[np.ndarray]:
    """Yield sampled tokens_BN, int32: first one token per row, then up to CHUNK at a time, `length` in all.

    Prompts may differ in length. A row's tokens depend only on the seed, its prompt and its index. With
    `model.random_positions`, they also depend on the length of the longest row.

    sources: the encoder's tokens for each prompt.

    Raises the errors of `prompts.prepare` and of `cache.prefill`.
    """
    seed = convert("seed", seed, int)
    model, padded, capacity = prepare(model, prompts, sources, length)
    if length == 0:
        return
    state = _start(model, sampling, capacity, padded, seed)
    state, _ = _continue(model, sampling, state, 0)  # compiles the loop, so that no pause follows the first token
    yield np.asarray(state.tokens_B)[:, None]
    chunk = 1 if isinstance(state.cache, Text) else CHUNK  # a full pass takes long
    for written in range(1, length, chunk):
        count = min(chunk, length - written)
        state, tokens_BN = _continue(model, sampling, state, count)
        yield np.asarray(tokens_BN)[:, :count]


def generate(model: LoadedModel, prompts: Sequence[Prompt], **options) -> np.ndarray:
    """Return all tokens_BN that `stream` yields, in one array. Takes the same arguments."""
    parts = list(stream(model, prompts, **options))
    return np.concatenate([np.zeros((len(prompts), 0), np.int32), *parts], axis=1)


def greedy_targets(model: LoadedModel, sources: Sequence[np.ndarray], separator: int, length: int) -> list[np.ndarray]:
    """Return the greedy target of each source, int32, without its end; at most `length` tokens.

    Raises the errors of `prompts.prepare`.
    """
    found: list[np.ndarray] = [np.zeros(0, np.int32)] * len(sources)
    by_length = sorted(range(len(sources)), key=lambda index: len(sources[index]))  # similar lengths share a batch
    for count, indices in in_full_batches(by_length, min(ROWS, len(sources) or 1)):
        prompts, of_batch = [[separator]] * len(indices), [sources[index] for index in indices]
        parts = []
        ended_B = np.zeros(len(indices), bool)
        for tokens_BN in stream(model, prompts, length=length, sampling=GREEDY, sources=of_batch):
            parts.append(tokens_BN)
            ended_B |= (tokens_BN == separator).any(axis=1)
            if ended_B.all():
                break
        for index, tokens_L in zip(indices[:count], np.concatenate(parts, axis=1), strict=False):
            is_end_L = tokens_L == separator
            found[index] = tokens_L[: is_end_L.argmax()] if is_end_L.any() else tokens_L
        progress.advance(count * sum(tokens_BN.shape[1] for tokens_BN in parts))
    return found


@functools.partial(jax.jit, static_argnums=(1, 2))
def _start(model: LoadedModel, sampling: Sampling, capacity: int, prompts: Prompts, seed) -> _State:
    """Prefill the cache with the prompts, and sample the first token of each row."""
    tokens_BL, lengths_B, source_BS = prompts
    logits_BV, cache = caches.prefill(model, tokens_BL, lengths_B, capacity, source_BS)
    rows_B = jnp.arange(len(tokens_BL))
    seen_BV = None
    if sampling.repetition_penalty != 1:
        is_prompt_BL = jnp.arange(tokens_BL.shape[1]) < lengths_B[:, None]
        if source_BS is not None and model.layout.separator_id is not None:  # the start of a target is its end too
            is_prompt_BL &= tokens_BL != model.layout.separator_id
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B[:, None], tokens_BL].max(is_prompt_BL)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows_B)
    noise_BV = noise(keys_B, lengths_B, logits_BV.shape[1])
    none_B = jnp.zeros_like(lengths_B)
    return _draw_next(_State(none_B, seen_BV, keys_B, cache), logits_BV, noise_BV, sampling)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def _continue(model: LoadedModel, sampling: Sampling, state: _State, count: int) -> tuple[_State, jax.Array]:
    """Sample `count` ≤ CHUNK more tokens of each row; return the state and tokens_BN with N = CHUNK."""
    vocab_size = len(model.parameters["embedding"])
    # All noise of the chunk at once: token by token, it took a fifth of a small model's time.
    indices_NB = state.cache.lengths_B + 1 + jnp.arange(CHUNK)[:, None]
    noise_NBV = jax.vmap(lambda indices_B: noise(state.keys_B, indices_B, vocab_size))(indices_NB)

    def step(number, carry):
        state, tokens_BN = carry
        logits_BV, cache = caches.decode(model, state.tokens_B, state.cache)
        state = _draw_next(state._replace(cache=cache), logits_BV, noise_NBV[number], sampling)
        return state, tokens_BN.at[:, number].set(state.tokens_B)

    tokens_BN = jnp.zeros((len(state.tokens_B), CHUNK), jnp.int32)
    return jax.lax.fori_loop(0, count, step, (state, tokens_BN))


def _draw_next(state: _State, logits_BV: jax.Array, noise_BV: jax.Array, sampling: Sampling) -> _State:
    tokens_B = draw(logits_BV, state.seen_BV, noise_BV, sampling)
    if state.seen_BV is not None:
        state = state._replace(seen_BV=state.seen_BV.at[jnp.arange(len(tokens_B)), tokens_B].set(True))
    return state._replace(tokens_B=tokens_B)

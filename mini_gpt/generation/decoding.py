"""Generate text token by token with a KV cache."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.generation import cache as caches
from mini_gpt.generation.cache import Cache
from mini_gpt.generation.sampling import Sampling, draw, noise
from mini_gpt.model import gpt
from mini_gpt.model.gpt import check_length, compute_dtype
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime.errors import UserError, require

CHUNK = 16  # tokens that one call of the compiled loop samples for each row
# Prompts are padded to a power of two and the capacity to a multiple of BLOCK, so that few shapes are compiled.
SHORTEST_PROMPT, BLOCK = 16, 64
DEFAULT_SAMPLING = Sampling()
Prompt = Sequence[int] | np.ndarray  # token ids


class _State(NamedTuple):
    """tokens_B: last sampled tokens. seen_BV: true for tokens in a row's text; None without a repetition penalty."""

    tokens_B: jax.Array
    seen_BV: jax.Array | None
    keys_B: jax.Array
    cache: Cache


def stream(
    model: LoadedModel, prompts: Sequence[Prompt], *, length: int, sampling: Sampling = DEFAULT_SAMPLING, seed: int = 0
) -> Iterator[np.ndarray]:
    """Yield sampled tokens_BN, int32: first one token per row, then up to CHUNK at a time, `length` in all.

    Prompts may differ in length. A row's tokens depend only on the seed, its prompt and its index. With
    `model.random_positions`, they also depend on the length of the longest row. Raises UserError if there is no prompt,
    a prompt is empty, the model can't use a KV cache, or prompt and length exceed the model's positions.
    """
    config, vocab_size = model.config.model, model.merge().vocab_size
    caches.check(config)
    require(length >= 0, "length", length, "must be at least 0")
    if not len(prompts) or not all(map(len, prompts)):
        raise UserError("prompt: found no token; give at least one")
    if dtype(config) != compute_dtype(config.dtype):
        model = dataclasses.replace(model, definition=_float32_definition(config, vocab_size))
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths_B.max())
    capacity = longest + length
    check_length(config, capacity)
    if config.random_positions is None:  # random positions depend on the capacity
        capacity = math.ceil(capacity / BLOCK) * BLOCK
    padded = min(capacity, max(SHORTEST_PROMPT, 2 ** math.ceil(math.log2(longest))))
    if config.position == "learned":
        padded = min(padded, config.max_positions)
    tokens_BL = np.stack([np.pad(np.asarray(prompt, np.int32), (0, padded - len(prompt))) for prompt in prompts])
    if length == 0:
        return
    state = _start(model, sampling, capacity, tokens_BL, lengths_B, seed)
    state, _ = _continue(model, sampling, state, 0)  # compiles the loop, so that no pause follows the first token
    yield np.asarray(state.tokens_B)[:, None]
    for written in range(1, length, CHUNK):
        count = min(CHUNK, length - written)
        state, tokens_BN = _continue(model, sampling, state, count)
        yield np.asarray(tokens_BN)[:, :count]


def generate(model: LoadedModel, prompts: Sequence[Prompt], **options) -> np.ndarray:
    """Return all tokens_BN that `stream` yields, in one array. Takes the same arguments."""
    parts = list(stream(model, prompts, **options))
    return np.concatenate([np.zeros((len(prompts), 0), np.int32), *parts], axis=1)


def dtype(config: ModelConfig) -> jnp.dtype:
    """Return the dtype of matrix products; auto is float32 on CPUs, where bfloat16 is slower for single rows."""
    in_float32 = config.dtype == "auto" and jax.default_backend() == "cpu"
    return compute_dtype("float32" if in_float32 else config.dtype)


@functools.cache
def _float32_definition(config: ModelConfig, vocab_size: int) -> nnx.GraphDef:
    return gpt.abstract(dataclasses.replace(config, dtype="float32"), vocab_size)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _start(model: LoadedModel, sampling: Sampling, capacity: int, tokens_BL, lengths_B, seed) -> _State:
    """Prefill the cache with the prompts and sample the first token of each row."""
    logits_BV, cache = caches.prefill(model, tokens_BL, lengths_B, capacity)
    rows_B = jnp.arange(len(tokens_BL))
    seen_BV = None
    if sampling.repetition_penalty != 1:
        is_prompt_BL = jnp.arange(tokens_BL.shape[1]) < lengths_B[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B[:, None], tokens_BL].max(is_prompt_BL)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows_B)
    noise_BV = noise(keys_B, lengths_B, logits_BV.shape[1])
    none_B = jnp.zeros_like(lengths_B)
    return _draw_next(_State(none_B, seen_BV, keys_B, cache), logits_BV, noise_BV, sampling)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def _continue(model: LoadedModel, sampling: Sampling, state: _State, count: int) -> tuple[_State, jax.Array]:
    """Sample `count` ≤ CHUNK more tokens of each row; return the state and tokens_BN with N = CHUNK."""
    vocab_size = model.merge().vocab_size
    # All noise of the chunk at once: token by token, it took a fifth of a small model's time.
    places_NB = state.cache.lengths_B + 1 + jnp.arange(CHUNK)[:, None]
    noise_NBV = jax.vmap(lambda places_B: noise(state.keys_B, places_B, vocab_size))(places_NB)

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

"""Text from a model, token by token, each drawn from logits that a cache of the tokens before makes cheap."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.generation import cache as caches
from mini_gpt.generation.cache import Cache
from mini_gpt.generation.sampling import Sampling, draw, noise
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import check_length, compute_dtype
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime.errors import UserError

CHUNK = 16  # tokens that are drawn before anyone is told of them
# Few lengths are compiled: prompts are filled up to a power of two, what a row may hold to a multiple.
SHORTEST_PROMPT, BLOCK = 16, 64
ALL = Sampling()
CUT = "\ufffd"  # what a decoder gives for a character that is not whole yet


class _Writing(NamedTuple):
    """Where decoding stands: the last token drawn, and what the next one is made of.

    seen_BV: what stands in each row's text already, where there is a penalty on it.
    """

    tokens_B: jax.Array
    seen_BV: jax.Array | None
    keys_B: jax.Array
    cache: Cache


def stream(
    definition: nnx.GraphDef,
    parameters: Parameters,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    sampling: Sampling = ALL,
    seed: int = 0,
    isolate_at: int | None = None,
) -> Iterator[np.ndarray]:
    """Yields drawn tokens_BN, int32: the first one as soon as it is there, then up to CHUNK at a time, `length` in all.

    prompts: token ids, a row each, of any lengths. isolate_at: the separator at which documents are kept apart, for a
    model that was trained so. With `model.dtype=auto` products are in float32 on CPUs. The same seed gives a row the
    same tokens, whatever the other rows are (not so with `model.random_positions`, which are drawn for the longest).
    Raises UserError for an empty prompt, a bidirectional model, or where prompt and length pass the positions that
    there are.
    """
    model = nnx.merge(definition, nnx.State(jax.eval_shape(lambda: parameters)))
    config = model.config
    if not config.causal:
        raise UserError(
            "model.causal: found False; a bidirectional model does not predict the next token, so can't write"
        )
    if length < 0:
        raise UserError(f"length: found {length}; must be at least 0")
    if not all(map(len, prompts)):
        raise UserError("prompt: found no token; give at least one")
    if dtype(config) != model.dtype:
        definition = _in_float32(config, model.vocab_size)
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths_B.max())
    capacity = longest + length
    check_length(config, capacity)
    if config.random_positions is None:  # which are drawn for so many tokens as there will be
        capacity = math.ceil(capacity / BLOCK) * BLOCK
    padded = min(capacity, max(SHORTEST_PROMPT, 2 ** math.ceil(math.log2(longest))))
    if config.position == "learned":
        padded = min(padded, config.max_positions)
    tokens_BL = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, : len(prompt)] = prompt
    if length == 0:
        return
    writing = _read(definition, isolate_at, sampling, capacity, parameters, tokens_BL, lengths_B, seed)
    writing, _ = _write(definition, isolate_at, sampling, parameters, writing, 0)  # compiled while none waits for more
    yield np.asarray(writing.tokens_B)[:, None]
    written = 1
    while written < length:
        count = min(CHUNK, length - written)
        writing, tokens_BN = _write(definition, isolate_at, sampling, parameters, writing, count)
        yield np.asarray(tokens_BN)[:, :count]
        written += count


def dtype(config: ModelConfig) -> jnp.dtype:
    """Gives what products are in: with auto on CPUs float32, since bfloat16 makes those of one row slower there."""
    in_float32 = config.dtype == "auto" and jax.default_backend() == "cpu"
    return compute_dtype("float32" if in_float32 else config.dtype)


@functools.cache
def _in_float32(config: ModelConfig, vocab_size: int) -> nnx.GraphDef:
    return model_parameters.abstract(dataclasses.replace(config, dtype="float32"), vocab_size)[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _read(definition, isolate_at, sampling, capacity, parameters, tokens_BL, lengths_B, seed) -> _Writing:
    """Reads prompts, and draws the first token after each."""
    model = model_parameters.merge(definition, parameters)
    logits_BV, cache = caches.prefill(model, tokens_BL, lengths_B, capacity, isolate_at)
    rows_B = jnp.arange(len(tokens_BL))
    seen_BV = None
    if sampling.repetition_penalty != 1:
        is_prompt_BL = jnp.arange(tokens_BL.shape[1]) < lengths_B[:, None]
        seen_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B[:, None], tokens_BL].max(is_prompt_BL)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows_B)
    noise_BV = noise(jax.vmap(jax.random.fold_in)(keys_B, lengths_B), model.vocab_size)
    return _drawn(logits_BV, seen_BV, noise_BV, sampling, keys_B, cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _write(definition, isolate_at, sampling, parameters, writing, count) -> tuple[_Writing, jax.Array]:
    """Draws `count` tokens, at most CHUNK, of each row."""
    model = model_parameters.merge(definition, parameters)

    def chance() -> jax.Array:
        """Gives the numbers of chance of all places: one by one they took a fifth of a small model's time."""
        places_BN = writing.cache.lengths_B[:, None] + 1 + jnp.arange(CHUNK)
        keys_BN = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(writing.keys_B, places_BN)
        return jax.vmap(lambda keys_B: noise(keys_B, model.vocab_size), 1)(keys_BN)

    shape = jax.eval_shape(chance)
    noise_NBV = jax.lax.cond(count > 0, chance, lambda: jnp.zeros(shape.shape, shape.dtype))

    def one(number, carry):
        writing, tokens_BN = carry
        logits_BV, cache = caches.decode(model, writing.tokens_B, writing.cache, isolate_at)
        writing = _drawn(logits_BV, writing.seen_BV, noise_NBV[number], sampling, writing.keys_B, cache)
        return writing, tokens_BN.at[:, number].set(writing.tokens_B)

    tokens_BN = jnp.zeros((len(writing.tokens_B), CHUNK), jnp.int32)
    return jax.lax.fori_loop(0, count, one, (writing, tokens_BN))


def _drawn(logits_BV, seen_BV, noise_BV, sampling, keys_B, cache) -> _Writing:
    tokens_B = draw(logits_BV, seen_BV, noise_BV, sampling)
    if seen_BV is not None:
        seen_BV = seen_BV.at[jnp.arange(len(tokens_B)), tokens_B].set(True)
    return _Writing(tokens_B, seen_BV, keys_B, cache)


def generate(*model, prompts: Sequence[Sequence[int]], length: int, **options) -> np.ndarray:
    """Gives all tokens_BN that `stream` yields."""
    parts = list(stream(*model, prompts, length=length, **options))
    return np.concatenate([np.zeros((len(prompts), 0), np.int32), *parts], axis=1)


class Writer:
    """One row's text as its tokens come: gives what is certain of it, up to its end.

    The end is a stop string, which is left out, or the separator. A character of several tokens is held back until it
    is whole, and so is what may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.separator = len(tokenizer.token_bytes) - 1
        self.tokens: list[int] = []  # all, up to the end
        self.ended_by: str | None = None
        self.text = ""  # all that was given
        self._held_tokens: list[int] = []
        self._held_text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Gives the text that is new and certain; nothing after the end."""
        given = ""
        for token in map(int, tokens):
            if self.ended_by is not None:
                break
            if token == self.separator:
                given += self.finish()
                self.ended_by = "end of document"
                break
            self.tokens.append(token)
            self._held_tokens.append(token)
            text = self.tokenizer.decode(self._held_tokens)
            if text.endswith(CUT) and len(self._held_tokens) < 4:  # bytes of one character in UTF-8
                continue
            self._held_tokens = []
            given += self._certain(text)
        return given

    def finish(self) -> str:
        """Gives what was held back."""
        if self.ended_by is not None:
            return ""
        given = self._certain(self.tokenizer.decode(self._held_tokens))
        rest = "" if self.ended_by is not None else self._held_text
        self._held_tokens, self._held_text = [], ""
        self.text += rest
        return given + rest

    def _certain(self, text: str) -> str:
        held = self._held_text + text
        found = [(held.index(stop), stop) for stop in self.stops if stop in held]
        if found:
            place, self.ended_by = min(found)
            certain, self._held_text = held[:place], ""
        else:
            begun = max((_begins(held, stop) for stop in self.stops), default=0)
            certain, self._held_text = held[: len(held) - begun], held[len(held) - begun :]
        self.text += certain
        return certain


def _begins(text: str, stop: str) -> int:
    """Gives how many of the last characters are the first of a stop string."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)

"""Beam search: a search for the most likely texts (Graves 2012; Sutskever et al. 2014)."""

import functools
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.fields import Count, Range, convert
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache as caches
from mini_gpt.generation.prompts import Prompt, Prompts, prepare
from mini_gpt.runtime import token_ids

MOST_ALPHA = 10  # of the length penalty; far larger ones overflow
Alpha = Annotated[float, Range(f"in 0..{MOST_ALPHA}", lambda alpha: 0 <= alpha <= MOST_ALPHA)]


class Found(NamedTuple):
    """A text that a search found.

    tokens: the new ones, with the end if there is one.
    log_probability: in nats, of these tokens.
    score: log_probability divided by the length penalty.
    """

    tokens: np.ndarray
    log_probability: float
    score: float


class Beam(NamedTuple):
    """K texts of each row, with up to N new tokens; lengths_BK of them are used. An unused text has -inf."""

    tokens_BKN: jax.Array
    lengths_BK: jax.Array
    log_probabilities_BK: jax.Array

    def scores_BK(self, alpha: float | jax.Array) -> jax.Array:
        """Return log-probabilities divided by ((5 + length) / 6)^alpha (Wu et al. 2016, eq. 14)."""
        return self.log_probabilities_BK / _penalty(self.lengths_BK, alpha)

    def best(self, count: int, scores_BK: jax.Array) -> "Beam":
        """Return the `count` texts of each row with the highest scores, the best first."""
        _, chosen_BK = jax.lax.top_k(scores_BK, count)

        def take(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, chosen_BK.reshape(*chosen_BK.shape, *[1] * (x.ndim - 2)), axis=1)

        return jax.tree.map(take, self)

    def joined(self, other: "Beam") -> "Beam":
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, other)


class Options(NamedTuple):
    """The options of a beam search.

    end, other_ends: the tokens that end a text.
    length: the maximum number of new tokens.
    beams: the number of texts to extend.
    alpha: of the length penalty; 0: none.
    """

    end: int
    length: int
    beams: int = 4
    alpha: float = 0.6
    other_ends: tuple[int, ...] = ()


def search(
    model: LoadedModel, prompts: Sequence[Prompt], options: Options, sources: Sequence[Prompt] | None = None
) -> list[list[Found]]:
    """Return up to `beams` texts for each prompt, the best first.

    A text that has not ended after `length` tokens takes part as it is. Raises UserError for an option of a wrong type
    or out of range, and the errors of `prompts.prepare` and of `cache.prefill`.
    """
    options = options._replace(
        length=convert("length", options.length, Count),
        beams=convert("beams", options.beams, Count),
        alpha=convert("length penalty", options.alpha, Alpha),
    )
    token_ids.check((options.end, *options.other_ends), len(model.parameters["embedding"]), "end")
    model, padded, capacity = prepare(model, prompts, sources, options.length)
    found = jax.device_get(_search(model, options.beams, capacity, options, padded))
    scores_BK = found.scores_BK(options.alpha)
    return [
        [
            Found(tokens_KN[k][: lengths_K[k]], float(log_K[k]), float(scores_K[k]))
            for k in range(options.beams)
            if np.isfinite(log_K[k])
        ]
        for tokens_KN, lengths_K, log_K, scores_K in zip(*found, scores_BK, strict=True)
    ]


def _penalty(length: int | jax.Array, alpha: float | jax.Array) -> float | jax.Array:
    return ((5 + length) / 6) ** alpha


@functools.partial(jax.jit, static_argnums=(1, 2))
def _search(model: LoadedModel, beams: int, capacity: int, options: Options, prompts: Prompts) -> Beam:
    """Return the best texts of each row: those that have ended, and those of `length` tokens.

    Only `beams` and the capacity are static, so that prompts of similar lengths share a program.
    """
    K, alpha, ends = beams, options.alpha, (options.end, *options.other_ends)
    logits_BV, cache = caches.prefill(model, *prompts[:2], capacity, prompts.source_BS)
    B, V = logits_BV.shape
    rows_X = jnp.repeat(jnp.arange(B), K)  # axis X is B and K merged
    empty = jnp.zeros((B, K, capacity), jnp.int32), jnp.zeros((B, K), jnp.int32), jnp.full((B, K), -jnp.inf)
    one_text = Beam(empty[0], empty[1], empty[2].at[:, 0].set(0.0))  # without a token

    def extend(carry: tuple) -> tuple:
        number, texts, ended, logits_XV, cache = carry
        log_BKV = texts.log_probabilities_BK[..., None] + jax.nn.log_softmax(logits_XV).reshape(B, K, V)
        # Texts that end here compete with those that have ended before.
        for end in ends:
            tokens_BKN = texts.tokens_BKN.at[:, :, number].set(end)
            ended = ended.joined(Beam(tokens_BKN, texts.lengths_BK + 1, log_BKV[..., end]))
        for end in ends:
            log_BKV = log_BKV.at[..., end].set(-jnp.inf)
        ended = ended.best(K, ended.scores_BK(alpha))
        # The others continue: the K best of all texts and tokens.
        log_BK, chosen_BK = jax.lax.top_k(log_BKV.reshape(B, -1), K)
        parents_BK, new_BK = chosen_BK // V, chosen_BK % V
        tokens_BKN = jnp.take_along_axis(texts.tokens_BKN, parents_BK[..., None], axis=1).at[:, :, number].set(new_BK)
        texts = Beam(tokens_BKN, texts.lengths_BK + 1, log_BK)
        cache = cache.take((jnp.arange(B)[:, None] * K + parents_BK).reshape(-1), same_sources=True)
        logits_XV, cache = caches.decode(model, new_BK.reshape(-1), cache)
        return number + 1, texts, ended, logits_XV, cache

    def can_improve(carry: tuple) -> jax.Array:
        """Whether an open text could still be among the best: its score can rise by the length penalty only."""
        number, texts, ended, *_ = carry
        bound_B = jnp.max(texts.log_probabilities_BK, axis=1) / _penalty(options.length, alpha)
        return (number < options.length) & jnp.any(bound_B > jnp.min(ended.scores_BK(alpha), axis=1))

    start = (0, one_text, Beam(*empty), logits_BV[rows_X], cache.take(rows_X))
    number, texts, ended, *_ = jax.lax.while_loop(can_improve, extend, start)
    complete_BK = jnp.where(number == options.length, texts.log_probabilities_BK, -jnp.inf)
    found = ended.joined(texts._replace(log_probabilities_BK=complete_BK))
    return found.best(K, found.scores_BK(alpha))

"""Sampling of tokens from logits."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mini_gpt.runtime.errors import require

COLDEST = 1e-6  # lowest positive temperature; far lower ones would give non-finite logits
MOST_PENALTY = 1e6  # far higher ones, and far lower ones than its inverse, would too


@dataclass(frozen=True)
class Sampling:
    """Options of sampling; the default samples from the full softmax.

    temperature: divides the logits; 0: greedy. top_k: keep the k most likely tokens; 0: all (Fan et al. 2018). top_p:
    keep the most likely tokens until their total probability is at least this (Holtzman et al. 2020). min_p: keep
    tokens with at least this share of the greatest probability (Nguyen et al. 2024). repetition_penalty: divides
    positive logits of tokens in the text and multiplies negative ones (Keskar et al. 2019, 4.1). The order is penalty,
    temperature, top_k, top_p, min_p. Raises UserError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        valid = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        require(valid, "temperature", self.temperature, f"must be 0, or at least {COLDEST}, and finite")
        require(self.top_k >= 0, "top_k", self.top_k, "must be at least 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]")
        valid = 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY
        expected = f"must be from {1 / MOST_PENALTY:g} to {MOST_PENALTY:g}"
        require(valid, "repetition_penalty", self.repetition_penalty, expected)


def noise(keys_B: jax.Array, indices_B: jax.Array, vocab_size: int) -> jax.Array:
    """Return standard Gumbel noise_BV: argmax(logits + noise) is a sample from the softmax (Maddison et al. 2014)."""

    def row_noise(key: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(key, place), (vocab_size,))

    return jax.vmap(row_noise)(keys_B, indices_B)


def draw(logits_BV: jax.Array, seen_BV: jax.Array | None, noise_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Return sampled tokens_B, int32. seen_BV: true for tokens in the text; None: no penalty. noise_BV: see `noise`."""
    if seen_BV is not None:
        penalty = sampling.repetition_penalty
        penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, penalized_BV, logits_BV)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = filter_logits(logits_BV / sampling.temperature, sampling)
    return jnp.argmax(logits_BV + noise_BV, axis=-1).astype(jnp.int32)


def filter_logits(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits_BV with -inf for tokens that top_k, top_p and min_p exclude; the most likely token is kept."""
    vocab_size = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        logits_BV = _mask_below(logits_BV, jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1])
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        cumulative_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, axis=-1), axis=-1)
        before_BV = jnp.pad(cumulative_BV, ((0, 0), (1, 0)))[:, :-1]  # total probability of the more likely tokens
        logits_BV = _mask_below(logits_BV, jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf).min(axis=-1))
    if sampling.min_p > 0:
        logits_BV = _mask_below(logits_BV, logits_BV.max(axis=-1) + math.log(sampling.min_p))
    return logits_BV


def _mask_below(logits_BV: jax.Array, least_B: jax.Array) -> jax.Array:
    return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)

"""The choice of tokens from logits."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mini_gpt.runtime.errors import require

COLDEST = 1e-6  # lowest temperature: dividing by less gives non-finite logits


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; by default from the whole softmax.

    temperature: divides the logits; 0 takes the most likely token. top_k: only the k most likely tokens; 0: all (Fan et
    al. 2018). top_p: only the fewest most likely tokens whose probabilities sum to it (Holtzman et al. 2020). min_p:
    only tokens with this share of the greatest probability (Nguyen et al. 2024). repetition_penalty: divides positive
    logits of tokens that are in the text, multiplies negative ones (Keskar et al. 2019, 4.1). They apply in the order
    penalty, temperature, top_k, top_p, min_p. Raises UserError for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        finite = self.temperature == 0 or COLDEST <= self.temperature < math.inf
        require(finite, "temperature", self.temperature, f"must be 0, or at least {COLDEST}, and finite")
        require(self.top_k >= 0, "top_k", self.top_k, "must be at least 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]")
        finite = 0 < self.repetition_penalty < math.inf
        require(finite, "repetition_penalty", self.repetition_penalty, "must be above 0, and finite")


def noise(keys_B: jax.Array, places_B: jax.Array, vocab_size: int) -> jax.Array:
    """Return standard Gumbel noise_BV: argmax(logits + noise) is a sample of the softmax (Maddison et al. 2014)."""
    of_row = lambda key, place: jax.random.gumbel(jax.random.fold_in(key, place), (vocab_size,))
    return jax.vmap(of_row)(keys_B, places_B)


def draw(logits_BV: jax.Array, seen_BV: jax.Array | None, noise_BV: jax.Array | None, sampling: Sampling) -> jax.Array:
    """Return drawn tokens_B, int32. seen_BV: the tokens of each row's text, for the penalty. noise_BV: see `noise`."""
    if seen_BV is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalised_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, penalised_BV, logits_BV)
    if noise_BV is None or sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = filter_logits(logits_BV / sampling.temperature, sampling)
    return jnp.argmax(logits_BV + noise_BV, axis=-1).astype(jnp.int32)


def filter_logits(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits_BV with -inf for tokens that top_k, top_p and min_p exclude; never the most likely one."""
    vocab_size = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        logits_BV = _at_least(logits_BV, jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1])
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        likelier_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, axis=-1), axis=-1)
        before_BV = jnp.pad(likelier_BV, ((0, 0), (1, 0)))[:, :-1]  # sum of all more likely tokens
        logits_BV = _at_least(logits_BV, jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf).min(axis=-1))
    if sampling.min_p > 0:
        logits_BV = _at_least(logits_BV, logits_BV.max(axis=-1) + math.log(sampling.min_p))
    return logits_BV


def _at_least(logits_BV: jax.Array, least_B: jax.Array) -> jax.Array:
    return jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)

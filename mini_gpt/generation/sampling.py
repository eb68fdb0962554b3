"""Sampling of tokens from logits."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp

from mini_gpt.config.fields import Range, Share, ShareAbove0, at_least, convert

COLDEST = 1e-6  # lowest positive temperature; far lower ones would give non-finite logits
MOST_PENALTY = 1e6  # far higher ones, and far lower ones than its inverse, would too
Temperature = Annotated[float, Range(f"0, or at least {COLDEST}, and finite", lambda t: t == 0 or t >= COLDEST)]
PENALTIES = f"from {1 / MOST_PENALTY:g} to {MOST_PENALTY:g}"
Penalty = Annotated[float, Range(PENALTIES, lambda penalty: 1 / MOST_PENALTY <= penalty <= MOST_PENALTY)]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of sampling; the default samples from the full softmax.

    temperature: divides the logits; 0: greedy.
    top_k: keep the k most likely tokens; 0: all (Fan et al. 2018).
    top_p: keep the most likely tokens until their total probability is at least this (Holtzman et al. 2020). Of equally
      likely tokens, both keep that with the lower id first, as greedy decoding does.
    min_p: keep tokens with at least this share of the greatest probability (Nguyen et al. 2024).
    repetition_penalty: divides positive logits of tokens in the text and multiplies negative ones (Keskar et al.
      2019, 4.1).

    The order is penalty, temperature, top_k, top_p, min_p. Raises UserError for a wrong type or a value out of range.
    """

    temperature: Temperature = 1.0
    top_k: Annotated[int, at_least(0)] = 0
    top_p: ShareAbove0 = 1.0
    min_p: Share = 0.0
    repetition_penalty: Penalty = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, convert(field.name, getattr(self, field.name), field.type))


def noise(keys_B: jax.Array, indices_B: jax.Array, vocab_size: int) -> jax.Array:
    """Return standard Gumbel noise_BV: argmax(logits + noise) is a sample from the softmax (Maddison et al. 2014)."""

    def row_noise(key: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(key, place), (vocab_size,))

    return jax.vmap(row_noise)(keys_B, indices_B)


def draw(logits_BV: jax.Array, seen_BV: jax.Array | None, noise_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Return sampled tokens_B, int32.

    seen_BV: true for tokens in the text; None: no penalty.
    noise_BV: see `noise`.
    """
    if seen_BV is not None:
        penalty = sampling.repetition_penalty
        penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, penalized_BV, logits_BV)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jnp.argmax(scaled_and_filtered(logits_BV, sampling) + noise_BV, axis=-1).astype(jnp.int32)


def scaled_and_filtered(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits_BV / temperature, with -inf for tokens that top_k, top_p and min_p exclude.

    The most likely token is kept: that of the lowest id, if several are equal.
    """
    scaled_BV = logits_BV / sampling.temperature
    # Tokens are ranked before the division, which can make different logits equal.
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        scaled_BV = jnp.where(_most_likely(logits_BV, sampling.top_k), scaled_BV, -jnp.inf)
    if sampling.top_p < 1:
        order_BV = jnp.argsort(-logits_BV, axis=-1)  # stable
        ranked_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
        cumulative_BV = jnp.cumsum(jax.nn.softmax(ranked_BV, axis=-1), axis=-1)
        before_BV = jnp.pad(cumulative_BV, ((0, 0), (1, 0)))[:, :-1]  # total probability of the more likely tokens
        ranked_BV = jnp.where(before_BV < sampling.top_p, ranked_BV, -jnp.inf)
        scaled_BV = jnp.put_along_axis(scaled_BV, order_BV, ranked_BV, axis=-1, inplace=False)
    if sampling.min_p > 0:
        least_B1 = scaled_BV.max(axis=-1, keepdims=True) + math.log(sampling.min_p)
        scaled_BV = jnp.where(scaled_BV < least_B1, -jnp.inf, scaled_BV)
    return scaled_BV


def _most_likely(logits_BV: jax.Array, count: int) -> jax.Array:
    """Return kept_BV, true for the `count` greatest logits of each row; of equal ones, those with the lower ids."""
    logits_BV = jnp.where(logits_BV == 0, 0.0, logits_BV)  # top_k puts 0 before -0
    chosen_BK = jax.lax.top_k(logits_BV, count)[1]
    return jnp.zeros(logits_BV.shape, bool).at[jnp.arange(len(logits_BV))[:, None], chosen_BK].set(True)

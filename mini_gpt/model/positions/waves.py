"""Frequencies of sinusoids and of rotary positions, and the angles of positions."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.attention import RopeConfig


def geometric_frequencies(base: float, width: int) -> np.ndarray:
    """Return base^(-2i/width), the radians per token of pair i, in float64."""
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def angles(positions_BL: jax.Array, frequencies_P: Sequence[float] | np.ndarray | jax.Array) -> jax.Array:
    """Return position · frequency as angles_BLP in radians, float32."""
    return positions_BL[..., None].astype(jnp.float32) * jnp.asarray(frequencies_P, jnp.float32)


def rope_frequencies(rope: RopeConfig, width: int) -> np.ndarray:
    """Return each pair's radians per token, float64. width: rotated dimensions.

    In these formulas s is `rope.factor`:
    linear: all are divided by s (position interpolation, Chen et al. 2023).
    ntk: the base becomes base · s^(width/(width-2)), so that the slowest pair is divided by s and the fastest is
      unchanged (NTK-aware; Peng et al. 2023, 3.1).
    yarn: pairs with more than `beta_fast` turns in the original context are unchanged. Pairs with fewer than
      `beta_slow` turns are divided by s. In between, the two frequencies are averaged with weights linear in the turns
      (Peng et al. 2023, 3.2, with bounds β and α).
    yarn_by_index: the weights are linear in the pair's index, between the bounds rounded to whole pairs (released code
      of YaRN, and Transformers). yarn_unrounded: between the bounds themselves (Transformers' truncate=false).
    llama3: as yarn, by default between 1 and 4 turns (released code of Llama 3.1).
    dynamic: unchanged here; see `dynamic_frequencies`.

    With `rope.turning` below 1, the slowest pairs get frequency 0 (p-RoPE, Barbero et al. 2025).
    """
    frequencies_P = _scaled(rope, width)
    frequencies_P[int(rope.turning * width / 2) :] = 0  # the pairs are sorted, the fastest first
    return frequencies_P


def _scaled(rope: RopeConfig, width: int) -> np.ndarray:
    assert isinstance(rope.base, float) and isinstance(rope.factor, float), "a pattern over the layers has none"
    plain_P, s = geometric_frequencies(rope.base, width), rope.factor
    if rope.scaling == "linear":
        return plain_P / s
    if rope.scaling == "ntk":
        return geometric_frequencies(rope.base * s ** (width / (width - 2)), width)
    if rope.scaling in ("yarn", "llama3"):
        turns_P = rope.original_context * plain_P / (2 * np.pi)
        unscaled_P = np.clip((turns_P - rope.beta_slow) / (rope.beta_fast - rope.beta_slow), 0, 1)
        return (1 - unscaled_P) * plain_P / s + unscaled_P * plain_P
    if rope.scaling in ("yarn_by_index", "yarn_unrounded"):
        assert rope.original_context is not None
        pair = lambda turns: width * math.log(rope.original_context / (2 * math.pi * turns)) / (2 * math.log(rope.base))
        low, high = (math.floor, math.ceil) if rope.scaling == "yarn_by_index" else (float, float)
        first, last = max(low(pair(rope.beta_fast)), 0), min(high(pair(rope.beta_slow)), width - 1)
        unscaled_P = 1 - np.clip((np.arange(width // 2) - first) / ((last - first) or 1e-3), 0, 1)
        return (1 - unscaled_P) * plain_P / s + unscaled_P * plain_P
    return plain_P


def dynamic_frequencies(frequencies_P: Any, factor: Any, context: int, lengths_B: jax.Array) -> jax.Array:
    """Return frequencies_BP for rows of these lengths, float32 (dynamic NTK, code of Transformers).

    frequencies_P: without scaling.
    factor: a number or a scalar array. Above the original context L, the base becomes base · (factor·n/L - (factor -
      1))^(width/(width-2)), with the length n.
    """
    ratio_B, pairs = lengths_B / context, len(frequencies_P)
    stretch_B = jnp.where(ratio_B > 1, factor * ratio_B - (factor - 1), 1)
    exponents_P = -np.arange(pairs) / (pairs - 1)
    return jnp.asarray(frequencies_P, jnp.float32) * stretch_B[:, None] ** exponents_P


def yarn_scale(factor: float) -> float:
    """Return sqrt(1/t) = 0.1 ln s + 1, the factor for both queries and keys (Peng et al. 2023, 3.4)."""
    return 0.1 * math.log(factor) + 1

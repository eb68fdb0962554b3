"""The inputs of every implementation of attention: heads, and a context of positions and a mask."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = float(jnp.finfo(jnp.float32).min)  # the logit of a hidden key; finite, so that differences are never NaN


class Mask(NamedTuple):
    """Which keys a query sees: all, or if causal keys 0..i for query i; never those of another segment.

    window: only keys with |i - j| < window, in places of the sequence, whatever their positions are. A causal query
    sees `window` keys with its own (Jiang et al. 2023), any other query as many on each side.
    """

    causal: bool
    window: int | None = None
    segments_BL: jax.Array | None = None

    def visible(self, length: int) -> jax.Array:
        """Return visible_BLS as booleans; without segments B is 1."""
        places_L = jnp.arange(length)
        return self.between(places_L, places_L, None if self.segments_BL is None else (self.segments_BL,) * 2)

    def between(self, places_L: jax.Array, places_S: jax.Array, segments: Sequence[jax.Array] | None) -> jax.Array:
        """Return visible_BLS for some queries and some keys. segments: their segments_BL and segments_BS."""
        ahead_LS = places_S[None, :] - places_L[:, None]
        visible_LS = ahead_LS <= 0 if self.causal else jnp.ones(ahead_LS.shape, bool)
        if self.window is not None:
            visible_LS = visible_LS & (jnp.abs(ahead_LS) < self.window)
        if segments is None:
            return visible_LS[None]
        return visible_LS[None] & (segments[0][:, :, None] == segments[1][:, None, :])

    def blocks(self, count: int, size: int) -> list[tuple[int, int]]:
        """Return the pairs (i, j) where a query of block i may see a key of block j, segments ignored; sorted."""
        reach = count if self.window is None else (self.window + size - 2) // size  # in blocks, to the furthest key
        last = lambda i: i if self.causal else min(count - 1, i + reach)
        return [(i, j) for i in range(count) for j in range(max(0, i - reach), last(i) + 1)]


def cross_attention(length: int, key_is_token_BS: jax.Array) -> jax.Array:
    """Return visible_BLS of cross-attention: every query sees every key that is not padding."""
    return jnp.repeat(key_is_token_BS[:, None, :], length, axis=1)


class Heads(NamedTuple):
    """Queries of H heads, and keys and values of G heads, each of which serves H/G queries (Ainslie et al. 2023)."""

    q_BLHK: jax.Array
    k_BSGK: jax.Array
    v_BSGK: jax.Array


class Context(NamedTuple):
    """The inputs of self-attention beside its heads. position: a `model.positions.Position`. with_maps: return maps."""

    mask: Mask
    position: Any
    positions_BL: jax.Array
    with_maps: bool = False

    @property
    def biased(self) -> bool:
        """Whether the positional encoding adds a bias to the logits."""
        first_B1 = self.positions_BL[:, :1]
        return self.position.bias(first_B1, first_B1) is not None

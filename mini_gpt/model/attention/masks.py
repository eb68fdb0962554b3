"""What every implementation of attention takes: heads, and a context of positions and a mask."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


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
        return self.between(places_L, places_L, self.segments_BL, self.segments_BL)

    def between(
        self,
        query_places_L: jax.Array,
        key_places_S: jax.Array,
        query_segments_BL: jax.Array | None,
        key_segments_BS: jax.Array | None,
    ) -> jax.Array:
        """Return visible_BLS for some queries and some keys; without segments B is 1."""
        ahead_LS = key_places_S[None, :] - query_places_L[:, None]
        visible_LS = ahead_LS <= 0 if self.causal else jnp.ones(ahead_LS.shape, bool)
        if self.window is not None:
            visible_LS = visible_LS & (jnp.abs(ahead_LS) < self.window)
        visible_BLS = visible_LS[None]
        if query_segments_BL is not None:
            visible_BLS = visible_BLS & (query_segments_BL[:, :, None] == key_segments_BS[:, None, :])
        return visible_BLS

    def blocks(self, count: int, size: int) -> list[tuple[int, int]]:
        """Return the pairs (i, j) where a query of block i may see a key of block j, segments ignored; sorted."""
        reach = count if self.window is None else (self.window + size - 2) // size  # in blocks, to the furthest key
        return [
            (i, j)
            for i in range(count)
            for j in range(max(0, i - reach), i + 1 if self.causal else min(count, i + reach + 1))
        ]


def cross_attention(length: int, key_is_token_BS: jax.Array) -> jax.Array:
    """Return visible_BLS of cross-attention: every query sees every key that is not padding."""
    return jnp.broadcast_to(key_is_token_BS[:, None, :], (key_is_token_BS.shape[0], length, key_is_token_BS.shape[1]))


class Heads(NamedTuple):
    """Queries of H heads, and keys and values of G heads, each of which serves H/G queries (Ainslie et al. 2023)."""

    q_BLHK: jax.Array
    k_BSGK: jax.Array
    v_BSGK: jax.Array


class Context(NamedTuple):
    """What self-attention depends on beside its heads. position: a `model.positions.Position`."""

    mask: Mask
    position: nnx.Module
    positions_BL: jax.Array

    @property
    def biased(self) -> bool:
        """Whether the positional encoding adds a bias to the logits."""
        first_B1 = self.positions_BL[:, :1]
        return self.position.bias(first_B1, first_B1) is not None

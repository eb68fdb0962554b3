"""Which keys a query may see, as booleans that broadcast to visible_BLS; the only place where masks are made."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Mask(NamedTuple):
    """Self-attention's: all keys, or if causal keys 0..i for query i, itself included; never across segments.

    window: the nearest keys alone, |i - j| < window in places, whatever the positions are: a causal query sees as many,
    itself included (Jiang et al. 2023), another one as many on each side.
    """

    causal: bool
    window: int | None = None
    segments_BL: jax.Array | None = None

    def visible(self, length: int) -> jax.Array:
        """Gives visible_BLS, or 1LS without segments."""
        places_L = jnp.arange(length)
        return self.between(places_L, places_L, self.segments_BL, self.segments_BL)

    def between(
        self,
        query_places_L: jax.Array,
        key_places_S: jax.Array,
        query_segments_BL: jax.Array | None,
        key_segments_BS: jax.Array | None,
    ) -> jax.Array:
        """Gives visible_BLS, or 1LS, for some queries and some keys."""
        ahead_LS = key_places_S[None, :] - query_places_L[:, None]
        visible_LS = ahead_LS <= 0 if self.causal else jnp.ones(ahead_LS.shape, bool)
        if self.window is not None:
            visible_LS = visible_LS & (jnp.abs(ahead_LS) < self.window)
        visible_BLS = visible_LS[None]
        if query_segments_BL is not None:
            visible_BLS = visible_BLS & (query_segments_BL[:, :, None] == key_segments_BS[:, None, :])
        return visible_BLS

    def blocks(self, count: int, size: int) -> list[tuple[int, int]]:
        """Gives (i, j) where some query of block i may see a key of block j, segments aside, i by i."""
        reach = count if self.window is None else (self.window + size - 2) // size  # in blocks, to the furthest key
        return [
            (i, j)
            for i in range(count)
            for j in range(max(0, i - reach), i + 1 if self.causal else min(count, i + reach + 1))
        ]


def cross_attention(length: int, key_is_token_BS: jax.Array) -> jax.Array:
    """Gives visible_BLS: every query sees every key that is no padding; order has no meaning between two sequences."""
    return jnp.broadcast_to(key_is_token_BS[:, None, :], (key_is_token_BS.shape[0], length, key_is_token_BS.shape[1]))

"""Which keys a query may see, as booleans that broadcast to visible_BLS; the only place where masks are made."""

import jax
import jax.numpy as jnp


def self_attention(
    length: int, *, causal: bool, window: int | None = None, segments_BL: jax.Array | None = None
) -> jax.Array:
    """Gives visible_BLS (or 1LS): all keys, or keys 0..i for query i, itself included; never across segments.

    window: the nearest keys alone, |i - j| < window in places, whatever the positions are: a causal query sees as many,
    itself included (Jiang et al. 2023), another one as many on each side.
    """
    places_L = jnp.arange(length)
    ahead_LS = places_L[None, :] - places_L[:, None]
    visible_LS = ahead_LS <= 0 if causal else jnp.ones((length, length), bool)
    if window is not None:
        visible_LS = visible_LS & (jnp.abs(ahead_LS) < window)
    visible_BLS = visible_LS[None]
    if segments_BL is not None:
        visible_BLS = visible_BLS & (segments_BL[:, :, None] == segments_BL[:, None, :])
    return visible_BLS


def cross_attention(length: int, key_is_token_BS: jax.Array) -> jax.Array:
    """Gives visible_BLS: every query sees every key that is no padding; order has no meaning between two sequences."""
    return jnp.broadcast_to(key_is_token_BS[:, None, :], (key_is_token_BS.shape[0], length, key_is_token_BS.shape[1]))

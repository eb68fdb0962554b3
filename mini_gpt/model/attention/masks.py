"""Which keys a query may see, as booleans that broadcast to visible_BLS; the only place where masks are made."""

import jax
import jax.numpy as jnp


def self_attention(length: int, *, causal: bool, segments_BL: jax.Array | None = None) -> jax.Array:
    """Gives visible_BLS (or 1LS): all keys, or keys 0..i for query i, itself included; never across segments."""
    visible_BLS = jnp.ones((1, length, length), bool)
    if causal:
        visible_BLS = jnp.tril(visible_BLS)
    if segments_BL is not None:
        visible_BLS = visible_BLS & (segments_BL[:, :, None] == segments_BL[:, None, :])
    return visible_BLS


def cross_attention(length: int, key_is_token_BS: jax.Array) -> jax.Array:
    """Gives visible_BLS: every query sees every key that is no padding; order has no meaning between two sequences."""
    return jnp.broadcast_to(key_is_token_BS[:, None, :], (key_is_token_BS.shape[0], length, key_is_token_BS.shape[1]))

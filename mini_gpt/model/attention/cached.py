"""Attention of one new token in each row to a KV cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyValues(NamedTuple):
    """One layer's keys and values. X: rows and their key-value heads, B·G; with two axes for them, XLA would copy."""

    keys_XSK: jax.Array
    values_XSK: jax.Array

    @classmethod
    def of(cls, k_BSGK: jax.Array, v_BSGK: jax.Array) -> "KeyValues":
        """Return the keys and values of a whole sequence."""
        return cls(*(x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (k_BSGK, v_BSGK)))


class Past(NamedTuple):
    """One layer's KV cache of S slots, and how the next token uses it.

    slot: where the next token's key and value go, a scalar. positions_BS, visible_BS: of all slots, that one included.
    """

    cache: KeyValues
    slot: jax.Array
    positions_BS: jax.Array
    visible_BS: jax.Array

    def write(self, k_B1GK: jax.Array, v_B1GK: jax.Array) -> "Past":
        """Return the past with the new token's key and value in its slot; XLA updates the cache in place."""
        put = lambda of_XSK, new_B1GK: jax.lax.dynamic_update_slice(
            of_XSK, new_B1GK.reshape(-1, 1, new_B1GK.shape[-1]), (0, self.slot, 0)
        )
        return self._replace(cache=KeyValues(*map(put, self.cache, (k_B1GK, v_B1GK))))


def attend(q_B1HK: jax.Array, past: Past, bias_BH1S: jax.Array | None, scale: float) -> jax.Array:
    """Return softmax(scale · qkᵀ + bias) v as out_B1HK in q's dtype; the softmax is in float32."""
    keys_XSK, values_XSK = past.cache
    B, _, H, K = q_B1HK.shape
    G = keys_XSK.shape[0] // B
    q_XRK = (scale * q_B1HK).reshape(B * G, H // G, K)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, keys_XSK, preferred_element_type=jnp.float32)
    logits_BGRS = logits_XRS.reshape(B, G, H // G, -1)
    if bias_BH1S is not None:
        logits_BGRS = logits_BGRS + bias_BH1S.reshape(-1, G, H // G, bias_BH1S.shape[-1])
    logits_BGRS = jnp.where(past.visible_BS[:, None, None], logits_BGRS, jnp.finfo(jnp.float32).min)
    weights_XRS = jax.nn.softmax(logits_BGRS, axis=-1).astype(values_XSK.dtype).reshape(logits_XRS.shape)
    return jnp.einsum("xrs,xsk->xrk", weights_XRS, values_XSK).reshape(B, 1, H, K).astype(q_B1HK.dtype)

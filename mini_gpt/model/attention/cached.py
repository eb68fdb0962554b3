"""Attention of one new token per row to a KV cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention.masks import HIDDEN, KeyValues, Scoring, scaled


class Past(NamedTuple):
    """One layer's KV cache of S slots, and how the new token uses it.

    slot: the scalar index of the new token's slot. positions_BS, visible_BS: of all slots, including the new token's.
    """

    cache: KeyValues
    slot: jax.Array
    positions_BS: jax.Array
    visible_BS: jax.Array

    def write(self, k_B1GK: jax.Array, v_B1GK: jax.Array) -> "Past":
        """Return the past with the new token's key and value in its slot; XLA updates the cache in place."""
        update = lambda cached_XSK, new_B1GK: jax.lax.dynamic_update_slice(
            cached_XSK, new_B1GK.reshape(-1, 1, new_B1GK.shape[-1]), (0, self.slot, 0)
        )
        return self._replace(cache=KeyValues(*map(update, self.cache, (k_B1GK, v_B1GK))))


def attend_to_cache(q_B1HK: jax.Array, past: Past, bias_BH1S: jax.Array | None, scoring: Scoring) -> jax.Array:
    """Return softmax(scale · qkᵀ + bias) v as out_B1HK in q's dtype; the softmax is in float32."""
    keys_XSK, values_XSK = past.cache
    B, _, H, K = q_B1HK.shape
    G = keys_XSK.shape[0] // B
    q_XRK = scaled(scoring.scale, q_B1HK).reshape(B * G, H // G, K)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, keys_XSK, preferred_element_type=jnp.float32)
    logits_BGRS = scoring.capped(logits_XRS).reshape(B, G, H // G, -1)
    if bias_BH1S is not None:
        logits_BGRS = logits_BGRS + bias_BH1S.reshape(-1, G, H // G, bias_BH1S.shape[-1])
    logits_BGRS = jnp.where(past.visible_BS[:, None, None], logits_BGRS, HIDDEN)
    sink_GR1 = None if scoring.sink_H is None else scoring.sink_H.reshape(G, H // G, 1)
    weights_XRS = scoring.weights(logits_BGRS, sink_GR1).astype(values_XSK.dtype).reshape(logits_XRS.shape)
    return jnp.einsum("xrs,xsk->xrk", weights_XRS, values_XSK).reshape(B, 1, H, K).astype(q_B1HK.dtype)

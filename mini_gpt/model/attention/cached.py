"""Attention of one new token a row to keys and values that are kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Past(NamedTuple):
    """One layer's keys and values, the new token's among them; their positions_BS, and which are seen.

    X: rows and their key-value heads, B·G, as one axis: from four axes XLA would make a product's operand by copying.
    """

    keys_XSK: jax.Array
    values_XSK: jax.Array
    positions_BS: jax.Array
    visible_BS: jax.Array


def attend(q_B1HK: jax.Array, past: Past, *, bias_BH1S: jax.Array | None, scale: float) -> jax.Array:
    """Gives softmax(scale · qkᵀ + bias) v as out_B1HK in q's dtype; the softmax is in float32."""
    B, _, H, K = q_B1HK.shape
    G = past.keys_XSK.shape[0] // B
    q_XRK = (scale * q_B1HK).reshape(B * G, H // G, K)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, past.keys_XSK, preferred_element_type=jnp.float32)
    logits_BGRS = logits_XRS.reshape(B, G, H // G, -1)
    if bias_BH1S is not None:
        logits_BGRS = logits_BGRS + bias_BH1S.reshape(-1, G, H // G, bias_BH1S.shape[-1])
    logits_BGRS = jnp.where(past.visible_BS[:, None, None], logits_BGRS, jnp.finfo(jnp.float32).min)
    weights_XRS = jax.nn.softmax(logits_BGRS, axis=-1).astype(past.values_XSK.dtype).reshape(logits_XRS.shape)
    return jnp.einsum("xrs,xsk->xrk", weights_XRS, past.values_XSK).reshape(B, 1, H, K).astype(q_B1HK.dtype)

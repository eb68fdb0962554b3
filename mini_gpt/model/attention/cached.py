"""Attention of one new token a row to keys and values that are kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Past(NamedTuple):
    """One layer's keys and values, the new token's among them, BGSK; their positions_BS, and which are seen."""

    keys_BGSK: jax.Array
    values_BGSK: jax.Array
    positions_BS: jax.Array
    visible_BS: jax.Array


def attend(q_B1HK: jax.Array, past: Past, *, bias_BH1S: jax.Array | None, scale: float) -> jax.Array:
    """Gives softmax(scale · qkᵀ + bias) v as out_B1HK in q's dtype; the softmax is in float32."""
    B, _, H, K = q_B1HK.shape
    G = past.keys_BGSK.shape[1]
    q_BGRK = (scale * q_B1HK).reshape(B, G, H // G, K)
    logits_BGRS = jnp.einsum("bgrk,bgsk->bgrs", q_BGRK, past.keys_BGSK, preferred_element_type=jnp.float32)
    if bias_BH1S is not None:
        logits_BGRS = logits_BGRS + bias_BH1S.reshape(-1, G, H // G, bias_BH1S.shape[-1])
    logits_BGRS = jnp.where(past.visible_BS[:, None, None], logits_BGRS, jnp.finfo(jnp.float32).min)
    weights_BGRS = jax.nn.softmax(logits_BGRS, axis=-1).astype(past.values_BGSK.dtype)
    return jnp.einsum("bgrs,bgsk->bgrk", weights_BGRS, past.values_BGSK).reshape(B, 1, H, K).astype(q_B1HK.dtype)

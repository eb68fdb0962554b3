"""Attention with all its logits at once: the reference that every other implementation is held against."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.layers import dropout


class AttentionMaps(NamedTuple):
    """One layer's logits_BHLS, before the mask, and weights_BHLS, after the softmax and before dropout; float32."""

    logits_BHLS: jax.Array
    weights_BHLS: jax.Array
    visible_BLS: jax.Array


def attend(
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    visible_BLS: jax.Array,
    bias_BHLS: jax.Array | None = None,
    scale: float = 1.0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, AttentionMaps]:
    """Gives softmax(scale · qkᵀ + bias) v as out_BLHK in q's dtype, and the maps (Vaswani et al. 2017, eq. 1).

    G key-value heads each serve H/G queries (Ainslie et al. 2023). The softmax is in float32. A query that sees no key
    gets zero.
    """
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    # One batch axis and two others make the products that CPUs run fastest: the queries of a group stand in one column.
    q_XRK = (scale * q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B * G, -1, K)
    k_XSK, v_XSK = (x_BSGK.swapaxes(1, 2).reshape(B * G, S, K) for x_BSGK in (k_BSGK, v_BSGK))
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, k_XSK, preferred_element_type=jnp.float32)
    logits_BHLS = logits_XRS.reshape(B, H, L, S)
    if bias_BHLS is not None:
        logits_BHLS = logits_BHLS + bias_BHLS
    visible_B1LS = visible_BLS[:, None]
    # Finite, so that a row without a visible key is uniform and not NaN; what comes of such a row is zeroed at the end.
    weights_BHLS = jax.nn.softmax(jnp.where(visible_B1LS, logits_BHLS, jnp.finfo(jnp.float32).min), axis=-1)
    used_XRS = dropout(weights_BHLS, dropout_rate, dropout_key).astype(v_BSGK.dtype).reshape(B * G, -1, S)
    out_XRK = jnp.einsum("xrs,xsk->xrk", used_XRS, v_XSK)
    out_BLHK = out_XRK.reshape(B, H, L, K).swapaxes(1, 2)
    out_BLHK = jnp.where(jnp.any(visible_BLS, axis=-1)[:, :, None, None], out_BLHK, 0)
    return out_BLHK, AttentionMaps(logits_BHLS, jnp.where(visible_B1LS, weights_BHLS, 0), visible_BLS)

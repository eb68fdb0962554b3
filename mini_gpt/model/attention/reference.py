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
    q_BLGRK = q_BLHK.reshape(B, L, G, H // G, K)
    logits = jnp.einsum("blgrk,bsgk->bgrls", q_BLGRK, k_BSGK, preferred_element_type=jnp.float32)
    logits_BHLS = scale * logits.reshape(B, H, L, S)
    if bias_BHLS is not None:
        logits_BHLS = logits_BHLS + bias_BHLS
    visible_B1LS = visible_BLS[:, None]
    # Finite, so that a row without a visible key is uniform and not NaN; it is then zeroed with all that is hidden.
    masked_BHLS = jnp.where(visible_B1LS, logits_BHLS, jnp.finfo(jnp.float32).min)
    weights_BHLS = jnp.where(visible_B1LS, jax.nn.softmax(masked_BHLS, axis=-1), 0)
    used = dropout(weights_BHLS, dropout_rate, dropout_key).astype(v_BSGK.dtype).reshape(B, G, H // G, L, S)
    out_BLHK = jnp.einsum("bgrls,bsgk->blgrk", used, v_BSGK).reshape(B, L, H, K)
    return out_BLHK, AttentionMaps(logits_BHLS, weights_BHLS, visible_BLS)

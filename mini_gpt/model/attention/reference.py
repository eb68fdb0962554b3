"""Attention with all logits in memory: the reference for every other implementation."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention.masks import Heads


class AttentionMaps(NamedTuple):
    """One layer's logits_BHLS before the mask, its weights_BHLS after the softmax and before dropout; float32."""

    logits_BHLS: jax.Array
    weights_BHLS: jax.Array
    visible_BLS: jax.Array


def attend(
    heads: Heads,
    visible_BLS: jax.Array,
    *,
    bias_BHLS: jax.Array | None = None,
    scale: float = 1.0,
    drop: Callable[[jax.Array], jax.Array] = lambda weights_BHLS: weights_BHLS,
) -> tuple[jax.Array, AttentionMaps]:
    """Return softmax(scale · qkᵀ + bias) v as out_BLHK in q's dtype, and the maps (Vaswani et al. 2017, eq. 1).

    The softmax is in float32. A query that sees no key gets zero. drop: dropout of the weights.
    """
    q_BLHK, k_BSGK, v_BSGK = heads
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    # Products with one batch axis and two others are fastest on CPUs: a group's queries are the rows of one matrix.
    q_XRK = (scale * q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B * G, -1, K)
    k_XSK, v_XSK = (x_BSGK.swapaxes(1, 2).reshape(B * G, S, K) for x_BSGK in (k_BSGK, v_BSGK))
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, k_XSK, preferred_element_type=jnp.float32)
    logits_BHLS = logits_XRS.reshape(B, H, L, S)
    if bias_BHLS is not None:
        logits_BHLS = logits_BHLS + bias_BHLS
    visible_B1LS = visible_BLS[:, None]
    # A finite mask value: a row without a visible key becomes uniform, not NaN; its output is set to zero below.
    weights_BHLS = jax.nn.softmax(jnp.where(visible_B1LS, logits_BHLS, jnp.finfo(jnp.float32).min), axis=-1)
    used_XRS = drop(weights_BHLS).astype(v_BSGK.dtype).reshape(B * G, -1, S)
    out_XRK = jnp.einsum("xrs,xsk->xrk", used_XRS, v_XSK)
    out_BLHK = out_XRK.reshape(B, H, L, K).swapaxes(1, 2)
    out_BLHK = jnp.where(jnp.any(visible_BLS, axis=-1)[:, :, None, None], out_BLHK, 0)
    return out_BLHK, AttentionMaps(logits_BHLS, jnp.where(visible_B1LS, weights_BHLS, 0), visible_BLS)

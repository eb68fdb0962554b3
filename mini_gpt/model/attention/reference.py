"""Attention with all logits in memory: within a sequence, and from one new token per row to a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention.masks import HIDDEN, Heads


class AttentionMaps(NamedTuple):
    """One layer's logits before the mask, and its weights after the softmax and before dropout; float32."""

    logits_BHLS: jax.Array
    weights_BHLS: jax.Array
    visible_BLS: jax.Array


class KeyValues(NamedTuple):
    """One layer's keys and values. X merges the axes B and G, because XLA copies arrays that have both."""

    keys_XSK: jax.Array
    values_XSK: jax.Array

    @classmethod
    def of(cls, k_BSGK: jax.Array, v_BSGK: jax.Array) -> "KeyValues":
        """Return the keys and values of a sequence, with B and G merged into X."""
        return cls(*(x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (k_BSGK, v_BSGK)))


class Past(NamedTuple):
    """One layer's KV cache of S slots, and how the next token uses it.

    slot: the slot of the next token's key and value, a scalar. positions_BS, visible_BS: of all slots, also of `slot`.
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


def attend(
    heads: Heads,
    visible_BLS: jax.Array,
    *,
    bias_BHLS: jax.Array | None = None,
    scale: float = 1.0,
    drop: Callable[[jax.Array], jax.Array] = lambda weights_BHLS: weights_BHLS,
) -> tuple[jax.Array, AttentionMaps]:
    """Return softmax(scale · qkᵀ + bias) v as out_BLHK in q's dtype, and attention maps (Vaswani et al. 2017, eq. 1).

    The softmax is in float32. The output is zero for a query without a visible key. drop: applies dropout to weights.
    """
    q_BLHK, k_BSGK, v_BSGK = heads
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    # Each group's queries are the rows of one matrix, because products with one batch axis are fastest on CPUs.
    q_XRK = (scale * q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B * G, -1, K)
    k_XSK, v_XSK = KeyValues.of(k_BSGK, v_BSGK)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, k_XSK, preferred_element_type=jnp.float32)
    logits_BHLS = logits_XRS.reshape(B, H, L, S)
    if bias_BHLS is not None:
        logits_BHLS = logits_BHLS + bias_BHLS
    visible_B1LS = visible_BLS[:, None]
    weights_BHLS = jax.nn.softmax(jnp.where(visible_B1LS, logits_BHLS, HIDDEN), axis=-1)
    used_XRS = drop(weights_BHLS).astype(v_BSGK.dtype).reshape(B * G, -1, S)
    out_BLHK = jnp.einsum("xrs,xsk->xrk", used_XRS, v_XSK).reshape(B, H, L, K).swapaxes(1, 2)
    # The softmax weights of a query without a visible key are uniform, not zero.
    out_BLHK = jnp.where(jnp.any(visible_BLS, axis=-1)[:, :, None, None], out_BLHK, 0)
    return out_BLHK, AttentionMaps(logits_BHLS, jnp.where(visible_B1LS, weights_BHLS, 0), visible_BLS)


def attend_to_cache(q_B1HK: jax.Array, past: Past, bias_BH1S: jax.Array | None, scale: float) -> jax.Array:
    """Return softmax(scale · qkᵀ + bias) v as out_B1HK in q's dtype; the softmax is in float32."""
    keys_XSK, values_XSK = past.cache
    B, _, H, K = q_B1HK.shape
    G = keys_XSK.shape[0] // B
    q_XRK = (scale * q_B1HK).reshape(B * G, H // G, K)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, keys_XSK, preferred_element_type=jnp.float32)
    logits_BGRS = logits_XRS.reshape(B, G, H // G, -1)
    if bias_BH1S is not None:
        logits_BGRS = logits_BGRS + bias_BH1S.reshape(-1, G, H // G, bias_BH1S.shape[-1])
    logits_BGRS = jnp.where(past.visible_BS[:, None, None], logits_BGRS, HIDDEN)
    weights_XRS = jax.nn.softmax(logits_BGRS, axis=-1).astype(values_XSK.dtype).reshape(logits_XRS.shape)
    return jnp.einsum("xrs,xsk->xrk", weights_XRS, values_XSK).reshape(B, 1, H, K).astype(q_B1HK.dtype)

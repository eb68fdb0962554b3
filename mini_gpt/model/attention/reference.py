"""Attention with all logits in memory: the reference for the other implementations."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model import editing
from mini_gpt.model.attention import rows
from mini_gpt.model.attention.inputs import HIDDEN, HIDDEN_FROM_HEAD, Heads, KeyValues, Scoring, decay_bias, scaled
from mini_gpt.model.editing import Edit

DEFAULT_SCORING = Scoring()


class AttentionMaps(NamedTuple):
    """One layer's logits before the mask, and its weights after the softmax and before dropout; float32.

    The logits include soft cap and bias. With a sink, the weights of a query add up to less than 1. With
    stick-breaking, the weights are not the softmax of the logits.
    """

    logits_BHLS: jax.Array
    weights_BHLS: jax.Array
    visible_BLS: jax.Array

    @property
    def seen_BHLS(self) -> jax.Array:
        """Whether a head's query sees a key, also after a bias that hides keys from some heads."""
        return self.visible_BLS[:, None] & (self.logits_BHLS > HIDDEN_FROM_HEAD / 10)


def attend(
    heads: Heads,
    visible_BLS: jax.Array,
    *,
    bias_BHLS: jax.Array | None = None,
    scoring: Scoring = DEFAULT_SCORING,
    drop: Callable[[jax.Array], jax.Array] = lambda weights_BHLS: weights_BHLS,
    edit: Edit | None = None,
) -> tuple[jax.Array, AttentionMaps]:
    """Return softmax(scale · qkᵀ + bias) v as out_BLHK in q's dtype, and attention maps (Vaswani et al. 2017, eq. 1).

    scoring: the scale and the variants of the softmax, which is in float32. drop: applies dropout to weights. edit: of
    the logits. The output is zero for a query without a visible key.
    """
    q_BLHK, k_BSGK, v_BSGK, decay_BLH = heads
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    # Each group's queries are the rows of one matrix, because products with one batch axis are fastest on CPUs.
    q_XRK = scaled(scoring.scale, q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B * G, -1, K)
    k_XSK, v_XSK, *_ = KeyValues.of(heads)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, k_XSK, preferred_element_type=jnp.float32)
    logits_BHLS = scoring.capped(logits_XRS).reshape(B, H, L, S)
    if bias_BHLS is not None:
        logits_BHLS = logits_BHLS + bias_BHLS
    if decay_BLH is not None:
        logits_BHLS = logits_BHLS + decay_bias(decay_BLH, decay_BLH)
    if scoring.contextual_PK is not None:
        logits_BHLS = logits_BHLS + rows.contextual_bias(q_BLHK, logits_BHLS, visible_BLS, scoring.contextual_PK)
    if scoring.selective:
        logits_BHLS = logits_BHLS - rows.selective_penalty(logits_BHLS, visible_BLS)[:, None]
    logits_BHLS = editing.apply(edit, logits_BHLS)
    visible_B1LS = visible_BLS[:, None]
    if scoring.stick_breaking:
        weights_BHLS = rows.stick_breaking(logits_BHLS, visible_BLS)
    else:
        sink_H11 = None if scoring.sink_H is None else scoring.sink_H[:, None, None]
        weights_BHLS = scoring.weights(jnp.where(visible_B1LS, logits_BHLS, HIDDEN), sink_H11)
    used_XRS = drop(weights_BHLS).astype(v_BSGK.dtype).reshape(B * G, -1, S)
    out_BLHK = jnp.einsum("xrs,xsk->xrk", used_XRS, v_XSK).reshape(B, H, L, -1).swapaxes(1, 2)
    # The softmax weights of a query without a visible key are uniform, not zero.
    out_BLHK = jnp.where(jnp.any(visible_BLS, axis=-1)[:, :, None, None], out_BLHK, 0)
    return out_BLHK, AttentionMaps(logits_BHLS, jnp.where(visible_B1LS, weights_BHLS, 0), visible_BLS)

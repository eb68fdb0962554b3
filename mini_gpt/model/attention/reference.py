"""Attention with all logits in memory: the reference for the other implementations."""

import math

import jax
import jax.numpy as jnp

from mini_gpt.model.attention.context import MASKED_LOGIT, Context
from mini_gpt.model.attention.core import Core
from mini_gpt.model.attention.rows import stick_breaking
from mini_gpt.model.layers import dropout, observe, scaled


def attend(
    core: Core,
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    context: Context,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(scale · qkᵀ) v as out_BLHK in q's dtype (Vaswani et al. 2017, eq. 1).

    core: `core.Core`, with the scale, the score mods and the variants of the softmax, which is in float32.
    k_BSGK, v_BSGK: keys and values; or k_XSK and v_XSK of a KV cache, in the form that `grouped` returns.
    dropout_key: of the weights; None: no dropout. The output is zero for a query without a visible key.
    """
    B, L, H, K = q_BLHK.shape
    k_XSK, v_XSK = _batched(k_BSGK, B), _batched(v_BSGK, B)
    *X, S, _ = k_XSK.shape
    G = math.prod(X) // B
    # The heads of a group share keys, so that their queries are the R = H/G · L rows of one matrix.
    q_XRK = scaled(core.scale, q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(*X, -1, K)
    logits_XRS = jnp.einsum("...rk,...sk->...rs", q_XRK, k_XSK, preferred_element_type=jnp.float32)
    logits_BHLS = logits_XRS.reshape(B, H, L, S)
    context = context._replace(q_BLHK=q_BLHK, k_BSGK=k_BSGK)
    for mod in core.score_mods:
        logits_BHLS = mod(logits_BHLS, context)
    visible_BLS = context.visible()
    if core.stick_breaking:
        weights_BHLS = stick_breaking(logits_BHLS, visible_BLS)
    else:
        masked_BHLS = jnp.where(visible_BLS[:, None], logits_BHLS, MASKED_LOGIT)
        if core.sink_H is not None:  # one more logit, without a value
            sink_BHL1 = jnp.broadcast_to(core.sink_H[:, None, None], (B, H, L, 1))
            masked_BHLS = jnp.concatenate([masked_BHLS, sink_BHL1], axis=-1)
        weights_BHLS = jax.nn.softmax(masked_BHLS, axis=-1)[..., :S]
    observe(core, "logits", logits_BHLS)
    observe(core, "visible", visible_BLS)
    observe(core, "weights", jnp.where(visible_BLS[:, None], weights_BHLS, 0))
    weights_XRS = dropout(weights_BHLS, core.dropout_rate, dropout_key).astype(v_XSK.dtype).reshape(*X, -1, S)
    out_BLHK = jnp.einsum("...rs,...sk->...rk", weights_XRS, v_XSK).reshape(B, H, L, -1).swapaxes(1, 2)
    # Without a visible key, the softmax would give weight to hidden keys.
    return jnp.where(visible_BLS.any(axis=-1)[:, :, None, None], out_BLHK, 0).astype(q_BLHK.dtype)


def _batched(k_BSGK: jax.Array, B: int) -> jax.Array:
    """Return k_XSK; axis X is that of `grouped` on CPUs, and elsewhere two axes, which XLA can divide over devices."""
    if jax.default_backend() == "cpu":
        return grouped(k_BSGK) if k_BSGK.ndim == 4 else k_BSGK
    return k_BSGK.swapaxes(1, 2) if k_BSGK.ndim == 4 else k_BSGK.reshape(B, -1, *k_BSGK.shape[1:])


def grouped(k_BSGK: jax.Array) -> jax.Array:
    """Return k_XSK; axis X is B and G merged, because products with one batch axis are fastest on CPUs."""
    return k_BSGK.swapaxes(1, 2).reshape(-1, k_BSGK.shape[1], k_BSGK.shape[3])

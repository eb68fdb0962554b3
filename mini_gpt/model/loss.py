"""Losses per token, in nats; every mean elsewhere is a sum of these over a count."""

import jax
import jax.numpy as jnp


def nll(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Gives nll_BL, the negative log-likelihood of each target, in nats, float32."""
    logits_BLV = logits_BLV.astype(jnp.float32)
    chosen_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BLV, axis=-1) - chosen_BL


def smoothed_cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array, smoothing: float) -> jax.Array:
    """Gives ce_BL against (1 - e) one-hot + e uniform over all V classes, in nats, float32 (Szegedy et al. 2016, 7)."""
    if smoothing == 0.0:
        return nll(logits_BLV, targets_BL)
    logits_BLV = logits_BLV.astype(jnp.float32)
    uniform_BL = jax.nn.logsumexp(logits_BLV, axis=-1) - jnp.mean(logits_BLV, axis=-1)
    return (1 - smoothing) * nll(logits_BLV, targets_BL) + smoothing * uniform_BL

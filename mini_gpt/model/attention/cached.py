"""Attention of one new token per row to a KV cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention import rows
from mini_gpt.model.attention.inputs import HIDDEN, Heads, KeyValues, Scoring, decay_bias, scaled


class Past(NamedTuple):
    """One layer's KV cache of S slots, and how the new token uses it.

    steps: scalar; the new token's slot is `steps` % S; None: nothing is written, in cross-attention. positions_BS,
    visible_BS: of all slots, including the new token's. recent_visible_BT: which of the layer's last inputs a
    convolution sees, or None. source_visible_BS: which keys cross-attention sees, or None.
    """

    cache: KeyValues
    steps: Any
    positions_BS: jax.Array
    visible_BS: jax.Array
    recent_visible_BT: jax.Array | None = None
    source_visible_BS: jax.Array | None = None

    def of_source(self) -> "Past":
        """Return the past of cross-attention: the keys and values of the encoder's hidden states."""
        assert self.cache.source is not None and self.source_visible_BS is not None
        positions_BS = jnp.arange(self.source_visible_BS.shape[1])[None]
        return Past(self.cache.source, None, positions_BS, self.source_visible_BS)

    def write_recent(self, x_B1D: jax.Array) -> "Past":
        """Return the past with the layer's new input in its slot."""
        return self._replace(cache=self.cache._replace(recent_BTD=self._written(self.cache.recent_BTD, x_B1D)))

    def write(self, heads: Heads) -> "Past":
        """Return the past with the new token's key, value and decay in its slot; XLA updates the cache in place."""
        if self.steps is None:
            return self
        as_rows = lambda x_B1GK: x_B1GK.reshape(-1, 1, x_B1GK.shape[-1])
        keys, values = map(self._written, self.cache[:2], map(as_rows, heads[1:3]))
        decay = None if heads.decay_BLH is None else self._written(self.cache.decay_BSH, heads.decay_BLH)
        return self._replace(cache=self.cache._replace(keys_XSK=keys, values_XSK=values, decay_BSH=decay))

    def last_decay(self) -> jax.Array:
        """Return decay_B1H of the last token before the new one."""
        decay_BSH = self.cache.decay_BSH
        assert decay_BSH is not None
        return jax.lax.dynamic_slice_in_dim(decay_BSH, (self.steps - 1) % decay_BSH.shape[1], 1, axis=1)

    def in_order(self, x_S: jax.Array, *, back: bool = False) -> jax.Array:
        """Return an array with its last axis, the slots, in the order of time; back: the reverse."""
        newest = self.steps % x_S.shape[-1] + 1
        return jnp.roll(x_S, newest if back else -newest, axis=-1)

    def _written(self, cached_XSK: jax.Array | None, new_X1K: jax.Array) -> jax.Array:
        assert cached_XSK is not None
        return jax.lax.dynamic_update_slice(cached_XSK, new_X1K, (0, self.steps % cached_XSK.shape[1], 0))


def attend_to_cache(heads: Heads, past: Past, bias_BH1S: jax.Array | None, scoring: Scoring) -> jax.Array:
    """Return softmax(scale · qkᵀ + bias) v as out_B1HK in q's dtype; the softmax is in float32."""
    q_B1HK, (keys_XSK, values_XSK, decay_BSH) = heads.q_BLHK, past.cache[:3]
    B, _, H, K = q_B1HK.shape
    G = keys_XSK.shape[0] // B
    q_XRK = scaled(scoring.scale, q_B1HK).reshape(B * G, H // G, K)
    logits_XRS = jnp.einsum("xrk,xsk->xrs", q_XRK, keys_XSK, preferred_element_type=jnp.float32)
    logits_BGRS = scoring.capped(logits_XRS).reshape(B, G, H // G, -1)
    if bias_BH1S is not None:
        logits_BGRS = logits_BGRS + bias_BH1S.reshape(-1, G, H // G, bias_BH1S.shape[-1])
    if heads.decay_BLH is not None and decay_BSH is not None:
        logits_BGRS = logits_BGRS + decay_bias(heads.decay_BLH, decay_BSH).reshape(logits_BGRS.shape)
    in_time = lambda variant: _in_time(variant, logits_BGRS, past)
    if scoring.contextual_PK is not None:
        table_PK = scoring.contextual_PK
        bias = lambda logits_BH1S, visible_B1S: rows.contextual_bias(q_B1HK, logits_BH1S, visible_B1S, table_PK)
        logits_BGRS = logits_BGRS + in_time(bias)
    if scoring.stick_breaking:
        weights_BGRS = in_time(rows.stick_breaking)
    else:
        logits_BGRS = jnp.where(past.visible_BS[:, None, None], logits_BGRS, HIDDEN)
        sink_GR1 = None if scoring.sink_H is None else scoring.sink_H.reshape(G, H // G, 1)
        weights_BGRS = scoring.weights(logits_BGRS, sink_GR1)
    if past.steps is None:  # a source without a token; in self-attention, a token always sees itself
        weights_BGRS = jnp.where(past.visible_BS[:, None, None].any(axis=-1, keepdims=True), weights_BGRS, 0)
    weights_XRS = weights_BGRS.astype(values_XSK.dtype).reshape(logits_XRS.shape)
    return jnp.einsum("xrs,xsk->xrk", weights_XRS, values_XSK).reshape(B, 1, H, -1).astype(q_B1HK.dtype)


def _in_time(variant: Callable[..., jax.Array], logits_BGRS: jax.Array, past: Past) -> jax.Array:
    """Return variant(logits_BH1S, visible_B1S), called with the keys in the order of time, for keys in slots."""
    shape = logits_BGRS.shape
    logits_BH1S = past.in_order(logits_BGRS).reshape(shape[0], -1, 1, shape[-1])
    return past.in_order(variant(logits_BH1S, past.in_order(past.visible_BS)[:, None]), back=True).reshape(shape)

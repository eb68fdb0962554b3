"""The inputs of all implementations of attention: heads, a mask and positions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIDDEN = float(jnp.finfo(jnp.float32).min)  # the logit of a masked key; finite, because -inf - (-inf) is NaN
HIDDEN_FROM_HEAD = -1e30  # a bias that hides a key from a head; added to a logit, so it must not overflow


class Mask(NamedTuple):
    """An attention mask. Query i sees all keys, or keys 0..i if causal, but never keys of another segment.

    window: query i sees only keys j with |i - j| < window, where i and j are indices in the sequence, not positions. A
    causal query sees `window` keys, its own included (Jiang et al. 2023); other queries also see the next window - 1.
    key_segments_BS: of the keys, in cross-attention; None: the keys are those of the queries' sequence.
    """

    causal: bool
    window: int | None = None
    segments_BL: jax.Array | None = None
    key_segments_BS: jax.Array | None = None

    def visible(self, length: int) -> jax.Array:
        """Return visible_BLS, boolean; B is 1 if there are no segments."""
        places_L = jnp.arange(length)
        if self.segments_BL is not None and self.key_segments_BS is not None:
            places_S = jnp.arange(self.key_segments_BS.shape[1])
            return self.between(places_L, places_S, (self.segments_BL, self.key_segments_BS))
        return self.between(places_L, places_L, None if self.segments_BL is None else (self.segments_BL,) * 2)

    def between(self, places_L: jax.Array, places_S: jax.Array, segments: Sequence[jax.Array] | None) -> jax.Array:
        """Return visible_BLS for queries and keys at these indices. segments: (segments_BL, segments_BS) or None."""
        offset_LS = places_S[None, :] - places_L[:, None]
        visible_LS = offset_LS <= 0 if self.causal else jnp.ones(offset_LS.shape, bool)
        if self.window is not None:
            visible_LS = visible_LS & (jnp.abs(offset_LS) < self.window)
        if segments is None:
            return visible_LS[None]
        return visible_LS[None] & (segments[0][:, :, None] == segments[1][:, None, :])

    def visible_keys(self, length: int) -> jax.Array:
        """Return the number of keys that each query sees, counts_BL, int32; segments must be contiguous."""
        if self.key_segments_BS is not None:
            return self.visible(length).sum(axis=-1)
        places_BL = jnp.arange(length)[None]
        first_BL, last_BL = jnp.zeros_like(places_BL), jnp.full_like(places_BL, length - 1)
        if self.segments_BL is not None:
            is_new_BL = jnp.pad(jnp.diff(self.segments_BL) != 0, ((0, 0), (1, 0)), constant_values=True)
            is_last_BL = jnp.roll(is_new_BL, -1, axis=1)
            first_BL = jax.lax.cummax(jnp.where(is_new_BL, places_BL, 0), axis=1)
            last_BL = jax.lax.cummin(jnp.where(is_last_BL, places_BL, length - 1), axis=1, reverse=True)
        if self.causal:
            last_BL = places_BL
        if self.window is not None:
            first_BL = jnp.maximum(first_BL, places_BL - self.window + 1)
            last_BL = jnp.minimum(last_BL, places_BL + self.window - 1)
        return last_BL - first_BL + 1

    def blocks(self, queries: int, keys: int, size: int) -> list[tuple[int, int]]:
        """Return sorted pairs (i, j) such that a query of block i may see a key of block j; segments are ignored.

        queries, keys: numbers of blocks. size: tokens of a block.
        """
        if self.key_segments_BS is not None:  # cross-attention: places of queries and keys are not related
            return [(i, j) for i in range(queries) for j in range(keys)]
        reach = keys if self.window is None else (self.window + size - 2) // size  # blocks to the furthest key
        last = lambda i: i if self.causal else min(keys - 1, i + reach)
        return [(i, j) for i in range(queries) for j in range(max(0, i - reach), last(i) + 1)]


def scaled(factor: float | jax.Array, x: jax.Array) -> jax.Array:
    """Return factor · x in x's dtype, computed in float32: a factor rounded to bfloat16 is off by up to 0.4%."""
    return (factor * x.astype(jnp.float32)).astype(x.dtype)


class Scoring(NamedTuple):
    """How attention weights are computed from queries and keys: softmax(scale · qkᵀ + bias), with some variants.

    soft_cap: c · tanh(logits / c) takes the place of the logits before bias and mask (Gemma Team 2024). sink_H: a logit
    of each head that takes part in the softmax and has no value (Agarwal et al. 2025); 0 is "softmax off by one".
    contextual_PK: CoPE's table. selective, stick_breaking: see `attention.rows`.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    sink_H: jax.Array | None = None
    contextual_PK: jax.Array | None = None
    selective: bool = False
    stick_breaking: bool = False

    def capped(self, logits: jax.Array) -> jax.Array:
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def weights(self, logits_XRS: jax.Array, sink_XR1: jax.Array | None) -> jax.Array:
        """Return the softmax over the keys, and over the sink if there is one."""
        if sink_XR1 is None:
            return jax.nn.softmax(logits_XRS, axis=-1)
        sink_XR1 = jnp.broadcast_to(sink_XR1, (*logits_XRS.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([logits_XRS, sink_XR1], axis=-1), axis=-1)[..., :-1]


class Heads(NamedTuple):
    """H query heads and G key-value heads; H/G query heads share one key-value head (Ainslie et al. 2023).

    Values may have another width than queries and keys. decay_BLH: None, or numbers such that the logits of query i and
    key j get the bias decay_i - decay_j; float32.
    """

    q_BLHK: jax.Array
    k_BSGK: jax.Array
    v_BSGK: jax.Array
    decay_BLH: jax.Array | None = None


def decay_bias(query_BLH: jax.Array, key_BSH: jax.Array) -> jax.Array:
    """Return the bias_BHLS of `Heads.decay_BLH`."""
    return query_BLH.swapaxes(1, 2)[..., None] - key_BSH.swapaxes(1, 2)[:, :, None]


class KeyValues(NamedTuple):
    """What one layer keeps of a sequence. Axis X is B and G merged: with separate axes, XLA copies the cache.

    decay_BSH: that of `Heads`, or None. recent_BTD: the inputs of the layer, for a convolution, or None. source: the
    keys and values of cross-attention, or None.
    """

    keys_XSK: jax.Array
    values_XSK: jax.Array
    decay_BSH: jax.Array | None = None
    recent_BTD: jax.Array | None = None
    source: "KeyValues | None" = None

    @classmethod
    def of(cls, heads: Heads, recent_BTD: jax.Array | None = None) -> "KeyValues":
        """Return the keys and values of a sequence, with B and G merged into X."""
        keys_XSK, values_XSK = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in heads[1:3])
        return cls(keys_XSK, values_XSK, heads.decay_BLH, recent_BTD)


class Memory(NamedTuple):
    """The last hidden states of the encoder, their segments and positions. A query sees those of its own segment."""

    x_BSD: jax.Array
    segments_BS: jax.Array
    positions_BS: jax.Array


class Context(NamedTuple):
    """The inputs of attention besides heads. with_maps: return attention maps.

    position: `positions.Position`; None before the layer's own encoding takes its place. memory, cross_position: for
    cross-attention. key_positions_BS: None: the keys are those of the queries' sequence.
    """

    mask: Mask
    position: Any
    positions_BL: jax.Array
    with_maps: bool = False
    memory: Memory | None = None
    cross_position: Any = None
    key_positions_BS: jax.Array | None = None

    def of_memory(self) -> "Context":
        """Return the context of cross-attention: each query sees all keys of its segment in the encoder.

        By default it has no positional encoding: the embeddings and the encoder have the order already.
        """
        if self.memory is None:  # with a KV cache, which has its own mask
            return self._replace(position=self.cross_position)
        segments_BL, shape = self.mask.segments_BL, (len(self.memory.x_BSD), self.positions_BL.shape[1])
        segments_BL = jnp.zeros(shape, jnp.int32) if segments_BL is None else segments_BL
        mask = Mask(False, None, segments_BL, self.memory.segments_BS)
        return self._replace(mask=mask, position=self.cross_position, key_positions_BS=self.memory.positions_BS)

    @property
    def of_keys_BS(self) -> jax.Array:
        """The positions of the keys."""
        return self.positions_BL if self.key_positions_BS is None else self.key_positions_BS

    @property
    def biased(self) -> bool:
        """Whether the positional encoding adds a bias to the logits."""
        first_B1 = self.positions_BL[:, :1]
        return self.position.bias(first_B1, first_B1) is not None

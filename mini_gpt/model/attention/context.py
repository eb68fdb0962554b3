"""Inputs of attention besides the hidden states: the coordinates of queries and keys, and the mask between them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MASKED_LOGIT = float(jnp.finfo(jnp.float32).min)  # the logit of a masked key; finite, because -inf - (-inf) is NaN
MASKING_BIAS = -1e30  # a bias that hides a key from a head; added to a logit, so it must not overflow


class Coordinates(NamedTuple):
    """The index, position and segment of each token, for the queries or for the keys. Axis B may have size 1.

    indices_BL: the number of each token in its row, from 0, also in a KV cache; below 0 for padding and empty slots,
      which no query sees.
    positions_BL: the positions for the positional encoding.
    segments_BL: attention stays within a segment; None: each row is one segment.
    sums_BLH: what an encoding sums over the tokens, up to each one: log gates (fox) or steps (accumulated); else None.
    """

    indices_BL: jax.Array
    positions_BL: jax.Array
    segments_BL: jax.Array | None = None
    sums_BLH: jax.Array | None = None

    @classmethod
    def of(
        cls, length: int, positions_BL: jax.Array | None = None, segments_BL: jax.Array | None = None
    ) -> "Coordinates":
        """Return the coordinates of rows of this length, by default with positions 0..length - 1 and one segment."""
        indices_BL = jnp.arange(length)[None]
        return cls(indices_BL, indices_BL if positions_BL is None else positions_BL, segments_BL)


class Mask(NamedTuple):
    """Which keys a query sees.

    causal: a query sees the keys of its segment up to its own index; else it sees all keys of its segment.
    window: of these, it sees only keys whose index differs by less than `window`: itself and the window - 1 keys before
      it (Jiang et al. 2023); if not causal, also the window - 1 keys after it.
    """

    causal: bool
    window: int | None = None

    def visible(self, queries: Coordinates, keys: Coordinates) -> jax.Array:
        """Return visible_BLS, boolean; B is 1 if all rows are alike."""
        query_BL1, key_B1S = queries.indices_BL[:, :, None], keys.indices_BL[:, None, :]
        offset_BLS = key_B1S - query_BL1
        # Not `>= 0` for each: XLA would move a part out of the decoding loop, and compute the rest again in each layer.
        visible_BLS = jnp.minimum(query_BL1, key_B1S) >= 0
        if self.causal:
            visible_BLS &= offset_BLS <= 0
        if self.window is not None:
            visible_BLS &= jnp.abs(offset_BLS) < self.window
        if queries.segments_BL is not None and keys.segments_BL is not None:
            visible_BLS &= queries.segments_BL[:, :, None] == keys.segments_BL[:, None, :]
        return visible_BLS

    def visible_counts(self, coordinates: Coordinates) -> jax.Array:
        """Return the number of keys that each query sees in self-attention, counts_BL; segments are contiguous."""
        length, indices_BL = coordinates.indices_BL.shape[1], coordinates.indices_BL
        first_BL, last_BL = jnp.zeros_like(indices_BL), jnp.full_like(indices_BL, length - 1)
        if coordinates.segments_BL is not None:
            is_new_BL = jnp.pad(jnp.diff(coordinates.segments_BL) != 0, ((0, 0), (1, 0)), constant_values=True)
            is_last_BL = jnp.roll(is_new_BL, -1, axis=1)
            first_BL = jax.lax.cummax(jnp.where(is_new_BL, indices_BL, 0), axis=1)
            last_BL = jax.lax.cummin(jnp.where(is_last_BL, indices_BL, length - 1), axis=1, reverse=True)
        if self.causal:
            last_BL = indices_BL
        if self.window is not None:
            first_BL = jnp.maximum(first_BL, indices_BL - self.window + 1)
            last_BL = jnp.minimum(last_BL, indices_BL + self.window - 1)
        return last_BL - first_BL + 1


class Context(NamedTuple):
    """The inputs of attention besides the hidden states.

    queries, keys: the same object in self-attention; the code tests this with `is`.
    mask: set by each layer.
    shared: {name: a positional encoding whose parameters all layers share}.
    encoder_BSD: in cross-attention, the hidden states of the encoder, from which keys and values are computed.
    q_BLHK, k_BSGK: queries and keys, for score mods that need them, in the reference implementation.
    reflections: those of `positions.path`, or None.
    of_queries_BLHR: what an `InputChange` has computed of each query, for score mods.
    cache: while text is generated, what the layer keeps of earlier tokens: a class of `generation.cache`.
    """

    queries: Coordinates
    keys: Coordinates
    mask: Mask = Mask(causal=False)
    shared: Mapping[str, Any] = MappingProxyType({})
    encoder_BSD: jax.Array | None = None
    q_BLHK: jax.Array | None = None
    k_BSGK: jax.Array | None = None
    reflections: Any = None
    of_queries_BLHR: jax.Array | None = None
    cache: Any = None

    def visible(self) -> jax.Array:
        """Return visible_BLS, whether each query sees each key."""
        return self.mask.visible(self.queries, self.keys)

    def visible_counts(self) -> jax.Array:
        """Return the number of keys that each query sees, counts_BL; those in a cache too."""
        if self.cache is not None and self.cache.tokens is not None:
            return self.mask.visible(self.queries, self.cache.tokens).sum(axis=-1)
        if self.queries is self.keys:
            return self.mask.visible_counts(self.queries)  # without an array of all pairs
        return self.visible().sum(axis=-1)

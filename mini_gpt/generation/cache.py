"""Decoding with a KV cache, which has each layer's keys and values of earlier tokens in slots."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.config.model import ModelConfig
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cached_attention
from mini_gpt.generation.cached_attention import CachedSource, KeyValues, write
from mini_gpt.model import running
from mini_gpt.model.attention.context import Tokens
from mini_gpt.model.attention.variants import CANON_TAPS
from mini_gpt.model.editing import NONE, Edits, edited
from mini_gpt.runtime.errors import UserError, require


class Source(NamedTuple):
    """The source of each row: its tokens, and each layer's keys and values for cross-attention."""

    tokens: Tokens
    layers: tuple[KeyValues, ...]


class Cache(NamedTuple):
    """The keys and values of earlier tokens, in slots for each row, and the tokens in the slots.

    Rows are aligned at their ends, as if padded on the left. A layer has S slots: the capacity, or its window if that
    is smaller. The next token of every row is written to the slot `steps` % S, one slice that XLA updates in place.
    With a window, the slots are then a ring buffer.

    layers: each layer's keys and values. steps: length of the longest row, a scalar. lengths_B: the length of each row.
    slots: {S: the tokens in the slots}; a place below 0 is an empty slot. random_BT: random positions of each row up to
    the capacity, or None. source: None without an encoder.
    """

    layers: tuple[KeyValues, ...]
    steps: jax.Array
    lengths_B: jax.Array
    slots: dict[int, Tokens]
    random_BT: jax.Array | None
    source: Source | None = None

    def take(self, rows_B: jax.Array, *, same_sources: bool = False) -> "Cache":
        """Return the cache with other rows in the place of each row, by index.

        same_sources: each new row has the same source as before, which is then not copied.
        """

        def taken(x: jax.Array) -> jax.Array:
            if x.ndim == 0:
                return x
            by_row = x.reshape(len(self.lengths_B), -1, *x.shape[1:])  # axis X is B and G merged
            return by_row[rows_B].reshape(-1, *x.shape[1:])

        if not same_sources:
            return jax.tree.map(taken, self)
        return jax.tree.map(taken, self._replace(source=None))._replace(source=self.source)


def check(config: ModelConfig) -> None:
    """Raise UserError if the model can't use a KV cache."""
    require(config.causal, "model.causal", False, "a bidirectional model can't generate text")
    if config.without_cache:
        raise UserError(f"{config.without_cache}; so the model can't generate text with a KV cache")


def prefill(
    model: LoadedModel,
    tokens_BL: jax.Array,
    lengths_B: jax.Array,
    capacity: int,
    source_BS: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Run the model on prompts in one pass; return the next token's logits_BV, float32, and the cache.

    tokens_BL: prompts padded on the right; a causal model does not see the padding. lengths_B: tokens of each prompt,
    at least 1. capacity: the maximum length of a row. source_BS: the tokens of the encoder; -1 is padding. Raises the
    errors of `check`.
    """
    check(model.config.model)
    (batch, length), config, layout = tokens_BL.shape, model.config.model, model.layout
    places_1T = jnp.arange(capacity)[None]
    positions_BT, segments_BT = layout.of(config, jnp.pad(tokens_BL, ((0, 0), (0, capacity - length))))
    rows = Tokens(places_1T, places_1T if positions_BT is None else positions_BT, segments_BT)
    rows = jax.tree.map(lambda x_BT: jnp.broadcast_to(x_BT, (batch, capacity)), rows)
    module = running.unrolled(model.merge())  # a scan over the layers would copy the caches for each token
    attentions = [block.attention for block in module.blocks]
    for attention in attentions:
        cached_attention.record(attention)
    prompt, read_BL = jax.tree.map(lambda x_BT: x_BT[:, :length], rows), layout.read(tokens_BL)
    if source_BS is None:
        module = _with_edits(module, model.edits)
        x_BLD, source = module.hidden(read_BL, prompt.positions_BL, prompt.segments_BL), None
    else:
        crosses = [block.cross_attention for block in module.blocks]
        for cross in crosses:
            cached_attention.record(cross)
        module = _with_edits(module, model.edits)
        source_BSD, tokens = module.encode(layout.read_source(source_BS), *layout.of_source(source_BS))
        x_BLD = module.decode(read_BL, prompt, (source_BSD, tokens))
        tokens = jax.tree.map(lambda x: jnp.broadcast_to(x, source_BS.shape), tokens)
        source = Source(tokens, tuple(map(cached_attention.recorded, crosses)))
    last_B1, steps = lengths_B[:, None] - 1, lengths_B.max()

    def places(size: int) -> jax.Array:
        """Return places_BS of `size` slots."""
        return last_B1 - (steps - 1 - jnp.arange(size)) % size

    def in_slots(x_XLK: jax.Array | None, size: int) -> Any:
        """Return the entries of axis L that belong in the slots."""
        if x_XLK is None:
            return None
        at_XS = jnp.repeat(jnp.maximum(places(size), 0), len(x_XLK) // batch, axis=0)
        return jnp.take_along_axis(x_XLK, at_XS.reshape(*at_XS.shape, *[1] * (x_XLK.ndim - 2)), axis=1)

    def tokens_in_slots(size: int) -> Tokens:
        return jax.tree.map(lambda x_BT: in_slots(x_BT, size), rows)._replace(places_BL=places(size))

    layers, sizes = [], [cached_attention.slots(attention, capacity) for attention in attentions]
    for attention, size in zip(attentions, sizes, strict=True):
        kept = cached_attention.recorded(attention)
        arrays = [in_slots(x, size) for x in kept[:3]]
        layers.append(KeyValues(*arrays, recent_BTD=in_slots(kept.recent_BTD, CANON_TAPS)))
    if config.variants.canon:
        sizes.append(CANON_TAPS)
    slots = {size: tokens_in_slots(size) for size in {*sizes}}
    random_BT = None if config.random_positions is None else positions_BT
    cache = Cache(tuple(layers), steps, lengths_B, slots, random_BT, source)
    return module.logits(jnp.take_along_axis(x_BLD, last_B1[:, :, None], axis=1))[:, 0], cache


def decode(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Run the model on one more token per row; return the next token's logits_BV, float32, and the new cache."""
    token, layout = _next_token(model, tokens_B, cache), model.layout
    slots = {
        size: jax.tree.map(lambda old_BS, new_B1: write(old_BS, new_B1, cache.steps), before, token)
        for size, before in cache.slots.items()
    }
    module = running.unrolled(model.merge())
    attentions = [block.attention for block in module.blocks]
    for attention, kept in zip(attentions, cache.layers, strict=True):
        cached_attention.attach(attention, kept, cached_attention.Step(token, slots, cache.steps))
    read_B1 = layout.read(tokens_B)[:, None]
    if cache.source is None:
        x_B1D = _with_edits(module, model.edits).hidden(read_B1, token.positions_BL, token.segments_BL)
    else:
        for block, kept in zip(module.blocks, cache.source.layers, strict=True):
            block.cross_attention.core = CachedSource(block.cross_attention.core, kept)
        not_used_BSD = jnp.zeros((*cache.source.tokens.positions_BL.shape, model.config.model.d_model))
        x_B1D = _with_edits(module, model.edits).decode(read_B1, token, (not_used_BSD, cache.source.tokens))
    layers = tuple(map(cached_attention.attached, attentions))
    cache = cache._replace(layers=layers, steps=cache.steps + 1, lengths_B=cache.lengths_B + 1, slots=slots)
    return module.logits(x_B1D)[:, 0], cache


def _next_token(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> Tokens:
    """Return the place, the position and the segment of the new token of each row, [B, 1] each."""
    layout = model.layout
    newest = next(iter(cache.slots.values()))  # slots of all sizes hold the newest token
    places_B = positions_B = cache.lengths_B
    segments_B1 = None
    if layout != PLAIN:
        next_B = _last(newest.positions_BL, cache.steps) + 1
        positions_B = jnp.where(layout.restarts(tokens_B), 0, next_B)
    if newest.segments_BL is not None:
        segments_B1 = (_last(newest.segments_BL, cache.steps) + (tokens_B == layout.separator_id))[:, None]
    if cache.random_BT is not None:
        positions_B = jnp.take_along_axis(cache.random_BT, places_B[:, None], axis=1)[:, 0]
    return Tokens(places_B[:, None], positions_B[:, None], segments_B1)


def _with_edits(module: Any, edits: Edits) -> Any:
    """Return the module with edits, around the parts of attention that have caches."""
    if edits.logits is not None:
        raise UserError("edits.logits: found edits of attention with a KV cache; they need a full pass")
    return module if edits == NONE else edited(module, edits)


def _last(slots_BS: jax.Array, steps: jax.Array) -> jax.Array:
    """Return the value_B in the slot of the newest token."""
    return jax.lax.dynamic_index_in_dim(slots_BS, (steps - 1) % slots_BS.shape[1], axis=1, keepdims=False)

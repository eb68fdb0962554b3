"""Decoding with a KV cache, which has each layer's keys and values of earlier tokens in slots."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.config.model import ModelConfig
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cached_attention
from mini_gpt.generation.cached_attention import CachedSource, KeyValues, write
from mini_gpt.model import running
from mini_gpt.model.attention.context import Coordinates
from mini_gpt.model.attention.variants import CANON_TAPS
from mini_gpt.runtime.errors import UserError, require


class Source(NamedTuple):
    """The source of each row: its tokens, and each layer's keys and values for cross-attention."""

    tokens: Coordinates
    layers: tuple[KeyValues, ...]


class Cache(NamedTuple):
    """The keys and values of earlier tokens, in slots for each row, and the tokens in the slots.

    Rows are aligned at their ends, as if padded on the left. A layer has S slots: the capacity, or its window if that
    is smaller. The next token of every row is written to the slot `written` % S, one slice that XLA updates in place.
    With a window, the slots are then a ring buffer.

    layers: the keys and values of each layer.
    written: the tokens written so far, padding on the left included: the length of the longest prompt, and one more for
      each decoded token.
    lengths_B: the length of each row.
    slots: {S: the coordinates of the tokens in S slots}; an index below 0 is an empty slot.
    random_BT: the random positions of each row up to the capacity, or None.
    source: None without an encoder.
    """

    layers: tuple[KeyValues, ...]
    written: jax.Array
    lengths_B: jax.Array
    slots: dict[int, Coordinates]
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


def without_cache(config: ModelConfig, length: float = math.inf) -> str | None:
    """Return why texts of up to this length have no KV cache; None if they have one."""
    if config.block != "attention":
        return f"model.block: found {config.block!r}, which has no keys and values"
    if config.variants.selective:
        return "model.variants.selective: found True, and selective attention needs all earlier queries"
    if config.rope.scaling == "dynamic" and (config.random_positions or length) > (config.rope.original_context or 0):
        return "model.rope.scaling: found 'dynamic', which turns all keys again when the text grows; use ntk"
    return None


def check(config: ModelConfig, length: int) -> None:
    """Raise UserError if the model can't use a KV cache for texts of this length."""
    require(config.causal, "model.causal", False, "a bidirectional model can't generate text")
    if reason := without_cache(config, length):
        raise UserError(f"{reason}; so the model can't generate text with a KV cache")


def prefill(
    model: LoadedModel,
    tokens_BL: jax.Array,
    lengths_B: jax.Array,
    capacity: int,
    source_BS: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Run the model on prompts in one pass; return the next token's logits_BV, float32, and the cache.

    tokens_BL: prompts padded on the right; a causal model does not see the padding.
    lengths_B: tokens of each prompt, at least 1.
    capacity: the maximum length of a row, at least L; `decode` beyond it would overwrite old tokens.
    source_BS: the tokens of the encoder; -1 is padding.

    Raises the errors of `check`.
    """
    check(model.config.model, capacity)
    (batch, length), config = tokens_BL.shape, model.config.model
    positions_BT, segments_BT = model.layout.positions_and_segments(
        config, jnp.pad(tokens_BL, ((0, 0), (0, capacity - length)))
    )
    rows = Coordinates.of(capacity, positions_BT, segments_BT)
    module = running.unstack(model.merge())  # a scan over the layers would copy the caches for each token
    attentions = [block.attention for block in module.blocks]
    sizes = [cached_attention.slot_count(attention, capacity) for attention in attentions]
    for attention in attentions:
        cached_attention.record(attention)
    prompt = jax.tree.map(lambda x_BT: x_BT[:, :length], rows)
    x_BLD, source = _run_prompt(model, module, (model.layout.decoder_tokens(tokens_BL), prompt), source_BS)
    kept = list(map(cached_attention.kept_of, attentions))
    to_slots = functools.partial(_to_slots, lengths_B)
    layers = tuple(
        KeyValues(
            to_slots(layer.keys_XSK, size),
            to_slots(layer.values_XSK, size),
            to_slots(layer.decay_BSH, size),
            to_slots(layer.recent_BTD, CANON_TAPS),
        )
        for layer, size in zip(kept, sizes, strict=True)
    )
    rows = jax.tree.map(lambda x_BT: jnp.broadcast_to(x_BT, (batch, capacity)), rows)
    slots = {}
    for size in {*sizes, *([CANON_TAPS] if config.variants.canon else [])}:
        coordinates = jax.tree.map(lambda x_BT, size=size: to_slots(x_BT, size), rows)
        slots[size] = coordinates._replace(indices_BL=_indices(lengths_B, size))
    random_BT = None if config.random_positions is None else positions_BT
    cache = Cache(layers, lengths_B.max(), lengths_B, slots, random_BT, source)
    last_B11 = lengths_B[:, None, None] - 1
    return module.logits(jnp.take_along_axis(x_BLD, last_B11, axis=1))[:, 0], cache


def _run_prompt(
    model: LoadedModel, module: Any, prompt: tuple[jax.Array, Coordinates], source_BS: jax.Array | None
) -> tuple[jax.Array, Source | None]:
    """Return the hidden states x_BLD of a prompt, and the source for the cache."""
    tokens_BL, target = prompt
    if source_BS is None:
        module = _with_edits(module, model.edits)
        return module.hidden(tokens_BL, target.positions_BL, target.segments_BL), None
    crosses = [block.cross_attention for block in module.blocks]
    for cross in crosses:
        cached_attention.record(cross)
    module = _with_edits(module, model.edits)
    encoder_BSD, source = module.encode(
        model.layout.encoder_tokens(source_BS), *model.layout.source_positions_and_segments(source_BS)
    )
    x_BLD = module.decode(tokens_BL, target, (encoder_BSD, source))
    source = jax.tree.map(lambda x: jnp.broadcast_to(x, source_BS.shape), source)
    return x_BLD, Source(source, tuple(map(cached_attention.kept_of, crosses)))


def _indices(lengths_B: jax.Array, size: int) -> jax.Array:
    """Return indices_BS of the tokens in `size` slots; below 0 if a slot is empty."""
    return lengths_B[:, None] - 1 - (lengths_B.max() - 1 - jnp.arange(size)) % size


def _to_slots(lengths_B: jax.Array, x_XLK: jax.Array | None, size: int) -> Any:
    """Return the entries of axis L that belong in `size` slots. Axis X is B, or B and G merged."""
    if x_XLK is None:
        return None
    at_XS = jnp.repeat(jnp.maximum(_indices(lengths_B, size), 0), len(x_XLK) // len(lengths_B), axis=0)
    return jnp.take_along_axis(x_XLK, at_XS.reshape(*at_XS.shape, *[1] * (x_XLK.ndim - 2)), axis=1)


def decode(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Run the model on one more token per row; return the next token's logits_BV, float32, and the new cache."""
    token, layout = _next_token(model, tokens_B, cache), model.layout
    slots = {
        size: jax.tree.map(lambda old_BS, new_B1: write(old_BS, new_B1, cache.written), before, token)
        for size, before in cache.slots.items()
    }
    module = running.unstack(model.merge())
    attentions = [block.attention for block in module.blocks]
    for attention, kept in zip(attentions, cache.layers, strict=True):
        cached_attention.attach(attention, kept, cached_attention.NewToken(token, slots, cache.written))
    read_B1 = layout.decoder_tokens(tokens_B)[:, None]
    if cache.source is None:
        x_B1D = _with_edits(module, model.edits).hidden(read_B1, token.positions_BL, token.segments_BL)
    else:
        for block, kept in zip(module.blocks, cache.source.layers, strict=True):
            block.cross_attention.core = CachedSource(block.cross_attention.core, kept)
        not_used_BSD = jnp.zeros((*cache.source.tokens.positions_BL.shape, model.config.model.d_model))
        x_B1D = _with_edits(module, model.edits).decode(read_B1, token, (not_used_BSD, cache.source.tokens))
    layers = tuple(map(cached_attention.kept_of, attentions))
    cache = cache._replace(layers=layers, written=cache.written + 1, lengths_B=cache.lengths_B + 1, slots=slots)
    return module.logits(x_B1D)[:, 0], cache


def _next_token(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> Coordinates:
    """Return the index, the position and the segment of the new token of each row, [B, 1] each."""
    layout = model.layout
    newest = next(iter(cache.slots.values()))  # slots of all sizes hold the newest token
    indices_B = positions_B = cache.lengths_B
    segments_B1 = None
    if layout != PLAIN:
        next_B = _last(newest.positions_BL, cache.written) + 1
        positions_B = jnp.where(layout.restarts(tokens_B), 0, next_B)
    if newest.segments_BL is not None:
        segments_B1 = (_last(newest.segments_BL, cache.written) + (tokens_B == layout.separator_id))[:, None]
    if cache.random_BT is not None:
        positions_B = jnp.take_along_axis(cache.random_BT, indices_B[:, None], axis=1)[:, 0]
    return Coordinates(indices_B[:, None], positions_B[:, None], segments_B1)


def _with_edits(module: Any, edits: Any) -> Any:
    """Return the module with edits, around the parts of attention that have caches."""
    if edits is None:
        return module
    if edits.logits is not None:
        raise UserError("edits.logits: found edits of attention with a KV cache; they need a full pass")
    return edits.apply_to(module)


def _last(slots_BS: jax.Array, written: jax.Array) -> jax.Array:
    """Return the value_B in the slot of the newest token."""
    return jax.lax.dynamic_index_in_dim(slots_BS, (written - 1) % slots_BS.shape[1], axis=1, keepdims=False)

"""Two passes that generate text: `prefill` reads prompts, `decode` one more token; a KV cache has what they computed.

In both, the context of each attention layer has a cache of its own (`Context.cache`). The layer attends through it, and
the cache keeps the keys and values in slots.

A new token changes what earlier tokens compute in two kinds of models: with selective attention, and with RoPE's
dynamic scaling once the text is longer than the original context, because all angles change with the length. It would
not be enough to keep keys before their rotation, as Peng et al. 2023 (3.3) do: the keys and values of the second layer
depend on the rotation in the first. Transformers keeps rotated keys, and so writes another text; with use_cache=False
it writes this one. Recurrent models have no keys and values to keep. Such models keep the `Text`, and each new token
takes a full pass over it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.config.model import ModelConfig
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import running
from mini_gpt.model.attention import reference
from mini_gpt.model.attention.context import Context, Coordinates
from mini_gpt.model.attention.core import Core
from mini_gpt.runtime.errors import UserError, require

Recent = tuple[jax.Array, jax.Array | None]


class KeyValues(NamedTuple):
    """What one attention layer keeps of a sequence. Axis X is B and G merged: with separate axes, XLA copies the cache.

    values_XSK: None with latent attention: the last entries of the keys are the values.
    sums_BSH: the sums of an encoding up to each token, see `Coordinates`, or None.
    recent: the last inputs_BTD of a canon layer and their segments_BT, or None.
    """

    keys_XSK: jax.Array
    values_XSK: jax.Array | None
    sums_BSH: jax.Array | None = None
    recent: Recent | None = None


class Source(NamedTuple):
    """The source of each row: the coordinates of its tokens, and each layer's keys and values for cross-attention."""

    tokens: Coordinates
    layers: tuple[KeyValues, ...]


class Cache(NamedTuple):
    """The keys and values of earlier tokens, in slots for each row, and the tokens in the slots.

    Rows are aligned at their ends, as if padded on the left. A layer has S slots: the capacity T, or its window if that
    is smaller. The next token of every row is written to the slot `written` % S, one slice that XLA updates in place.
    With a window, the slots are then a ring buffer.

    layers: the keys and values of each layer.
    written: the tokens written so far, padding on the left included: the length of the longest prompt, and one more for
      each decoded token.
    lengths_B: the length of each row.
    tokens: the coordinates in T slots, [B, T]. Indices of padding are below 0; causality hides tokens to come.
    source: None without an encoder.
    """

    layers: tuple[KeyValues, ...]
    written: jax.Array
    lengths_B: jax.Array
    tokens: Coordinates
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


class Text(NamedTuple):
    """The text so far, in the place of a KV cache.

    tokens_BT: rows padded on the right up to the capacity.
    lengths_B: the length of each row.
    """

    tokens_BT: jax.Array
    lengths_B: jax.Array

    def extended(self, tokens_B: jax.Array) -> "Text":
        """Return the text with one more token in each row."""
        tokens_BT = self.tokens_BT.at[jnp.arange(len(tokens_B)), self.lengths_B].set(tokens_B)
        return Text(tokens_BT, self.lengths_B + 1)

    def take(self, rows_B: jax.Array, *, same_sources: bool = False) -> "Text":
        """Return the text with other rows in the place of each row, by index."""
        del same_sources  # no such model has an encoder
        return Text(self.tokens_BT[rows_B], self.lengths_B[rows_B])


class PromptCache:
    """A layer's cache in the pass of the prompts, which are padded on the right."""

    tokens = None  # the keys of the context are all that there are
    recent: Recent | None = None
    last_sums = 0.0  # before the first token
    kept: KeyValues

    def __init__(self, lengths_B: jax.Array, capacity: int):
        self.lengths_B, self.capacity = lengths_B, capacity

    def attend(self, core: Core, q_BLHK, k_BLGK, v_BLGK, context: Context) -> jax.Array:
        """Attend within the prompts, and keep the last keys and values of each row in slots."""
        in_order = core.stick_breaking or core.needs_all_keys  # reads the slots in the order of the text
        size = self.capacity if in_order else min(self.capacity, context.mask.window or self.capacity)
        seen = context.reflections
        kept_BLGK = k_BLGK if seen is None else seen.after_prompts(k_BLGK, self.lengths_B)
        arrays = reference.grouped(kept_BLGK), _values(core, reference.grouped(v_BLGK)), context.keys.sums_BLH
        keys_XSK, values_XSK, sums_BSH = jax.tree.map(lambda x_XLK: _to_slots(self.lengths_B, x_XLK, size), arrays)
        self.kept = KeyValues(keys_XSK, values_XSK, sums_BSH, self.recent)
        return core.choose(q_BLHK, k_BLGK, v_BLGK, context, None)(q_BLHK, k_BLGK, v_BLGK, context)

    def with_earlier(self, x_BLD: jax.Array, segments_BL: jax.Array | None, count: int) -> Recent:
        """Keep the last `count` inputs of each row, with zeros before the first; return all, and their segments."""
        indices_BT = self.lengths_B[:, None] - count + jnp.arange(count)
        at_BT = jnp.maximum(indices_BT, 0)
        recent_BTD = jnp.take_along_axis(x_BLD, at_BT[..., None], axis=1) * (indices_BT >= 0)[..., None]
        segments_BT = None if segments_BL is None else jnp.take_along_axis(segments_BL, at_BT, axis=1)
        self.recent = recent_BTD, segments_BT
        return x_BLD, segments_BL


class TokenCache:
    """A layer's cache in the pass of one new token for each row.

    kept: replaced in the pass by what the layer keeps for the next token.
    tokens: the coordinates of the tokens in the slots, the new one included.
    written: of the `Cache`; the new token is written to slot `written` % S.
    """

    def __init__(self, kept: KeyValues, tokens: Coordinates, written: jax.Array):
        self.kept, self.tokens, self.written = kept, tokens, written

    @property
    def last_sums(self) -> jax.Array:
        """The sums_B1H up to the token before the new one."""
        assert self.kept.sums_BSH is not None
        return _slot(self.kept.sums_BSH, self.written - 1)

    def attend(self, core: Core, q_B1HK, k_B1GK, v_B1GK, context: Context) -> jax.Array:
        """Write the new token's key and value to its slot, in place, and attend to all slots."""
        as_rows = lambda x_B1GK: x_B1GK.reshape(-1, 1, x_B1GK.shape[-1])
        new = as_rows(k_B1GK), _values(core, as_rows(v_B1GK)), context.keys.sums_BLH
        old = self.kept
        if context.reflections is not None:  # they change all keys that the cache has
            old = old._replace(keys_XSK=context.reflections.after_token(old.keys_XSK))
        kept = KeyValues(*jax.tree.map(lambda old, x: _write(old, x, self.written), old[:3], new))
        self.kept = kept._replace(recent=self.kept.recent)
        context = context._replace(keys=self.tokens._replace(sums_BLH=kept.sums_BSH))
        values_XSK: Any = kept.values_XSK if core.latent is None else kept.keys_XSK[..., -core.latent :]
        return reference.attend(core, q_B1HK, kept.keys_XSK, values_XSK, context)

    def with_earlier(self, x_B1D: jax.Array, segments_B1: jax.Array | None, count: int) -> Recent:
        """Return the last `count` inputs and the new one, and their segments."""
        join = lambda recent, new: jnp.concatenate([recent, new], axis=1)
        recent = jax.tree.map(join, self.kept.recent, (x_B1D, segments_B1))
        self.kept = self.kept._replace(recent=jax.tree.map(lambda x: x[:, -count:], recent))
        return recent


def _values(core: Core, v_XLK: jax.Array) -> jax.Array | None:
    """Return the values that a cache keeps: none with latent attention, whose keys contain them."""
    return v_XLK if core.latent is None else None


class SourceCache:
    """The cache of a layer's cross-attention. kept: the keys and values of the source; None before the first pass."""

    tokens = None

    def __init__(self, kept: KeyValues | None = None):
        self.kept: Any = kept

    def attend(self, core: Core, q_BLHK, k_BSGK, v_BSGK, context: Context) -> jax.Array:
        if self.kept is not None:
            return reference.attend(core, q_BLHK, self.kept.keys_XSK, self.kept.values_XSK, context)
        self.kept = KeyValues(reference.grouped(k_BSGK), reference.grouped(v_BSGK))
        return core.choose(q_BLHK, k_BSGK, v_BSGK, context, None)(q_BLHK, k_BSGK, v_BSGK, context)


def without_cache(config: ModelConfig, length: float = math.inf) -> bool:
    """Return whether a new token of a text of this length changes what earlier tokens compute."""
    is_longer = (config.random_positions or length) > (config.rope.original_context or 0)
    return config.block != "attention" or config.variants.selective or (config.rope.scaling == "dynamic" and is_longer)


def next_logits(model: LoadedModel, text: Text) -> jax.Array:
    """Return the logits_BV after the last token of each row, float32."""
    tokens_BT, last_B1 = text.tokens_BT, text.lengths_B[:, None] - 1
    indices_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    positions_BT, segments_BT = model.layout.positions_and_segments(model.config.model, tokens_BT)
    positions_BT = indices_BT if positions_BT is None else positions_BT
    # Padding, which no token sees, must not lengthen the row: it has the position of the last token.
    positions_BT = jnp.take_along_axis(positions_BT, jnp.minimum(indices_BT, last_B1), axis=1)
    module = model.edited()
    x_BTD = module.hidden(model.layout.decoder_tokens(tokens_BT), positions_BT, segments_BT)
    return module.logits(jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1))[:, 0]


def prefill(
    model: LoadedModel,
    tokens_BL: jax.Array,
    lengths_B: jax.Array,
    capacity: int,
    source_BS: jax.Array | None = None,
) -> tuple[jax.Array, Cache | Text]:
    """Run the model on prompts in one pass; return the next token's logits_BV, float32, and the cache.

    tokens_BL: prompts padded on the right; a causal model does not see the padding.
    lengths_B: tokens of each prompt, at least 1.
    capacity: the maximum length of a row, at least L; `decode` beyond it would overwrite old tokens.
    source_BS: the tokens of the encoder; -1 is padding.

    A model `without_cache` keeps the tokens instead. Raises UserError for a bidirectional model.
    """
    length, config = tokens_BL.shape[1], model.config.model
    require(config.causal, "model.causal", False, "a bidirectional model can't generate text")
    text_BT = jnp.pad(tokens_BL, ((0, 0), (0, capacity - length)))
    if without_cache(config, capacity):
        text = Text(text_BT, lengths_B)
        return next_logits(model, text), text
    positions_BT, segments_BT = model.layout.positions_and_segments(config, text_BT)
    rows = Coordinates.of(capacity, positions_BT, segments_BT)
    prompt = jax.tree.map(lambda x_BT: x_BT[:, :length], rows)
    module = _module(model)
    layers = [PromptCache(lengths_B, capacity) for _ in module.blocks]
    source, crosses = None, [SourceCache() for _ in module.blocks]
    if source_BS is not None:
        source_arrays = model.layout.source_positions_and_segments(source_BS)
        source = module.encode(model.layout.encoder_tokens(source_BS), *source_arrays)
    x_BLD = _run(module, model.layout.decoder_tokens(tokens_BL), prompt, layers, source, crosses)
    indices_BT = jnp.arange(capacity) - (lengths_B.max() - lengths_B)[:, None]
    in_slots = lambda x_BT: jnp.take_along_axis(x_BT, jnp.maximum(indices_BT, 0), axis=1)
    slots = jax.tree.map(in_slots, rows)._replace(indices_BL=indices_BT)
    cache = Cache(tuple(layer.kept for layer in layers), lengths_B.max(), lengths_B, slots)
    if source is not None:
        tokens = jax.tree.map(lambda x: jnp.broadcast_to(x, source[0].shape[:2]), source[1])
        cache = cache._replace(source=Source(tokens, tuple(cross.kept for cross in crosses)))
    last_B11 = lengths_B[:, None, None] - 1
    return module.logits(jnp.take_along_axis(x_BLD, last_B11, axis=1))[:, 0], cache


def decode(model: LoadedModel, tokens_B: jax.Array, cache: Cache | Text) -> tuple[jax.Array, Cache | Text]:
    """Run the model on one more token per row; return the next token's logits_BV, float32, and the new cache."""
    if isinstance(cache, Text):
        text = cache.extended(tokens_B)
        return next_logits(model, text), text
    module, (token, tokens), written = _module(model), _next_token(model, tokens_B, cache), cache.written
    layers = [TokenCache(kept, slots_of(tokens, written, kept.keys_XSK.shape[1]), written) for kept in cache.layers]
    source, crosses = None, []
    if cache.source is not None:
        crosses = [SourceCache(kept) for kept in cache.source.layers]
        not_used_BSD = jnp.zeros((*cache.source.tokens.positions_BL.shape, model.config.model.d_model))
        source = not_used_BSD, cache.source.tokens
    x_B1D = _run(module, model.layout.decoder_tokens(tokens_B)[:, None], token, layers, source, crosses)
    kept = tuple(layer.kept for layer in layers)
    cache = cache._replace(layers=kept, written=written + 1, lengths_B=cache.lengths_B + 1, tokens=tokens)
    return module.logits(x_B1D)[:, 0], cache


def _module(model: LoadedModel) -> Any:
    """Return the module with its edits, and its blocks in a list: a scan would copy the caches for each token."""
    if model.edits is not None and model.edits.logits is not None:
        raise UserError("edits.logits: found edits of attention with a KV cache; they need a full pass")
    return running.unstack(model.edited())


def _run(module: Any, tokens_BL: jax.Array, coordinates: Coordinates, layers: Any, source: Any, crosses: Any) -> Any:
    """Return the last hidden states x_BLD, as the module's `hidden` does. Each layer attends through its cache.

    source: from the module's `encode`, or None.
    crosses: the caches of cross-attention.
    """
    context = Context(coordinates, coordinates, shared=module.positions)
    x_BLD = module.embed(module.embedding, tokens_BL, coordinates.positions_BL)
    for number, (block, cache) in enumerate(zip(module.blocks, layers, strict=True)):
        here: Any = context._replace(cache=cache)
        if source is not None:
            here = here, module.cross_context(coordinates, *source)._replace(cache=crosses[number])
        x_BLD = block(x_BLD, here)
    return module.finish(x_BLD)


def _next_token(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> tuple[Coordinates, Coordinates]:
    """Return the coordinates of the new token of each row, [B, 1] each, and those of the tokens in all slots."""
    layout, has_random = model.layout, model.config.model.random_positions is not None
    if layout == PLAIN and not has_random:
        index_B1 = cache.lengths_B[:, None]  # as in the slots, but XLA computes the mask once for all layers
        return Coordinates(index_B1, index_B1), cache.tokens
    at = lambda number: jax.tree.map(lambda x_BT: _slot(x_BT, number), cache.tokens)
    last, token = at(cache.written - 1), at(cache.written)
    if (layout.separator_id is not None or layout.operator_ids) and not has_random:
        restarts_B1 = layout.restarts(tokens_B[:, None])
        token = token._replace(positions_BL=jnp.where(restarts_B1, 0, last.positions_BL + 1))
    if last.segments_BL is not None:
        token = token._replace(segments_BL=last.segments_BL + (tokens_B[:, None] == layout.separator_id))
    return token, jax.tree.map(lambda old_BT, new_B1: _write(old_BT, new_B1, cache.written), cache.tokens, token)


def slots_of(tokens: Coordinates, written: jax.Array, size: int) -> Coordinates:
    """Return the coordinates of the tokens in the slots of a layer. tokens: of the `Cache`, the new one included."""
    if size == tokens.indices_BL.shape[1]:
        return tokens
    places_S = written - (written - jnp.arange(size)) % size  # below 0, it takes a token to come from the end
    return jax.tree.map(lambda x_BT: x_BT[:, places_S], tokens)


def _to_slots(lengths_B: jax.Array, x_XLK: jax.Array, size: int) -> jax.Array:
    """Return x_XSK, the entries of the last tokens of each row in their slots."""
    indices_BS = lengths_B[:, None] - 1 - (lengths_B.max() - 1 - jnp.arange(size)) % size
    at_XS = jnp.repeat(jnp.maximum(indices_BS, 0), len(x_XLK) // len(lengths_B), axis=0)
    return jnp.take_along_axis(x_XLK, at_XS.reshape(*at_XS.shape, *[1] * (x_XLK.ndim - 2)), axis=1)


def _slot(slots_XSK: jax.Array, number: jax.Array) -> jax.Array:
    """Return x_X1K of the slot `number` % S."""
    return jax.lax.dynamic_slice_in_dim(slots_XSK, number % slots_XSK.shape[1], 1, axis=1)


def _write(slots_XSK: jax.Array, new_X1K: jax.Array, written: jax.Array) -> jax.Array:
    """Return the slots with the new value in slot `written` % S; XLA updates them in place."""
    new_X1K = new_X1K.astype(slots_XSK.dtype)
    return jax.lax.dynamic_update_slice_in_dim(slots_XSK, new_X1K, written % slots_XSK.shape[1], axis=1)

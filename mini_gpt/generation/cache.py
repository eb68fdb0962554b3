"""Decoding with a KV cache, which has each layer's keys and values of earlier tokens in slots."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.cached import Past
from mini_gpt.model.attention.inputs import KeyValues
from mini_gpt.model.attention.variants import CANON_TAPS
from mini_gpt.model.inputs import Inputs
from mini_gpt.model.layout import PLAIN
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime.errors import UserError, require


class Slots(NamedTuple):
    """The tokens in S slots. places_BS: each token's index in its row; below 0 if the slot is empty.

    positions_BS, segments_BS: the model's inputs for these tokens.
    """

    places_BS: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array


class Cache(NamedTuple):
    """The keys and values of earlier tokens, in slots for each row, and the data for the attention mask.

    Rows are aligned at their ends, as if padded on the left. A layer has S slots: the capacity, or its window if that
    is smaller. The next token of every row is written to the slot `steps` % S, one slice that XLA updates in place.
    With a window, the slots are then a ring buffer.

    layers: each layer's keys and values. steps: length of the longest row, a scalar. lengths_B: the length of each row.
    slots: {S: the tokens in the slots}. random_BT: random positions of each row up to the capacity, or None.
    source_visible_BS: which tokens of the source are no padding; None without an encoder.
    """

    layers: tuple[KeyValues, ...]
    steps: jax.Array
    lengths_B: jax.Array
    slots: dict[int, Slots]
    random_BT: jax.Array | None
    source_visible_BS: jax.Array | None = None

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
        without = [layer._replace(source=None) for layer in self.layers]
        new = jax.tree.map(taken, self._replace(layers=tuple(without), source_visible_BS=None))
        layers = (layer._replace(source=old.source) for layer, old in zip(new.layers, self.layers, strict=True))
        return new._replace(layers=tuple(layers), source_visible_BS=self.source_visible_BS)


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
    module, (batch, length) = model.merge(), tokens_BL.shape
    config = module.config
    check(config)
    padded_BT = jnp.pad(tokens_BL, ((0, 0), (0, capacity - length)))
    positions_BT, segments_BT = model.layout.of(config, padded_BT)
    positions_BL, segments_BL = (None if x_BT is None else x_BT[:, :length] for x_BT in (positions_BT, segments_BT))
    of_source = model.layout.read_source(source_BS), *model.layout.of_source(source_BS)
    prompt = Inputs(model.layout.read(tokens_BL), positions_BL, segments_BL, *of_source)
    x_BLD, layers, _ = module.forward(prompt, edits=model.edits, caches=[None] * config.num_layers)
    last_B1, steps = lengths_B[:, None] - 1, lengths_B.max()

    def places(size: int) -> jax.Array:
        """Return places_BS of `size` slots."""
        return last_B1 - (steps - 1 - jnp.arange(size)) % size

    def layer_to_slots(layer: KeyValues, size: int) -> KeyValues:
        keys_XSK, values_XSK, decay_BSH = (gathered(x, size) for x in layer[:3])
        return KeyValues(keys_XSK, values_XSK, decay_BSH, gathered(layer.recent_BTD, CANON_TAPS), layer.source)

    def gathered(x_XLK: jax.Array | None, size: int) -> Any:
        if x_XLK is None:
            return None
        at_XS1 = jnp.repeat(jnp.maximum(places(size), 0), len(x_XLK) // batch, axis=0)[:, :, None]
        return jnp.take_along_axis(x_XLK, at_XS1, axis=1)

    def to_slots(size: int) -> Slots:
        def row_to_slots(x_BT: jax.Array | None, default_1T: jax.Array) -> jax.Array:
            x_BT = jnp.broadcast_to(default_1T if x_BT is None else x_BT, (batch, capacity))
            return jnp.take_along_axis(x_BT, jnp.maximum(places(size), 0), axis=1)

        places_1T = jnp.arange(capacity, dtype=jnp.int32)[None]
        positions_BS = row_to_slots(positions_BT, places_1T)
        return Slots(places(size), positions_BS, row_to_slots(segments_BT, jnp.zeros_like(places_1T)))

    sizes = [min(capacity, kind.window or capacity) for kind in config.layer_kinds]
    cache = Cache(
        layers=tuple(map(layer_to_slots, layers or (), sizes)),
        steps=steps,
        lengths_B=lengths_B,
        slots={size: to_slots(size) for size in {*sizes, *([CANON_TAPS] if config.variants.canon else [])}},
        random_BT=None if config.random_positions is None else positions_BT,
        source_visible_BS=None if source_BS is None else source_BS >= 0,
    )
    return module.logits(jnp.take_along_axis(x_BLD, last_B1[:, :, None], axis=1))[:, 0], cache


def decode(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Run the model on one more token per row; return the next token's logits_BV, float32, and the new cache."""
    module, places_B, any_size = model.merge(), cache.lengths_B, max(cache.slots)  # all hold the newest token
    segments_B, positions_B = _last(cache.slots[any_size].segments_BS, cache.steps), places_B
    if model.layout != PLAIN:
        next_B = _last(cache.slots[any_size].positions_BS, cache.steps) + 1
        positions_B = jnp.where(model.layout.restarts(tokens_B), 0, next_B)
    if model.layout.separator_id is not None:
        segments_B = segments_B + (tokens_B == model.layout.separator_id)
    if cache.random_BT is not None:
        positions_B = jnp.take_along_axis(cache.random_BT, places_B[:, None], axis=1)[:, 0]

    def write(slots_BS: jax.Array, new_B: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(slots_BS, new_B[:, None], (0, cache.steps % slots_BS.shape[1]))

    new = (places_B, positions_B, segments_B)
    slots = {size: Slots(*map(write, before, new)) for size, before in cache.slots.items()}
    visible = {size: (s.places_BS >= 0) & (s.segments_BS == segments_B[:, None]) for size, s in slots.items()}

    def past(layer: KeyValues) -> Past:
        """Return the past of a layer. Its slots hold no later token and no token before the window."""
        size = layer.keys_XSK.shape[1]
        recent_visible_BT = None if layer.recent_BTD is None else visible[CANON_TAPS]
        of_slots = slots[size].positions_BS, visible[size], recent_visible_BT
        return Past(layer, cache.steps, *of_slots, cache.source_visible_BS)

    inputs, caches = Inputs(model.layout.read(tokens_B)[:, None], positions_B[:, None]), list(map(past, cache.layers))
    x_B1D, layers, _ = module.forward(inputs, edits=model.edits, caches=caches)
    cache = cache._replace(
        layers=tuple(layers or ()), steps=cache.steps + 1, lengths_B=cache.lengths_B + 1, slots=slots
    )
    return module.logits(x_B1D)[:, 0], cache


def _last(slots_BS: jax.Array, steps: jax.Array) -> jax.Array:
    """Return the value_B in the slot of the newest token."""
    return jax.lax.dynamic_index_in_dim(slots_BS, (steps - 1) % slots_BS.shape[1], axis=1, keepdims=False)

"""Decoding with a KV cache, which has each layer's keys and values of earlier tokens in slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention.cached import Past
from mini_gpt.model.attention.masks import KeyValues
from mini_gpt.model.gpt import Inputs, positions_and_segments
from mini_gpt.model.loaded import LoadedModel


class Cache(NamedTuple):
    """The keys and values of earlier tokens, in S slots for each row, and the data for the attention mask.

    Rows are aligned at their ends, as if padded on the left. The next token of every row is written to the slot
    `steps` % S, one slice that XLA updates in place. S is the capacity, or the attention window if that is smaller. The
    slots are then a ring buffer.

    layers: each layer's keys and values. steps: length of the longest row, a scalar. lengths_B: the length of each row.
    places_BS: for each slot, its token's index in the row; below 0 if the slot is empty. positions_BS, segments_BS:
    the model's inputs for these tokens. random_BT: random positions of each row up to the capacity, or None.
    """

    layers: tuple[KeyValues, ...]
    steps: jax.Array
    lengths_B: jax.Array
    places_BS: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array
    random_BT: jax.Array | None


def prefill(model: LoadedModel, tokens_BL: jax.Array, lengths_B: jax.Array, capacity: int) -> tuple[jax.Array, Cache]:
    """Run the model on prompts in one pass; return the next token's logits_BV, float32, and the cache.

    tokens_BL: prompts padded on the right; a causal model does not see the padding. lengths_B: tokens of each prompt,
    at least 1. capacity: the maximum length of a row.
    """
    module, (batch, length) = model.merge(), tokens_BL.shape
    config = module.config
    padded_BT = jnp.pad(tokens_BL, ((0, 0), (0, capacity - length)))
    positions_BT, segments_BT = positions_and_segments(config, padded_BT, model.separator_id)
    prompt = Inputs(tokens_BL, *(None if x_BT is None else x_BT[:, :length] for x_BT in (positions_BT, segments_BT)))
    x_BLD, layers, _ = module.forward(prompt, head_mask_NBH=model.head_mask_NBH, caches=[None] * config.num_layers)
    slots = capacity if config.attention_window is None else min(capacity, config.attention_window)
    last_B1, steps = lengths_B[:, None] - 1, lengths_B.max()
    places_BS = last_B1 - (steps - 1 - jnp.arange(slots)) % slots  # for each slot, its token's index in the row
    at_BS = jnp.maximum(places_BS, 0)

    def layer_to_slots(x_XLK: jax.Array) -> jax.Array:
        at_XS = jnp.repeat(at_BS, len(x_XLK) // batch, axis=0)
        return jnp.take_along_axis(x_XLK, at_XS[:, :, None], axis=1)

    def row_to_slots(x_BT: jax.Array | None, default_1T: jax.Array) -> jax.Array:
        x_BT = jnp.broadcast_to(default_1T if x_BT is None else x_BT, (batch, capacity))
        return jnp.take_along_axis(x_BT, at_BS, axis=1)

    places_1T = jnp.arange(capacity, dtype=jnp.int32)[None]
    cache = Cache(
        layers=jax.tree.map(layer_to_slots, tuple(layers or ())),
        steps=steps,
        lengths_B=lengths_B,
        places_BS=places_BS,
        positions_BS=row_to_slots(positions_BT, places_1T),
        segments_BS=row_to_slots(segments_BT, jnp.zeros_like(places_1T)),
        random_BT=None if config.random_positions is None else positions_BT,
    )
    return module.logits(jnp.take_along_axis(x_BLD, last_B1[:, :, None], axis=1))[:, 0], cache


def decode(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Run the model on one more token per row; return the next token's logits_BV, float32, and the new cache."""
    module, slots, places_B = model.merge(), cache.places_BS.shape[1], cache.lengths_B
    slot = cache.steps % slots
    last = lambda slots_BS: jax.lax.dynamic_index_in_dim(slots_BS, (cache.steps - 1) % slots, axis=1, keepdims=False)
    segments_B, positions_B = last(cache.segments_BS), places_B
    if model.separator_id is not None:
        starts_B = tokens_B == model.separator_id
        segments_B, positions_B = segments_B + starts_B, jnp.where(starts_B, 0, last(cache.positions_BS) + 1)
    if cache.random_BT is not None:
        positions_B = jnp.take_along_axis(cache.random_BT, places_B[:, None], axis=1)[:, 0]
    write = lambda slots_BS, new_B: jax.lax.dynamic_update_slice(slots_BS, new_B[:, None], (0, slot))
    places_BS, positions_BS = write(cache.places_BS, places_B), write(cache.positions_BS, positions_B)
    segments_BS = write(cache.segments_BS, segments_B)
    # No other mask is needed, because slots hold no later token and no token before the window.
    visible_BS = (places_BS >= 0) & (segments_BS == segments_B[:, None])
    inputs = Inputs(tokens_B[:, None], positions_B[:, None])
    caches = [Past(layer, slot, positions_BS, visible_BS) for layer in cache.layers]
    x_B1D, layers, _ = module.forward(inputs, head_mask_NBH=model.head_mask_NBH, caches=caches)
    new_slots = (places_BS, positions_BS, segments_BS)
    cache = Cache(tuple(layers or ()), cache.steps + 1, cache.lengths_B + 1, *new_slots, cache.random_BT)
    return module.logits(x_B1D)[:, 0], cache

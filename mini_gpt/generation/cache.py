"""Decoding with a KV cache: each layer's keys and values of the tokens so far, in slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention.reference import KeyValues, Past
from mini_gpt.model.gpt import Inputs, positions_and_segments
from mini_gpt.model.loaded import LoadedModel


class Cache(NamedTuple):
    """What later tokens may see of each row, in S slots.

    Rows are aligned at their ends, as if padded on the left: the next token of every row goes to the slot `steps` % S,
    so that a write is one slice, which XLA does in place. S is the capacity, or the attention window if that is less;
    then the slots are a ring.

    layers: each layer's keys and values. steps: tokens so far of the longest row, a scalar. lengths_B: of each row.
    places_BS: each slot's place in its row; below 0 if the slot is empty. positions_BS, segments_BS: the model's inputs
    for these places. random_BT: the positions of all places up to the capacity, if the model has random positions.
    """

    layers: tuple[KeyValues, ...]
    steps: jax.Array
    lengths_B: jax.Array
    places_BS: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array
    random_BT: jax.Array | None


def prefill(model: LoadedModel, tokens_BL: jax.Array, lengths_B: jax.Array, capacity: int) -> tuple[jax.Array, Cache]:
    """Read prompts in one pass; return the logits_BV of each row's next token, float32, and the cache.

    tokens_BL: prompts padded on the right, which a causal model does not see. lengths_B: tokens of each prompt, at
    least 1. capacity: the most tokens that a row will have.
    """
    module, (batch, length) = model.merge(), tokens_BL.shape
    config = module.config
    padded_BT = jnp.pad(tokens_BL, ((0, 0), (0, capacity - length)))
    positions_BT, segments_BT = positions_and_segments(config, padded_BT, model.separator_id)
    prompt = Inputs(tokens_BL, *(None if x_BT is None else x_BT[:, :length] for x_BT in (positions_BT, segments_BT)))
    x_BLD, layers, _ = module.forward(prompt, head_mask_NBH=model.head_mask_NBH, caches=[None] * config.num_layers)
    slots = capacity if config.attention_window is None else min(capacity, config.attention_window)
    last_B1, steps = lengths_B[:, None] - 1, lengths_B.max()
    places_BS = last_B1 - (steps - 1 - jnp.arange(slots)) % slots  # the last place that each slot has held
    at_BS = jnp.maximum(places_BS, 0)

    def in_slots(of_XLK: jax.Array) -> jax.Array:
        at_XS = jnp.repeat(at_BS, len(of_XLK) // batch, axis=0)
        return jnp.take_along_axis(of_XLK, at_XS[:, :, None], axis=1)

    def slots_of(of_BT: jax.Array | None, default_1T: jax.Array) -> jax.Array:
        of_BT = jnp.broadcast_to(default_1T if of_BT is None else of_BT, (batch, capacity))
        return jnp.take_along_axis(of_BT, at_BS, axis=1)

    places_1T = jnp.arange(capacity, dtype=jnp.int32)[None]
    cache = Cache(
        layers=jax.tree.map(in_slots, tuple(layers or ())),
        steps=steps,
        lengths_B=lengths_B,
        places_BS=places_BS,
        positions_BS=slots_of(positions_BT, places_1T),
        segments_BS=slots_of(segments_BT, jnp.zeros_like(places_1T)),
        random_BT=None if config.random_positions is None else positions_BT,
    )
    return module.logits(jnp.take_along_axis(x_BLD, last_B1[:, :, None], axis=1))[:, 0], cache


def decode(model: LoadedModel, tokens_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Read one more token of each row; return the logits_BV of each row's next token, float32, and the new cache."""
    module, slots, places_B = model.merge(), cache.places_BS.shape[1], cache.lengths_B
    slot = cache.steps % slots
    last = lambda of_BS: jax.lax.dynamic_index_in_dim(of_BS, (cache.steps - 1) % slots, axis=1, keepdims=False)
    segments_B, positions_B = last(cache.segments_BS), places_B
    if model.separator_id is not None:
        opens_B = tokens_B == model.separator_id
        segments_B, positions_B = segments_B + opens_B, jnp.where(opens_B, 0, last(cache.positions_BS) + 1)
    if cache.random_BT is not None:
        positions_B = jnp.take_along_axis(cache.random_BT, places_B[:, None], axis=1)[:, 0]
    put = lambda of_BS, new_B: jax.lax.dynamic_update_slice(of_BS, new_B[:, None], (0, slot))
    places_BS, positions_BS = put(cache.places_BS, places_B), put(cache.positions_BS, positions_B)
    segments_BS = put(cache.segments_BS, segments_B)
    # Slots hold no later token, and none from before the window.
    visible_BS = (places_BS >= 0) & (segments_BS == segments_B[:, None])
    inputs = Inputs(tokens_B[:, None], positions_B[:, None])
    caches = [Past(layer, slot, positions_BS, visible_BS) for layer in cache.layers]
    x_B1D, layers, _ = module.forward(inputs, head_mask_NBH=model.head_mask_NBH, caches=caches)
    of_slots = (places_BS, positions_BS, segments_BS)
    cache = Cache(tuple(layers or ()), cache.steps + 1, cache.lengths_B + 1, *of_slots, cache.random_BT)
    return module.logits(x_B1D)[:, 0], cache

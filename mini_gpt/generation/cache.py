"""Decoding with what is kept of the tokens before: each layer's keys and values, in slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model import output_loss
from mini_gpt.model.attention.cached import Past
from mini_gpt.model.gpt import MiniGPT, text_layout


class Cache(NamedTuple):
    """What later tokens may see of each row, in S slots.

    Rows end in the same slot, as if they were filled up on the left, so that the next token of each goes to the slot
    `steps` % S: a write of one slice, which XLA does in place. S is the capacity, or, where a window hides all before
    it, the window: then slots are a ring.

    steps: tokens so far of the longest row, a scalar. keys_NXSK, values_NXSK: one XSK a layer, see Past. places_BS:
    below 0 where a slot is empty. positions_BS, segments_BS: as the model reads them. lengths_B: tokens so far.
    opened_B: place of the last separator that keeps documents apart. drawn_BT: the positions of all places to come, of
    a model that is trained on random ones.
    """

    steps: jax.Array
    keys_NXSK: tuple[jax.Array, ...]
    values_NXSK: tuple[jax.Array, ...]
    places_BS: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array
    lengths_B: jax.Array
    opened_B: jax.Array
    drawn_BT: jax.Array | None


def prefill(
    model: MiniGPT, tokens_BL: jax.Array, lengths_B: jax.Array, capacity: int, isolate_at: int | None = None
) -> tuple[jax.Array, Cache]:
    """Reads prompts in one pass; gives logits_BV, float32, of what follows each, and the cache.

    tokens_BL: filled up on the right, where a causal model does not see it. lengths_B: of the prompts, 1 at least.
    capacity: tokens that a row will have at most.
    """
    config, (batch, length) = model.config, tokens_BL.shape
    filled_BT = jnp.pad(tokens_BL, ((0, 0), (0, capacity - length)))
    positions_BT, segments_BT = text_layout(config, filled_BT, isolate_at)
    drawn_BT = None if config.random_positions is None else positions_BT
    places_1T = jnp.arange(capacity, dtype=jnp.int32)[None]
    opens_BL = jnp.zeros(tokens_BL.shape, bool) if isolate_at is None else tokens_BL == isolate_at
    kept: list[tuple[jax.Array, jax.Array]] = []
    cut = lambda of_BT: None if of_BT is None else of_BT[:, :length]
    x_BLD = model.hidden(tokens_BL, cut(positions_BT), cut(segments_BT), remember=lambda *layer: kept.append(layer))
    slots = capacity if config.attention_window is None else min(capacity, config.attention_window)
    last_B1, steps = lengths_B[:, None] - 1, lengths_B.max()
    places_BS = last_B1 - (steps - 1 - jnp.arange(slots)) % slots  # the last place that stands in each slot
    at_BS = jnp.maximum(places_BS, 0)

    def in_slots(of_BLGK: jax.Array) -> jax.Array:
        return (
            jnp.take_along_axis(of_BLGK, at_BS[:, :, None, None], axis=1)
            .swapaxes(1, 2)
            .reshape(-1, slots, of_BLGK.shape[-1])
        )

    whole = lambda of_BT: jnp.take_along_axis(jnp.broadcast_to(of_BT, (batch, capacity)), at_BS, axis=1)
    keys_NXSK, values_NXSK = (tuple(map(in_slots, layers)) for layers in zip(*kept, strict=True))
    in_prompt_BL = jnp.arange(length) < lengths_B[:, None]
    cache = Cache(
        steps,
        keys_NXSK,
        values_NXSK,
        places_BS,
        whole(places_1T if positions_BT is None else positions_BT),
        whole(jnp.zeros((1, capacity), jnp.int32) if segments_BT is None else segments_BT),
        lengths_B,
        jnp.max(jnp.where(opens_BL & in_prompt_BL, places_1T[:, :length], 0), axis=1),
        drawn_BT,
    )
    return _logits(model, jnp.take_along_axis(x_BLD, last_B1[:, :, None], axis=1)), cache


def decode(model: MiniGPT, tokens_B: jax.Array, cache: Cache, isolate_at: int | None = None) -> tuple[jax.Array, Cache]:
    """Reads one more token of each row; gives logits_BV, float32, of what follows it, and the cache with it."""
    slots, places_B, opened_B = cache.places_BS.shape[1], cache.lengths_B, cache.opened_B
    slot = cache.steps % slots
    put = lambda of_BS, new_B: jax.lax.dynamic_update_slice(of_BS, new_B[:, None], (0, slot))
    segments_B = jax.lax.dynamic_index_in_dim(cache.segments_BS, (cache.steps - 1) % slots, axis=1, keepdims=False)
    positions_B = places_B
    if isolate_at is not None:
        opens_B = tokens_B == isolate_at
        opened_B = jnp.where(opens_B, places_B, opened_B)
        segments_B, positions_B = segments_B + opens_B, places_B - opened_B
    if cache.drawn_BT is not None:
        positions_B = jnp.take_along_axis(cache.drawn_BT, places_B[:, None], axis=1)[:, 0]
    places_BS, positions_BS = put(cache.places_BS, places_B), put(cache.positions_BS, positions_B)
    segments_BS = put(cache.segments_BS, segments_B)
    # Slots hold nothing that is to come, and nothing from before the window.
    visible_BS = (places_BS >= 0) & (segments_BS == segments_B[:, None])
    kept: list[Past] = []

    def remember(k_B1GK: jax.Array, v_B1GK: jax.Array) -> Past:
        layer = len(kept)
        put = lambda of_XSK, new_B1GK: jax.lax.dynamic_update_slice(
            of_XSK, new_B1GK.reshape(-1, 1, new_B1GK.shape[-1]), (0, slot, 0)
        )
        keys_XSK, values_XSK = put(cache.keys_NXSK[layer], k_B1GK), put(cache.values_NXSK[layer], v_B1GK)
        kept.append(Past(keys_XSK, values_XSK, positions_BS, visible_BS))
        return kept[-1]

    x_B1D = model.hidden(tokens_B[:, None], positions_B[:, None], remember=remember)
    keys_NXSK, values_NXSK = tuple(past.keys_XSK for past in kept), tuple(past.values_XSK for past in kept)
    lengths_B = cache.lengths_B + 1
    known = (places_BS, positions_BS, segments_BS, lengths_B, opened_B, cache.drawn_BT)
    cache = Cache(cache.steps + 1, keys_NXSK, values_NXSK, *known)
    return _logits(model, x_B1D), cache


def _logits(model: MiniGPT, x_B1D: jax.Array) -> jax.Array:
    return output_loss.logits(x_B1D[:, 0], model.output_table.astype(model.dtype))

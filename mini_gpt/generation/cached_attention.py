"""Attention with a KV cache: these objects take the place of parts of a model's attention while it generates.

The code of the model has no caches. During the prefill, a `Recorder` keeps the keys and values of the prompt.
While tokens are decoded, `CachedCore` attends to the keys and values of earlier tokens. Each object keeps its new
arrays in attributes, which are read after the pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.model.attention import reference
from mini_gpt.model.attention.context import Context, Coordinates, Mask
from mini_gpt.model.attention.core import Core
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.model.attention.variants import CANON_TAPS, Canon, LengthScale
from mini_gpt.model.positions.contextual import Fox


class KeyValues(NamedTuple):
    """What one attention layer keeps of a sequence. Axis X is B and G merged: with separate axes, XLA copies the cache.

    decay_BSH: the decays of forgetting attention, or None.
    recent_BTD: the inputs of a canon layer, or None.
    """

    keys_XSK: jax.Array
    values_XSK: jax.Array
    decay_BSH: Any = None
    recent_BTD: Any = None


class Recorder:
    """Takes the place of an attention's core, and keeps the keys and values of the pass."""

    def __init__(self, core: Core):
        self.core = core

    def choose(self, q_BLHK, k_BSGK, v_BSGK, context: Context, dropout_key: None) -> Any:
        self.attend_with = self.core.choose(q_BLHK, k_BSGK, v_BSGK, context, dropout_key)
        return self.attend

    def attend(self, q_BLHK, k_BSGK, v_BSGK, context: Context) -> jax.Array:
        self.kept = KeyValues(reference.grouped(k_BSGK), reference.grouped(v_BSGK), context.keys.decay_BLH)
        return self.attend_with(q_BLHK, k_BSGK, v_BSGK, context)


class InputRecorder:
    """Takes the place of a canon layer, and keeps its input."""

    def __init__(self, canon: Canon):
        self.canon = canon

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        self.recent_BTD = x_BLD
        return self.canon(x_BLD, context)


def record(attention: MultiHeadAttention) -> None:
    """Replace parts of an attention layer, so that it records what `kept_of` returns: keys, values, inputs of canon."""
    attention.core = Recorder(attention.core)  # type: ignore[assignment]
    for number, change in enumerate(attention.on_input):
        if isinstance(change, Canon):
            attention.on_input[number] = InputRecorder(change)


class NewToken(NamedTuple):
    """One new token of each row.

    slots: {S: the coordinates of the tokens in S slots, the new one included}; layers differ in S.
    written: the tokens written before, padding on the left included; the slot of the new token is `written` % S.
    """

    coordinates: Coordinates
    slots: dict[int, Coordinates]
    written: jax.Array


class CachedCore:
    """Takes the place of an attention's core: one new token per row attends to the slots of the cache, and itself."""

    def __init__(self, core: Core, kept: KeyValues, token: NewToken):
        self.core, self.kept, self.token = core, kept, token

    def choose(self, q_B1HK, k_B1GK, v_B1GK, context: Context, dropout_key: None) -> Any:
        return self.attend

    def attend(self, q_B1HK, k_B1GK, v_B1GK, context: Context) -> jax.Array:
        """Write the new token's key and value to its slot, in place, and attend to all slots."""
        as_rows = lambda x_B1GK: x_B1GK.reshape(-1, 1, x_B1GK.shape[-1])
        pairs = zip(self.kept[:2], (k_B1GK, v_B1GK), strict=True)
        keys_XSK, values_XSK = (write(old, as_rows(x), self.token.written) for old, x in pairs)
        decay = self.kept.decay_BSH
        decay = None if decay is None else write(decay, context.keys.decay_BLH, self.token.written)
        self.kept = self.kept._replace(keys_XSK=keys_XSK, values_XSK=values_XSK, decay_BSH=decay)
        queries = self.token.coordinates._replace(decay_BLH=context.queries.decay_BLH)
        keys = self.token.slots[keys_XSK.shape[1]]._replace(decay_BLH=self.kept.decay_BSH)
        context = context._replace(queries=queries, keys=keys)
        return reference.attend(self.core, q_B1HK, keys_XSK, values_XSK, context)


class CachedSource:
    """Takes the place of the core of cross-attention, and attends to the kept keys and values of the source."""

    def __init__(self, core: Core, kept: KeyValues):
        self.core, self.kept = core, kept

    def choose(self, q_B1HK, k_BSGK, v_BSGK, context: Context, dropout_key: None) -> Any:
        return lambda q_B1HK, k_BSGK, v_BSGK, context: reference.attend(self.core, q_B1HK, *self.kept[:2], context)


class CachedCanon:
    """Takes the place of a canon layer: the convolution of the layer's last inputs."""

    def __init__(self, canon: Canon, recent_BTD: jax.Array, token: NewToken):
        self.canon, self.recent_BTD, self.token = canon, recent_BTD, token

    def __call__(self, x_B1D: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        self.recent_BTD = write(self.recent_BTD, x_B1D, self.token.written)
        ages_T = (self.token.written - jnp.arange(CANON_TAPS)) % CANON_TAPS  # of the slots; 0 is the new token's
        visible_BT = Mask(causal=True).visible(self.token.coordinates, self.token.slots[CANON_TAPS])[:, 0]
        weighted_BTD = visible_BT[..., None] * self.canon.taps[...][ages_T] * self.recent_BTD
        return x_B1D + weighted_BTD.sum(axis=1, keepdims=True).astype(x_B1D.dtype), context


class CachedFox:
    """Takes the place of forgetting attention's gates: adds the new token's log gates to the last token's sums."""

    def __init__(self, fox: Fox, decay_BSH: jax.Array, token: NewToken):
        self.fox = fox
        slot = (token.written - 1) % decay_BSH.shape[1]
        self.last_B1H = jax.lax.dynamic_slice_in_dim(decay_BSH, slot, 1, axis=1)

    def __call__(self, x_B1D: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        queries = context.queries._replace(decay_BLH=self.last_B1H + self.fox.log_gates(x_B1D))
        return x_B1D, context._replace(queries=queries, keys=queries)


class CachedScale:
    """Takes the place of SSMax's factor, which counts the keys that a query sees."""

    def __init__(self, scale: LengthScale, size: int, token: NewToken):
        self.scale, self.slots, self.queries = scale, token.slots[size], token.coordinates

    def __call__(self, q_B1HK, k_B1GK, context: Context) -> tuple[jax.Array, jax.Array]:
        return self.scale(q_B1HK, k_B1GK, context._replace(queries=self.queries, keys=self.slots))


def slot_count(attention: MultiHeadAttention, capacity: int) -> int:
    """Return the number of slots of a layer: its window, unless a part needs the keys in the order of the text."""
    needs_order = attention.core.stick_breaking or any(mod.needs_all_keys for mod in attention.core.score_mods)
    return capacity if needs_order else min(capacity, attention.mask.window or capacity)


def attach(attention: Any, kept: KeyValues, token: NewToken) -> None:
    """Let an attention layer read and extend its cache; `kept_of` returns the new one after the pass."""
    for number, change in enumerate(attention.on_input):
        if isinstance(change, Canon):
            attention.on_input[number] = CachedCanon(change, kept.recent_BTD, token)
        elif isinstance(change, Fox):
            attention.on_input[number] = CachedFox(change, kept.decay_BSH, token)
        else:
            raise NotImplementedError(
                f"{type(change).__name__}: needs a class that replaces it while tokens are decoded"
            )
    for number, change in enumerate(attention.on_heads):
        if isinstance(change, LengthScale):
            attention.on_heads[number] = CachedScale(change, kept.keys_XSK.shape[1], token)
    attention.core = CachedCore(attention.core, kept, token)


def kept_of(attention: Any) -> KeyValues:
    """Return, after a pass with `record` or `attach`, what the layer keeps for the next token."""
    canon = (change for change in attention.on_input if isinstance(change, InputRecorder | CachedCanon))
    recent_BTD = next((change.recent_BTD for change in canon), None)
    return attention.core.kept._replace(recent_BTD=recent_BTD)


def write(cache_XSK: jax.Array, new_X1K: Any, written: jax.Array) -> jax.Array:
    """Return the slots with the new value in slot `written` % S; XLA updates them in place."""
    start = (0, written % cache_XSK.shape[1]) + (0,) * (cache_XSK.ndim - 2)
    return jax.lax.dynamic_update_slice(cache_XSK, new_X1K, start)

"""The three kinds of modules that change attention. Positional encodings and variants of attention are such modules."""

from typing import Any

import jax
from flax import nnx

from mini_gpt.model.attention.context import Context


class InputChange(nnx.Module):
    """Changes the input of attention, or adds to the context: module(x_BLD, context) -> (x_BLD, context)."""

    stage = "input"

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        raise NotImplementedError


class HeadChange(nnx.Module):
    """Changes queries and keys: module(q_BLHK, k_BSGK, context) -> (q_BLHK, k_BSGK), in their dtype."""

    stage = "heads"

    def __call__(self, q_BLHK: jax.Array, k_BSGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError


class ScoreMod(nnx.Module):
    """Changes the logits before the mask: module(logits_BHLS, context) -> logits_BHLS, float32.

    Blockwise attention calls it with a block of the logits, and with the context of that block.

    needs_all_keys: None, or a name for a message: then the module needs all keys of a query at once, in the order of
      the text, and attention uses the reference implementation.
    """

    stage = "scores"
    needs_all_keys: str | None = None

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        raise NotImplementedError


class Shared(nnx.Module):
    """Stands in a layer for a part that the model holds and all layers share. key: in `Context.shared`."""

    needs_all_keys = None

    def __init__(self, key: str, stage: str):
        self.key, self.stage = key, stage

    def __call__(self, *arguments: Any) -> Any:
        *_, context = arguments
        return context.shared[self.key](*arguments)

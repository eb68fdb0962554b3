"""Edits of a pass: outputs of heads or sublayers, or the residual stream, are scaled or replaced at chosen places."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.runtime.errors import require

Array = jax.Array | np.ndarray


class Edit(NamedTuple):
    """A map x → scale · x + add of one activation in all layers, or in one.

    Both arrays have the axes that `Edits` says. All but the first may have size 1. Without `add`, x is only scaled.
    """

    scale: Array
    add: Array | None = None

    @classmethod
    def replace(cls, chosen: Array, values: Array) -> "Edit":
        """Return the edit that replaces an activation by `values` where `chosen` is True.

        chosen: bool, with the axes of `values` except the last.
        """
        is_chosen = jnp.asarray(chosen)[..., None]
        return cls(jnp.where(is_chosen, 0.0, 1.0), jnp.where(is_chosen, values, 0.0))


class Edits(NamedTuple):
    """The edits of a pass; None where an activation stays as it is. Axes B and L may have size 1.

    heads: the heads' outputs [N, B, L, H, K], as they are concatenated. attention, feed_forward: what a sublayer adds
    to the residual stream [N, B, L, D]. stream: the stream at the input of a block [N, B, L, D]. logits: of attention,
    before the mask [N, B, H, L, S]; attention then uses the reference implementation, and a KV cache is refused.
    Axis N of heads, attention and logits: `attention_layers`. Axis N of the others: the blocks of the encoder, then
    those of the decoder.
    """

    heads: Edit | None = None
    attention: Edit | None = None
    feed_forward: Edit | None = None
    stream: Edit | None = None
    logits: Edit | None = None


NONE = Edits()
OF_BLOCKS = {"feed_forward": None, "stream": None}  # not of cross-attention


def head_mask(mask_NBH: Array) -> Edits:
    """Return the edits that multiply the heads' outputs by factors; 0 prunes a head (Michel et al. 2019, eq. 2)."""
    return Edits(heads=Edit(mask_NBH[:, :, None, :, None]))


def after(first: Edit | None, edit: Edit) -> Edit:
    """Return the edit that does `first`, then `edit`."""
    if first is None:
        return edit
    scale = edit.scale * first.scale
    if first.add is None:
        return Edit(scale, edit.add)
    return Edit(scale, edit.scale * first.add + (0.0 if edit.add is None else edit.add))


def apply(edit: Edit | None, x: jax.Array) -> jax.Array:
    """Return the activation of one layer after its edit, in its own shape and dtype. Computed in float32."""
    if edit is None:
        return x
    edited = x.astype(jnp.float32) * edit.scale
    edited = edited if edit.add is None else edited + edit.add
    if edited.shape != x.shape:
        raise ValueError(f"an edit for the shape {edited.shape} can't be applied to {x.shape}")
    return edited.astype(x.dtype)


def attention_layers(config: ModelConfig) -> list[tuple[str, int]]:
    """Return (kind, layer) of each attention layer, in the order of axis N.

    Kinds: encoder, decoder and cross (attention of the decoder to the encoder); without an encoder, only decoder.
    """
    kinds = [("encoder", config.encoder_layers), ("decoder", config.num_layers)]
    kinds += [("cross", config.num_layers)] if config.encoder_layers else []
    return [(kind, layer) for kind, count in kinds for layer in range(count)]


def by_kind(config: ModelConfig, edits: Edits) -> tuple[Edits, Edits, Edits]:
    """Return the edits of the encoder, of the decoder, and of cross-attention.

    Raises UserError for another number of layers than the model has; JAX would silently clamp indices.
    """
    first, second = config.encoder_layers, config.encoder_layers + config.num_layers
    for name, edit in edits._asdict().items():
        count = second if name in ("feed_forward", "stream") else len(attention_layers(config))
        for array in jax.tree.leaves(edit):
            require(len(array) == count, f"edits.{name}", f"{len(array)} layers", f"needs {count}")
    if not config.encoder_layers:
        return NONE, edits, NONE
    part = lambda layers: jax.tree.map(lambda x: x[layers], edits)
    return part(slice(first)), part(slice(first, second)), part(slice(second, None))._replace(**OF_BLOCKS)

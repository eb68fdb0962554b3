"""Edits of a pass: outputs of heads or sublayers, or the residual stream, are scaled or replaced at chosen places.

The model knows nothing of edits: `Edits.apply_to` replaces modules by ones that wrap them and hold an edit's arrays.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model import running
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.model.attention.parts import ScoreMod
from mini_gpt.model.layers import observe
from mini_gpt.runtime.errors import require

Array = jax.Array | np.ndarray


class Edit(NamedTuple):
    """A map x → scale · x + add of one activation in all layers, or in one.

    Both arrays have the axes that `Edits` says. Without `add`, x is only scaled. NaN and infinity stay.
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

    heads: the heads' outputs [N, B, L, H, K], as they are concatenated.
    attention, feed_forward: what a sublayer adds to the residual stream [N, B, L, D].
    stream: the stream at the input of a block [N, B, L, D].
    logits: of attention, before the mask [N, B, H, L, S]; attention then uses the reference implementation, and a KV
      cache is refused. Axis N of heads, attention and logits: `attention_layers`. Axis N of the others: the blocks of
      the encoder, then those of the decoder.
    """

    heads: Edit | None = None
    attention: Edit | None = None
    feed_forward: Edit | None = None
    stream: Edit | None = None
    logits: Edit | None = None

    def apply_to(self, model: Any) -> Any:
        """Return the model with these edits; the model is changed. Its blocks become a list, and need attention.

        Raises UserError for another number of layers than the model has; JAX would silently clamp indices.
        """
        require(model.config.block == "attention", "model.block", model.config.block, "edits need attention")
        encoder, decoder, cross = by_kind(model.config, self)
        stacks = [(model, decoder)] + ([] if encoder == NO_EDITS else [(model.encoder, encoder)])
        for stack, stack_edits in stacks:
            running.unstack(stack)
            for layer, block in enumerate(stack.blocks):
                here = running.layer_of(stack_edits, layer)
                block.attention = _edited_attention(block.attention, here)
                if cross != NO_EDITS and stack is model:
                    block.cross_attention = _edited_attention(block.cross_attention, running.layer_of(cross, layer))
                if here.feed_forward is not None:
                    block.mlp = EditedOutput(block.mlp, here.feed_forward, "feed_forward")
                if here.stream is not None:
                    stack.blocks[layer] = EditedInput(block, here.stream, "stream")
        return model


NO_EDITS = Edits()
NOT_IN_CROSS = {"feed_forward": None, "stream": None}


def head_mask(mask_NBH: Array) -> Edits:
    """Return the edits that multiply the heads' outputs by factors; 0 prunes a head (Michel et al. 2019, eq. 2)."""
    return Edits(heads=Edit(mask_NBH[:, :, None, :, None]))


def compose(first: Edit | None, edit: Edit) -> Edit:
    """Return the edit that does `first`, then `edit`."""
    if first is None:
        return edit
    scale = edit.scale * first.scale
    if first.add is None:
        return Edit(scale, edit.add)
    return Edit(scale, edit.scale * first.add + (0.0 if edit.add is None else edit.add))


class EditedInput(nnx.Module):
    """Calls a module with an edited input. site: the name under which the input after the edit can be observed."""

    def __init__(self, inner: nnx.Module, edit: Edit, site: str):
        self.inner, self.edit, self.site = inner, nnx.data(edit), site

    def __call__(self, x: jax.Array, *arguments: object) -> jax.Array:
        observe(self, f"unedited_{self.site}", x)
        x = apply(self.edit, x)
        observe(self, f"edited_{self.site}", x)
        return self.inner(x, *arguments)  # type: ignore[operator]


class EditedOutput(nnx.Module):
    """Edits the output of a module. site: as in `EditedInput`."""

    def __init__(self, inner: nnx.Module, edit: Edit, site: str):
        self.inner, self.edit, self.site = inner, nnx.data(edit), site

    def __call__(self, x: jax.Array, *arguments: object) -> jax.Array:
        x = apply(self.edit, self.inner(x, *arguments))  # type: ignore[operator]
        observe(self, f"edited_{self.site}", x)
        return x


class EditedHeads(nnx.Module):
    """Calls the output projection of attention with edited outputs of the heads."""

    def __init__(self, inner: nnx.Module, edit: Edit, num_heads: int):
        self.inner, self.edit, self.num_heads = inner, nnx.data(edit), num_heads

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        heads_BLHK = apply(self.edit, x_BLD.reshape(*x_BLD.shape[:-1], self.num_heads, -1))
        observe(self, "edited_heads", heads_BLHK)
        return self.inner(heads_BLHK.reshape(x_BLD.shape))  # type: ignore[operator]


class EditedScores(ScoreMod):
    """Edits the logits of attention, as the last score mod."""

    def __init__(self, edit: Edit):
        self.edit = nnx.data(edit)

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        return apply(self.edit, logits_BHLS)


def _edited_attention(attention: MultiHeadAttention, edits: Edits) -> nnx.Module:
    """Return attention with the edits of one layer."""
    if edits.heads is not None:
        attention.out = EditedHeads(attention.out, edits.heads, attention.num_heads)  # type: ignore[assignment]
    if edits.logits is not None:
        attention.core.score_mods.append(EditedScores(edits.logits))
        attention.core.implementation = "reference"
    return attention if edits.attention is None else EditedOutput(attention, edits.attention, "attention")


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
    kinds += [("cross", config.num_layers)] if config.has_encoder else []
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
    if not config.has_encoder:
        return NO_EDITS, edits, NO_EDITS
    part = lambda layers: jax.tree.map(lambda x: x[layers], edits)
    return part(slice(first)), part(slice(first, second)), part(slice(second, None))._replace(**NOT_IN_CROSS)

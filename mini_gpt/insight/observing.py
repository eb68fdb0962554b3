"""The activations of each layer in a pass, see `evaluation.activations`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from mini_gpt.evaluation import activations
from mini_gpt.model.attention.context import MASKING_BIAS


class AttentionMaps(NamedTuple):
    """One layer's logits before the mask, and its weights after the softmax and before dropout; float32.

    The logits include soft cap and bias. With a sink, the weights of a query add up to less than 1. With
    stick-breaking, the weights are not the softmax of the logits.
    """

    logits_BHLS: jax.Array
    weights_BHLS: jax.Array
    visible_BLS: jax.Array

    @property
    def seen_BHLS(self) -> jax.Array:
        """Whether a head's query sees a key, also after a bias that hides keys from some heads."""
        return self.visible_BLS[:, None] & (self.logits_BHLS > MASKING_BIAS / 10)


class Layer(NamedTuple):
    """The activations of a block, after their edits: the residual stream before and after it, and what changed it.

    attention: the maps of self-attention.
    units_BLF: the feed-forward's activations.
    heads_BLHK: the heads' outputs, as they are concatenated.
    attention_BLD, feed_forward_BLD: what the sublayers add.
    cross_attention: the maps of cross-attention, or None.
    places_BLG: the positions that the layer computes from the tokens, for each key-value head, or None.
    """

    attention: AttentionMaps
    before_BLD: jax.Array
    after_BLD: jax.Array
    units_BLF: jax.Array
    heads_BLHK: jax.Array
    attention_BLD: jax.Array
    feed_forward_BLD: jax.Array
    cross_attention: AttentionMaps | None = None
    places_BLG: jax.Array | None = None


def observed(model: Any, call: Callable[[Any], jax.Array]) -> tuple[jax.Array, list[Layer], list[Layer]]:
    """Return call(model) and the activations of its layers: of the decoder, and of the encoder if there is one.

    Takes the arguments of `activations.captured`, and raises its errors.
    """
    result, tree = activations.captured(model, call)
    decoder, encoder = (map(_layer, activations.blocks(stack)) for stack in (tree, tree.get("encoder", {})))
    return result, list(decoder), list(encoder)


def layers(model: Any, inputs: tuple) -> list[Layer]:
    """Return the activations of the decoder's layers. inputs: the arguments of `hidden`. See `observed`."""
    return observed(model, lambda module: module.hidden(*inputs))[1]


def _layer(sites: Mapping[str, jax.Array]) -> Layer:
    return Layer(
        attention=_maps(sites, ""),
        before_BLD=sites["stream"],
        after_BLD=sites["after"],
        units_BLF=sites["units"],
        heads_BLHK=sites["heads"],
        attention_BLD=sites["attention"],
        feed_forward_BLD=sites["feed_forward"],
        cross_attention=_maps(sites, "cross_") if "cross_logits" in sites else None,
        places_BLG=sites.get("places"),
    )


def _maps(sites: Mapping[str, jax.Array], prefix: str) -> AttentionMaps:
    return AttentionMaps(*(sites[f"{prefix}{name}"] for name in ("logits", "weights", "visible")))

"""The activations of each layer in a pass, by Flax's `nnx.capture`. The model itself only names them, see `observe`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from mini_gpt.model import running
from mini_gpt.model.attention.context import MASKING_BIAS
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.runtime.errors import require


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
    """

    attention: AttentionMaps
    before_BLD: jax.Array
    after_BLD: jax.Array
    units_BLF: jax.Array
    heads_BLHK: jax.Array
    attention_BLD: jax.Array
    feed_forward_BLD: jax.Array
    cross_attention: AttentionMaps | None = None


def observed(model: Any, call: Callable[[Any], jax.Array]) -> tuple[jax.Array, list[Layer], list[Layer]]:
    """Return call(model) and the activations of its layers: of the decoder, and of the encoder if there is one.

    model: a module such as `LoadedModel.edited` returns; it is changed: its blocks become a list, and attention uses
      the reference implementation, which has all weights.
    call: runs `model.hidden` or `model.encode`.

    Raises UserError for a model without attention.
    """
    require(model.config.block == "attention", "model.block", model.config.block, "needs attention to look inside")
    stacks = [model, *([model.encoder] if hasattr(model, "encoder") else [])]
    for stack in stacks:
        running.unstack(stack)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MultiHeadAttention):
            module.core.implementation = "reference"
    result, state = nnx.capture(call, nnx.Intermediate)(model)
    seen = nnx.to_pure_dict(state)
    return result, _layers(seen), _layers(seen.get("encoder", {}))


def layers(model: Any, inputs: tuple) -> list[Layer]:
    """Return the activations of the decoder's layers. inputs: the arguments of `hidden`. See `observed`."""
    return observed(model, lambda module: module.hidden(*inputs))[1]


def _layers(seen: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a stack, or an empty list if it did not run."""
    blocks = [dict(_sites(block)) for _, block in sorted(seen.get("blocks", {}).items())]
    streams = [block.get("unedited_stream", block["stream"]) for block in blocks[1:]] + list(seen.get("stream", ()))
    return [_layer(block, after) for block, after in zip(blocks, streams, strict=True)]


def _layer(sites: Mapping[str, Any], after_BLD: Any) -> Layer:
    edited = {name: sites.get(f"edited_{name}", sites[name]) for name in ("heads", "attention", "feed_forward")}
    return Layer(
        attention=_maps(sites, ""),
        before_BLD=sites["stream"],
        after_BLD=after_BLD,
        units_BLF=sites["units"],
        heads_BLHK=edited["heads"],
        attention_BLD=edited["attention"],
        feed_forward_BLD=edited["feed_forward"],
        cross_attention=_maps(sites, "cross_") if "cross_logits" in sites else None,
    )


def _maps(sites: Mapping[str, Any], prefix: str) -> AttentionMaps:
    return AttentionMaps(*(sites[f"{prefix}{name}"] for name in ("logits", "weights", "visible")))


def _sites(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, jax.Array]]:
    """Yield (name, array) of all activations in a block. Names in cross-attention start with cross_."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _sites(value, "cross_" if name == "cross_attention" else prefix)
        else:
            yield f"{prefix}{name}", (value[-1] if isinstance(value, tuple) else value)

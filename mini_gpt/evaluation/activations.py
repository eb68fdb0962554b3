"""The activations of a pass by name, by Flax's `nnx.capture`. The model itself only names them, see `observe`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from mini_gpt.model import running
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.runtime.errors import require

Sites = dict[str, jax.Array]


def captured(model: Any, call: Callable[[Any], jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    """Return call(model), and the activations as a tree with the paths of the modules.

    model: a module such as `LoadedModel.edited` returns; it is changed: its blocks become a list, and attention uses
      the reference implementation, which has all weights.
    call: runs `model.hidden` or `model.encode`.

    Raises UserError for a model without attention.
    """
    require(model.config.block == "attention", "model.block", model.config.block, "needs attention to look inside")
    for stack in (model, *([model.encoder] if hasattr(model, "encoder") else [])):
        running.unstack(stack)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MultiHeadAttention):
            module.core.implementation = "reference"
    result, state = nnx.capture(call, nnx.Intermediate)(model)
    return result, nnx.to_pure_dict(state)


def blocks(tree: Mapping[str, Any]) -> list[Sites]:
    """Return {name: activation} of each block of a stack, after their edits; [] if the stack did not run.

    `stream` is the residual stream before the block, `after` that after it, before an edit of the next block's stream.
    """
    found = [dict(_sites(block)) for _, block in sorted(tree.get("blocks", {}).items())]
    streams = [block.get("unedited_stream", block["stream"]) for block in found[1:]] + list(tree.get("stream", ()))
    for block, after_BLD in zip(found, streams, strict=True):
        block.pop("unedited_stream", None)
        for name in [name for name in block if "edited_" in name]:
            block[name.replace("edited_", "")] = block.pop(name)
        block["after"] = after_BLD
    return found


def _sites(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, jax.Array]]:
    """Yield (name, array) of all activations in a block. Names in cross-attention start with cross_."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _sites(value, "cross_" if name == "cross_attention" else prefix)
        else:
            yield f"{prefix}{name}", (value[-1] if isinstance(value, tuple) else value)

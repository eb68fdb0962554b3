"""The activations of a pass by name, by Flax's `nnx.capture`. The model itself only names them, see `observe`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mini_gpt.model import running
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError, require

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


def of(model: Any, text: str | np.ndarray | jax.Array, source_BS: np.ndarray | jax.Array | None) -> Sites:
    """Return what `LoadedModel.cache` returns. model: a LoadedModel, whose file imports this one."""
    if isinstance(text, str):
        if model.tokenizer is None:
            raise UserError("text: found a text, but this model has no tokenizer; give token ids [B, L]")
        text = model.tokenizer.encode_prompt(text)[None]
    inputs_BL, *source = model.put(tokens_BL=text, **({} if source_BS is None else {"source_BS": source_BS}))
    return {name: x[: len(text)] for name, x in _named(model, inputs_BL, None, None, *source).items()}


@jax.jit
def _named(model: Any, inputs_BL: jax.Array, *more: jax.Array | None) -> Sites:
    """Return {name: activation}, replicated over the mesh. Takes the arguments of `LoadedModel.hidden`."""
    inputs = model.with_layout(inputs_BL, *more)
    hidden_BLD, tree = captured(model.edited(), lambda module: module.hidden(*inputs))
    found: dict[str, Any] = {"tokens": inputs[0]}
    for prefix, stack in {"encoder.": tree.get("encoder", {}), "": tree}.items():
        found |= {f"{prefix}token_embedding": value[-1] for name, value in stack.items() if name == "token_embedding"}
        for layer, block in enumerate(blocks(stack)):
            found |= {f"{prefix}blocks.{layer}.{name}": value for name, value in block.items()}
    found["hidden"] = hidden_BLD
    if model.config.model.prediction_head is not None:
        found["logits"] = model.merge().logits(hidden_BLD)
    return {name: sharding.replicate(x, model.mesh) for name, x in found.items()}


def _sites(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, jax.Array]]:
    """Yield (name, array) of all activations in a block. Names in cross-attention start with cross_."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _sites(value, "cross_" if name == "cross_attention" else prefix)
        else:
            yield f"{prefix}{name}", (value[-1] if isinstance(value, tuple) else value)

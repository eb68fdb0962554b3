"""All activations of a pass in one table, for `LoadedModel.cache`."""

from typing import Any

import jax
import numpy as np

from mini_gpt.evaluation import activations
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError


def cache(
    model: Any, text: str | np.ndarray | jax.Array, source_BS: np.ndarray | jax.Array | None
) -> dict[str, jax.Array]:
    """Return what `LoadedModel.cache` returns. model: a LoadedModel, whose file imports this one."""
    if isinstance(text, str):
        if model.tokenizer is None:
            raise UserError("text: found a text, but this model has no tokenizer; give token ids [B, L]")
        text = model.tokenizer.encode_prompt(text)[None]
    inputs_BL, *source = model.put(tokens_BL=text, **({} if source_BS is None else {"source_BS": source_BS}))
    return {name: x[: len(text)] for name, x in _named(model, inputs_BL, None, None, *source).items()}


@jax.jit
def _named(model: Any, inputs_BL: jax.Array, *more: jax.Array | None) -> dict[str, jax.Array]:
    """Return {name: activation}, replicated over the mesh. Takes the arguments of `LoadedModel.hidden`."""
    inputs = model.with_layout(inputs_BL, *more)
    hidden_BLD, tree = activations.captured(model.edited(), lambda module: module.hidden(*inputs))
    found: dict[str, Any] = {"tokens": inputs[0]}
    for prefix, stack in {"encoder.": tree.get("encoder", {}), "": tree}.items():
        found |= {f"{prefix}token_embedding": value[-1] for name, value in stack.items() if name == "token_embedding"}
        for layer, block in enumerate(activations.blocks(stack)):
            found |= {f"{prefix}blocks.{layer}.{name}": value for name, value in block.items()}
    found["hidden"] = hidden_BLD
    if model.config.model.prediction_head is not None:
        found["logits"] = model.merge().logits(hidden_BLD)
    return {name: sharding.replicate(x, model.mesh) for name, x in found.items()}

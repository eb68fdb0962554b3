"""Models whose layers keep some of their heads: the smaller model of a whole one, and the whole one back."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.config import loading
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.curves import Curve, finish, new_figure, plot_curve
from mini_gpt.model import editing
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.training import train_state

Heads = Sequence[Sequence[int]]  # the numbers of the heads of each layer, in order
Unit = tuple[int, tuple[int, ...]]  # (layer, heads) that are removed together


def parse(flag: str, text: str, heads: Heads) -> tuple[int, int]:
    """Return the layer and the head of a flag. Raises UserError for a head that the run does not have."""
    match = re.fullmatch(r"(\d{1,8})\.(\d{1,8})", text.strip(), re.ASCII)
    if match is None:
        raise UserError(f"{flag}: found {text!r}; must be LAYER.HEAD, such as 2.1")
    layer, head = int(match[1]), int(match[2])
    remedy = f"the run has layers 0..{len(heads) - 1}"
    if layer < len(heads):
        remedy = f"layer {layer} has the heads {', '.join(map(str, heads[layer]))}"
    require(layer < len(heads) and head in heads[layer], flag, text, remedy)
    return layer, head


def smaller(model: LoadedModel, heads: Heads) -> LoadedModel:
    """Return the model with these heads only: all arrays of the others are cut away.

    Its logits are those of `model` with the outputs of the other heads at zero, `editing.head_mask`. model: has all
    heads, see `whole`. Raises UserError if the config does not allow these heads.
    """
    fields = {"model.heads": tuple(map(tuple, heads)), "model.scan_layers": False}
    return _converted(model, fields, lambda values, shape, at: values if at is None else np.take(values, at[1], at[0]))


def whole(model: LoadedModel) -> LoadedModel:
    """Return the same function with all heads: those that were removed have zeros as parameters, and so as outputs.

    Tools that compare heads read it, because its layers have equally many.
    """
    if model.config.model.heads is None:
        return model

    def filled(values: np.ndarray, shape: tuple[int, ...], at: Any) -> np.ndarray:
        if at is None:
            return values
        result = np.zeros(shape, values.dtype)
        result[(slice(None),) * at[0] + (at[1],)] = values
        return result

    return _converted(model, {"model.heads": None}, filled)


def existing(config: ModelConfig) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads of a model, in order. layer: an index of `editing.attention_layers`."""
    kept = config.heads or [range(config.num_heads)] * len(editing.attention_layers(config))
    return [(layer, head) for layer, of_layer in enumerate(kept) for head in of_layer]


def _converted(model: LoadedModel, fields: dict[str, Any], convert: Any) -> LoadedModel:
    """Return the model with other fields. convert: (values, their new shape, `_at`) -> the new values."""
    config, size = loading.override(model.config, fields), len(model.parameters["embedding"])
    definition, target = train_state.abstract_parameters(config, size, model.mesh)
    old = model_parameters.by_name(model_parameters.with_layers(model.parameters, stacked=False))
    pruned = config.model if config.model.heads else model.config.model

    def new(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = model_parameters.path_name(path)
        values = jax.device_get(old[name])
        return jax.device_put(convert(values, leaf.shape, _at(pruned, name, values.shape, leaf.shape)), leaf.sharding)

    parameters = jax.tree_util.tree_map_with_path(new, target)
    return dataclasses.replace(model, parameters=parameters, definition=definition, config=config)


def _at(pruned: ModelConfig, name: str, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, np.ndarray] | None:
    """Return the axis in which two shapes of a parameter differ, and the entries of the kept heads there, or None.

    pruned: the config of the model with fewer heads.
    """
    if one == other:
        return None
    axis = next(axis for axis, sizes in enumerate(zip(one, other, strict=True)) if sizes[0] != sizes[1])
    found = re.match(r"blocks/(\d+)/attention/(key|value)?", name)
    assert found and pruned.heads is not None, name
    kept, count = pruned.heads[int(found[1])], pruned.num_heads
    if found[2]:  # of key-value heads
        kept = tuple(sorted({head * pruned.num_kv_heads // count for head in kept}))
        count = pruned.num_kv_heads
    width = max(one[axis], other[axis]) // count
    return axis, (np.asarray(kept)[:, None] * width + np.arange(width)).ravel()


def without(heads: Heads, removed: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Return the heads of each layer without some (layer, head)."""
    return [tuple(head for head in kept if (layer, head) not in removed) for layer, kept in enumerate(heads)]


def units(config: ModelConfig) -> list[Unit]:
    """Return the parts that can be removed alone: heads, or groups of heads that share keys, if there are several."""
    size = config.num_heads // config.num_kv_heads if config.num_kv_heads > 1 else 1
    found = []
    for layer, kept in enumerate(config.head_numbers):
        groups = sorted({head // size for head in kept})
        found += [(layer, tuple(head for head in kept if head // size == group)) for group in groups]
    return found


def removal_order(config: ModelConfig, importance_NH: np.ndarray) -> list[Unit]:
    """Return `units` from the least important one on, by the sum of their heads. The best of each layer is left out."""
    order = sorted(units(config), key=lambda unit: float(importance_NH[unit[0], list(unit[1])].sum()))
    best = {layer: (layer, heads) for layer, heads in order}  # the last of each layer
    return [unit for unit in order if best[unit[0]] != unit]


def mask(config: ModelConfig, heads: Heads) -> np.ndarray:
    """Return mask_NH: 1 for these heads, else 0; float32."""
    mask_NH = np.zeros((config.num_layers, config.num_heads), np.float32)
    for layer, kept in enumerate(heads):
        mask_NH[layer, list(kept)] = 1
    return mask_NH


def figure(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Return a plot of the loss against the number of kept heads. rows: with "heads" and "nll"."""
    drawn, axes = new_figure((6, 4), title=title)
    plot_curve(axes, Curve("", [row["heads"] for row in rows], [row["nll"] for row in rows]), "C0")
    finish(axes, xlabel="heads kept", ylabel="loss (nats per token)", title="Loss after removal, without retraining")
    axes.invert_xaxis()
    return drawn

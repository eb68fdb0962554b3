"""Apply the playground's edits to a loaded model. engine/edits.js says what they mean, view/edits.js checks them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import DictKey

from mini_gpt.config.attention import RopeConfig
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import build
from mini_gpt.model.attention.context import MASKING_BIAS, Coordinates, Mask
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.model.parameters import with_layers
from mini_gpt.model.positions.biases import Alibi, alibi_slopes
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.model.positions.waves import geometric_frequencies
from mini_gpt.pages.play import limits

NO_WINDOW = 2**24  # keys; more than any text has, and exact in float32
# {encoding: its attributes that edits change}
CONSTANTS = {
    "rope": ("frequencies", "temperature", "factor"),
    "pope": ("frequencies",),
    "alibi": ("slopes",),
}

JsonEdits = Mapping[str, Any]


def head_of(name: str) -> tuple[int, int]:
    """Return layer and head of a name such as "1.2"."""
    layer, head = name.split(".")
    return int(layer), int(head)


def heads_that_are(how: str, edits: JsonEdits) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that are "off" or at their "mean"."""
    return [head_of(name) for name, value in edits.get("heads", {}).items() if value == how]


class EditedMask(nnx.Module):
    """Takes the place of a layer's mask. The window is an array, so that JAX compiles no other program for it."""

    def __init__(self, causal: bool):
        self.causal, self.window = causal, nnx.Param(np.float32(0))

    def visible(self, queries: Coordinates, keys: Coordinates) -> jax.Array:
        return Mask(self.causal, self.window[...]).visible(queries, keys)  # type: ignore[arg-type]

    def visible_counts(self, tokens: Coordinates) -> jax.Array:
        return Mask(self.causal, self.window[...]).visible_counts(tokens)  # type: ignore[arg-type]


def with_fields(model: LoadedModel, edits: JsonEdits) -> LoadedModel:
    """Return the model with the edits that are fields of a config or constants of its modules; in float32.

    These are: scale, window, rope, slopes, a mask that is not causal, and for sinks the temperature. Numbers that are
    edited become parameters, so that JAX compiles no other program for another number.
    """
    config, vocabulary = model.config.model, len(model.parameters["embedding"])
    unscaled: dict[str, Any] = {"scale_attention": False} if edits.get("scale") == "off" else {}
    changed = dataclasses.replace(config, dtype="float32", scan_layers=False, remat="none", **unscaled)
    dynamic = tuple(rope.scaling == "dynamic" for rope in _ropes(config, edits))
    is_causal = edits.get("mask", "causal") == "causal"
    definition, places = _definition(changed, vocabulary, is_causal, "window" in edits, dynamic)

    def cooled(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf / edits.get("temperature", 1) if path[-1] == DictKey("sink") else leaf

    parameters = jax.tree_util.tree_map_with_path(cooled, with_layers(model.parameters, stacked=False))
    for path, name in places.items():
        layer = path[1] if path[0] == "blocks" else 0
        _put(parameters, path, _numbers(name, config, edits, layer))
    new_config = dataclasses.replace(model.config, model=changed)
    return dataclasses.replace(model, parameters=parameters, definition=definition, config=new_config)


def _numbers(name: str, config: ModelConfig, edits: JsonEdits, layer: int) -> dict[str, Any]:
    """Return the edited numbers of an encoding or a mask, float32, under the names of `CONSTANTS`."""
    found: dict[str, Any] = {}
    if name == "mask":
        found["window"] = NO_WINDOW if edits["window"] is None else min(edits["window"], NO_WINDOW)
    elif name == "rope":
        rope = Rope(dataclasses.replace(config, rope=_ropes(config, edits)[layer]), rngs=nnx.Rngs(0))
        found = {constant: getattr(rope, constant) for constant in CONSTANTS["rope"]}
    elif name == "pope":
        base = float(edits.get("rope", {}).get("base", config.rope.base))
        found["frequencies"] = geometric_frequencies(base, 2 * config.head_width)
    else:
        own = alibi_slopes(config.num_heads, config.alibi_exponent)
        found["slopes"] = edits.get("slopes", 1) * np.array(own)
    return {constant: np.asarray(value, np.float32) for constant, value in found.items()}


@functools.lru_cache(maxsize=64)
def _definition(
    config: ModelConfig, vocabulary: int, is_causal: bool, has_window: bool, dynamic: tuple[bool, ...]
) -> tuple[nnx.GraphDef, dict[tuple, str]]:
    """Return the definition of a model whose `CONSTANTS` are parameters, and {path: name} of the modules with them.

    dynamic: whether RoPE has this scaling, for each layer.
    """
    module = nnx.eval_shape(lambda: build.make(config, vocabulary, rngs=nnx.Rngs(0)))
    places: dict[tuple, str] = {}
    for layer, block in enumerate(module.blocks):
        attention, here = block.attention, ("blocks", layer, "attention")
        if has_window:
            attention.mask, places[*here, "mask"] = nnx.data(EditedMask(is_causal)), "mask"
        else:
            attention.mask = attention.mask._replace(causal=is_causal)  # canon stays causal, as in the engine
        for number, part in enumerate(attention.on_heads):
            if isinstance(part, Rope):  # yarn multiplies by `temperature`, which is 1 for the other scalings
                part.config = dataclasses.replace(part.config, scaling="dynamic" if dynamic[layer] else "yarn")
                places[*here, "on_heads", number] = part.name
        for number, part in enumerate(attention.core.score_mods):
            if isinstance(part, Alibi):
                places[*here, "core", "score_mods", number] = part.name
    if "pope" in module.positions:
        places["positions", "pope"] = "pope"
    for path, name in places.items():
        at: Any = module
        for key in path:
            at = at[key] if isinstance(key, int) or key == "pope" else getattr(at, key)
        for constant in CONSTANTS.get(name, ()):
            setattr(at, constant, nnx.data(nnx.Param(np.float32(0))))
    return build.split(module)[0], places


def _put(parameters: dict, path: tuple, values: dict[str, Any]) -> None:
    """Add values at a path. The dicts on the path are replaced by copies."""
    for key in path:
        parameters[key] = dict(parameters.get(key, {}))
        parameters = parameters[key]
    parameters.update(values)


def _ropes(config: ModelConfig, edits: JsonEdits) -> list[RopeConfig]:
    """Return RoPE's fields with the edits, for each layer.

    Another scaling has fields of its own; a factor of 1 is no scaling, unless it is dynamic.
    """
    rope, edited = config.rope, edits.get("rope", {})
    scaling = edited.get("scaling", rope.scaling)
    fields: dict[str, Any] = {} if scaling == rope.scaling else {"scaling": scaling, **limits.SCALINGS[scaling]}
    changed = dataclasses.replace(rope, **fields)
    return [
        changed.of_layer(float(edited.get("base", kind.rope_base)), float(edited.get("factor", kind.rope_factor)))
        for kind in config.layer_kinds
    ]


def static_edits(edits: JsonEdits, config: ModelConfig, length: int) -> Edits:
    """Return the edits of activations that do not depend on other passes: what is off, temperature, and the mask.

    length: of the padded text.
    """
    heads = np.ones((config.num_layers, 1, 1, config.num_heads, 1), np.float32)
    for layer, head in heads_that_are("off", edits):
        heads[layer, ..., head, :] = 0
    scale = np.full((config.num_layers, 1, 1, 1, 1), 1 / edits.get("temperature", 1), np.float32)
    hidden = None
    if edits.get("mask") == "shifted":
        later_LS = np.arange(length) > np.arange(length)[:, None] + 1
        hidden = np.where(later_LS, MASKING_BIAS, 0).astype(np.float32)
        hidden = np.broadcast_to(hidden, (config.num_layers, 1, 1, length, length))
    attention, feed_forward = (
        _factors([*edits.get("layers", []), *edits.get(name, [])], config) for name in ("attentions", "feedForwards")
    )
    return Edits(Edit(heads), attention, feed_forward, logits=Edit(scale, hidden))


def _factors(off: list[int], config: ModelConfig) -> Edit:
    factor_N = np.ones(config.num_layers, np.float32)
    factor_N[off] = 0
    return Edit(factor_N[:, None, None, None])


def allow_cache(edits: JsonEdits, config: ModelConfig) -> bool:
    """Return whether a KV cache holds with these edits: new tokens change no earlier place, and each layer can decode.

    It also has positions from 0 only, and the windows of the config.
    """
    changed = {name for name in ("temperature", "window", "start", "patch") if name in edits}
    changed |= {"mask"} if edits.get("mask", "causal") != "causal" else set()
    is_dynamic = "rope" in config.position_pattern and any(rope.scaling == "dynamic" for rope in _ropes(config, edits))
    is_whole = config.variants.selective or config.random_positions is not None or is_dynamic
    return not (changed or is_whole or heads_that_are("mean", edits))

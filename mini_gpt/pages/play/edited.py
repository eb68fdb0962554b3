"""Apply the playground's edits to a loaded model. The edits are those of edits.js."""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import DictKey

from mini_gpt.config.attention import RopeConfig, pattern
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import gpt
from mini_gpt.model.attention.inputs import HIDDEN_FROM_HEAD
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.positions.biases import alibi_slopes
from mini_gpt.runtime.errors import UserError, shown

SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "yarn_by_index", "llama3")
MOST_START = 2**24
TEMPERATURES = (1e-3, 1e6)
MOST_BASE, MOST_FACTOR, MOST_SLOPE = 1e12, 1e6, 1e12

JsonEdits = Mapping[str, Any]


def is_count(value: Any, end: int) -> bool:
    """Return whether a value of JSON is an integer from 0 to end - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value of JSON is a number from least to most."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def check(edits: JsonEdits, config: ModelConfig) -> None:
    """Raise UserError if the model can't be edited in this way."""
    are_layers = lambda value: isinstance(value, list) and all(is_count(layer, config.num_layers) for layer in value)
    is_slope = lambda value: is_number(value, -MOST_SLOPE, MOST_SLOPE)
    possible: dict[str, Callable[[Any], bool]] = {
        "heads": lambda value: (
            isinstance(value, dict)
            and all(head_of(name, config) is not None and how in ("off", "mean") for name, how in value.items())
        ),
        "layers": are_layers,
        "attentions": are_layers,
        "feedForwards": are_layers,
        "scale": lambda value: value == "off",
        "mask": lambda value: value in ("none", "shifted", "causal"),
        "temperature": lambda value: is_number(value, *TEMPERATURES),
        "window": lambda value: value is None or (is_count(value, 2**31) and value > 0),
        "start": lambda value: is_count(value, MOST_START),
        "rope": lambda value: (
            isinstance(value, dict)
            and set(value) <= {"base", "scaling", "factor"}
            and is_number(value.get("base", 2), 1, MOST_BASE)
            and value.get("base", 2) > 1
            and is_number(value.get("factor", 1), 1, MOST_FACTOR)
            and value.get("scaling", "none") in SCALINGS
        ),
        "slopes": lambda value: (
            is_slope(value)
            or (isinstance(value, list) and len(value) == config.num_heads and all(map(is_slope, value)))
        ),
        "patch": lambda value: _is_patch(value, config),
    }
    for name, value in edits.items():
        if name not in possible:
            raise UserError(f"There is no edit {shown(name)}.")
        if not possible[name](value):
            raise UserError(f"The edit {name} can't have the value {shown(value)}.")
    rotated = config.rotated_width
    if (edits.get("rope") or {}).get("scaling") in ("ntk", "dynamic") and rotated <= 2:
        raise UserError("These scalings of RoPE need more than one pair of rotated dimensions.")
    if edits.get("mask", "causal") != "causal":
        ordered: list[str] = [name for name in ("fox", "cope") if name in config.position_pattern]
        ordered += ["selective attention"] if config.variants.selective else []
        ordered += ["stick-breaking"] if config.variants.normaliser == "stick_breaking" else []
        if ordered:
            raise UserError(f"The mask can't be changed: {ordered[0]} is only defined with a causal mask.")
    if edits.get("mask") == "shifted" and config.variants.query_scale == "ssmax":
        raise UserError("The mask can't be shifted: ssmax counts the keys that a query sees.")


def _is_patch(value: Any, config: ModelConfig) -> bool:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("tokens"), list)
        or set(value) - {"tokens", "heads", "places"}
    ):
        return False
    places, heads = value.get("places", "all"), value.get("heads")
    are_places = places == "all" or (
        isinstance(places, list) and all(is_count(place, len(value["tokens"])) for place in places)
    )
    return are_places and isinstance(heads, list) and all(head_of(name, config) is not None for name in heads)


def head_of(name: Any, config: ModelConfig) -> tuple[int, int] | None:
    """Return (layer, head) of a name such as "1.2", or None if there is no such head."""
    found = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", name) if isinstance(name, str) else None
    layer, head = map(int, found.groups()) if found else (config.num_layers, 0)
    return (layer, head) if layer < config.num_layers and head < config.num_heads else None


def with_fields(model: LoadedModel, edits: JsonEdits) -> LoadedModel:
    """Return the model with the edits that are fields of a config or constants of its modules; in float32.

    These are: scale, window, rope, slopes, a mask that is not causal, and for sinks the temperature.
    """
    config = model.config.model
    changes: dict[str, Any] = {"dtype": "float32"}
    changes |= {"scale_attention": False} if edits.get("scale") == "off" else {}
    changes |= {"attention_window": edits["window"]} if "window" in edits else {}
    changes |= {"rope": _rope(config, edits["rope"])} if "rope" in edits else {}
    changed = dataclasses.replace(config, **changes)
    vocabulary = len(model.parameters["embedding"])
    module = nnx.eval_shape(lambda: gpt.MiniGPT(changed, vocabulary, rngs=nnx.Rngs(0)))
    if edits.get("mask", "causal") != "causal":
        module.config = copy.copy(changed)  # of the mask only, not of T5's buckets
        object.__setattr__(module.config, "causal", False)  # without the check: canon stays causal, as in the engine
    if "slopes" in edits and "alibi" in module.positions:
        slopes, own = edits["slopes"], alibi_slopes(config.num_heads)
        alibi: Any = module.positions["alibi"]
        alibi.slopes = tuple(slopes) if isinstance(slopes, list) else tuple(slopes * slope for slope in own)
    definition, _ = gpt.split(module)
    new_config = dataclasses.replace(model.config, model=changed)
    cooled = lambda path, leaf: leaf / edits.get("temperature", 1) if path[-1] == DictKey("sink") else leaf
    parameters = jax.tree_util.tree_map_with_path(cooled, model.parameters)
    return dataclasses.replace(model, parameters=parameters, definition=definition, config=new_config)


def _rope(config: ModelConfig, edits: Mapping[str, Any]) -> RopeConfig:
    """Return RoPE's fields with the edits. Another scaling has its own default bounds; a factor of 1 is no scaling."""
    rope, numbers = config.rope, {name: float(edits[name]) for name in ("base", "factor") if name in edits}
    if "rope" not in config.position_pattern:  # PoPE has no scaling
        return dataclasses.replace(rope, base=numbers.get("base", rope.base))
    scaling = edits.get("scaling", rope.scaling)
    bounds: dict[str, Any] = {"beta_slow": 1.0, "beta_fast": 4.0 if scaling == "llama3" else 32.0}
    changes: dict[str, Any] = numbers | ({} if scaling == rope.scaling else bounds)
    is_scaled = max(pattern(numbers.get("factor", rope.factor))) > 1
    return dataclasses.replace(rope, scaling=scaling if is_scaled else "none", **changes)


def static_edits(edits: JsonEdits, config: ModelConfig, length: int) -> Edits:
    """Return the edits of activations that do not depend on other passes: what is off, temperature, and the mask.

    length: of the padded text.
    """
    layers = range(config.num_layers)
    off = lambda name: [layer in edits.get("layers", []) or layer in edits.get(name, []) for layer in layers]
    factors = lambda is_off: Edit(np.where(is_off, 0, 1).astype(np.float32)[:, None, None, None])
    scale = np.full((config.num_layers, 1, 1, 1, 1), 1 / edits.get("temperature", 1), np.float32)
    hidden = None
    if edits.get("mask") == "shifted":
        later_LS = np.arange(length) > np.arange(length)[:, None] + 1
        hidden = np.where(later_LS, HIDDEN_FROM_HEAD, 0).astype(np.float32)
        hidden = np.broadcast_to(hidden, (config.num_layers, 1, 1, length, length))
    return Edits(
        attention=factors(off("attentions")), feed_forward=factors(off("feedForwards")), logits=Edit(scale, hidden)
    )

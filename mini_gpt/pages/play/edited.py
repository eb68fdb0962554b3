"""Apply the playground's edits to a loaded model. The edits are those of edits.js."""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import DictKey

from mini_gpt.config.attention import RopeConfig
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import build, positions
from mini_gpt.model.attention.inputs import HIDDEN_FROM_HEAD
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.positions.biases import alibi_slopes
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.model.positions.waves import geometric_frequencies
from mini_gpt.pages.play import limits
from mini_gpt.runtime.errors import UserError, shown

NO_WINDOW = 2**24  # keys; more than any text has, and exact in float32
# {encoding: its attributes that edits change}
CONSTANTS = {"rope": ("frequencies", "temperature", "factor"), "pope": ("frequencies",), "alibi": ("slopes",)}

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
    is_slope = lambda value: is_number(value, *limits.BOUNDS["slope"])
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
        "temperature": lambda value: is_number(value, *limits.BOUNDS["temperature"]),
        "window": lambda value: value is None or (is_count(value, 2**31) and value > 0),
        "start": lambda value: is_count(value, limits.MOST_START + 1),
        "rope": lambda value: (
            isinstance(value, dict)
            and set(value) <= {"base", "scaling", "factor"}
            and is_number(value.get("base", 2), *limits.BOUNDS["base"])
            and is_number(value.get("factor", 1), *limits.BOUNDS["factor"])
            and value.get("scaling", "none") in limits.SCALINGS
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
    refused, scaling = limits.refused(config), edits.get("rope", {}).get("scaling")
    for reason in (refused["mask"].get(edits.get("mask", "causal")), refused["scaling"].get(scaling)):
        if reason:
            raise UserError(reason)


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
    found = re.fullmatch(r"([0-9]{1,6})\.([0-9]{1,6})", name) if isinstance(name, str) else None
    layer, head = map(int, found.groups()) if found else (config.num_layers, 0)
    return (layer, head) if layer < config.num_layers and head < config.num_heads else None


def heads_that_are(how: str, edits: JsonEdits, config: ModelConfig) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that are "off" or at their "mean"."""
    named = [head_of(name, config) for name, value in edits.get("heads", {}).items() if value == how]
    return [place for place in named if place]


def with_fields(model: LoadedModel, edits: JsonEdits) -> LoadedModel:
    """Return the model with the edits that are fields of a config or constants of its modules; in float32.

    These are: scale, window, rope, slopes, a mask that is not causal, and for sinks the temperature. Numbers that are
    edited become parameters, so that JAX compiles no other program for another number.
    """
    config = model.config.model
    unscaled: dict[str, Any] = {"scale_attention": False} if edits.get("scale") == "off" else {}
    changed = dataclasses.replace(config, dtype="float32", **unscaled)
    constants = _constants(config, edits)
    dynamic = frozenset(name for name, rope in _ropes(config, edits).items() if rope.scaling == "dynamic")
    is_causal = edits.get("mask", "causal") == "causal"
    definition = _definition(changed, len(model.parameters["embedding"]), is_causal, "window" in edits, dynamic)
    cooled = lambda path, leaf: leaf / edits.get("temperature", 1) if path[-1] == DictKey("sink") else leaf
    parameters = jax.tree_util.tree_map_with_path(cooled, model.parameters)
    own = parameters.get("positions", {})
    parameters = parameters | {"positions": own | {name: own.get(name, {}) | constants[name] for name in constants}}
    if "window" in edits:
        window = NO_WINDOW if edits["window"] is None else min(edits["window"], NO_WINDOW)
        parameters["windows"] = np.full(config.period, window, np.float32)
    new_config = dataclasses.replace(model.config, model=changed)
    return dataclasses.replace(model, parameters=parameters, definition=definition, config=new_config)


def _constants(config: ModelConfig, edits: JsonEdits) -> dict[str, dict[str, Any]]:
    """Return the numbers of the shared positional encodings that edits change, under the names of `CONSTANTS`."""
    found: dict[str, dict[str, Any]] = {}
    for name, rope in _ropes(config, edits).items():
        layer = Rope(dataclasses.replace(config, rope=rope), rngs=nnx.Rngs(0))
        found[name] = {constant: getattr(layer, constant) for constant in CONSTANTS["rope"]}
    if "pope" in config.position_pattern:
        base = float(edits.get("rope", {}).get("base", config.rope.base))
        found["pope"] = {"frequencies": geometric_frequencies(base, 2 * config.head_width)}
    if "alibi" in config.position_pattern:
        slopes = edits.get("slopes", 1)
        found["alibi"] = {
            "slopes": slopes if isinstance(slopes, list) else slopes * np.array(alibi_slopes(config.num_heads))
        }
    return jax.tree.map(np.float32, found, is_leaf=lambda value: isinstance(value, list))


@functools.lru_cache(maxsize=64)
def _definition(
    config: ModelConfig, vocabulary: int, is_causal: bool, has_window: bool, dynamic: frozenset[str]
) -> nnx.GraphDef:
    """Return the definition of a model whose `CONSTANTS` are parameters. dynamic: names of RoPEs with this scaling."""
    module = nnx.eval_shape(lambda: build.make(config, vocabulary, rngs=nnx.Rngs(0)))
    if not is_causal:
        module.config = copy.copy(config)  # of the mask only, not of T5's buckets
        object.__setattr__(module.config, "causal", False)  # without the check: canon stays causal, as in the engine
    placeholder = lambda: nnx.data(nnx.Param(np.float32(0)))
    if has_window:
        module.windows = placeholder()
    for name, position in module.positions.items():
        for constant in CONSTANTS.get(position.name, ()):
            setattr(position, constant, placeholder())
        if isinstance(position, Rope):  # yarn multiplies by `temperature`, which is 1 for the other scalings
            position.config = dataclasses.replace(position.config, scaling="dynamic" if name in dynamic else "yarn")
    return build.split(module)[0]


def _ropes(config: ModelConfig, edits: JsonEdits) -> dict[str, RopeConfig]:
    """Return RoPE's fields with the edits, by the key of the layers that share them.

    Another scaling has its own default bounds; a factor of 1 is no scaling.
    """
    rope, edited = config.rope, edits.get("rope", {})
    scaling = edited.get("scaling", rope.scaling)
    bounds: dict[str, Any] = {"beta_slow": 1.0, "beta_fast": 4.0 if scaling == "llama3" else 32.0}
    changed = rope if scaling == rope.scaling else dataclasses.replace(rope, scaling=scaling, **bounds)
    found = {}
    for kind in config.layer_kinds:
        if kind.position == "rope":
            base, factor = edited.get("base", kind.rope_base), edited.get("factor", kind.rope_factor)
            found[positions.key(kind)] = changed.of_layer(float(base), float(factor))
    return found


def static_edits(edits: JsonEdits, config: ModelConfig, length: int) -> Edits:
    """Return the edits of activations that do not depend on other passes: what is off, temperature, and the mask.

    length: of the padded text.
    """
    layers = range(config.num_layers)
    off = lambda name: [layer in edits.get("layers", []) or layer in edits.get(name, []) for layer in layers]
    factors = lambda is_off: Edit(np.where(is_off, 0, 1).astype(np.float32)[:, None, None, None])
    heads = np.ones((config.num_layers, 1, 1, config.num_heads, 1), np.float32)
    for layer, head in heads_that_are("off", edits, config):
        heads[layer, ..., head, :] = 0
    scale = np.full((config.num_layers, 1, 1, 1, 1), 1 / edits.get("temperature", 1), np.float32)
    hidden = None
    if edits.get("mask") == "shifted":
        later_LS = np.arange(length) > np.arange(length)[:, None] + 1
        hidden = np.where(later_LS, HIDDEN_FROM_HEAD, 0).astype(np.float32)
        hidden = np.broadcast_to(hidden, (config.num_layers, 1, 1, length, length))
    sublayers = factors(off("attentions")), factors(off("feedForwards"))
    return Edits(Edit(heads), *sublayers, logits=Edit(scale, hidden))


def allow_cache(edits: JsonEdits, config: ModelConfig) -> bool:
    """Return whether a KV cache holds with these edits: new tokens change no earlier place, and each layer can decode.

    It also has positions from 0 only, and the windows of the config.
    """
    changed = {name for name in ("temperature", "window", "start", "patch") if name in edits}
    changed |= {"mask"} if edits.get("mask", "causal") != "causal" else set()
    is_dynamic = any(rope.scaling == "dynamic" for rope in _ropes(config, edits).values())
    is_whole = config.without_cache or config.random_positions is not None or is_dynamic
    return not (changed or is_whole or heads_that_are("mean", edits, config))

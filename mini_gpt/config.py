"""Reading configs: a ConfigDict from configs/*.py, or a run's config.json, checked field by field and frozen.

A field left at None in `configs/default.py` is filled in here from the fields that it follows, so that a loaded config
has no open question but `model.dtype=auto`, which is answered when the model is built.
"""

import ast
import dataclasses
import difflib
import importlib.util
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from mini_gpt import files, places
from mini_gpt.errors import UserError, shown
from mini_gpt.schema import Config

# What a run did that was written before the field was there, so that it is read and goes on.
ADDED = {
    "model.attention": "auto",
    "model.remat": "none",
    "model.scan_layers": False,
    "train.nonfinite": "stop",
    "train.nonfinite_limit": 10,
    "optimizer.muon": {"adam_learning_rate": None, "momentum": 0.95, "newton_schulz_steps": 5},
}


def load(path: str | Path, overrides: Mapping[str, Any] = types.MappingProxyType({})) -> Config:
    """Reads a config file (`configs/tiny.py`, or `configs/presets.py:gpt3_175b`) and applies overrides by dotted name.

    A run's config.json is one too. It may come from someone else: a place that it names is used only where the user has
    typed it, here among the overrides or earlier.

    Override values may be typed or text. Raises UserError for an unknown field, a wrong type, a value out of range, and
    a corpus in a place that was never typed.
    """
    config = from_dict(_overridden(_run_config_file(str(path)), overrides))
    file = Path(str(path).partition(":")[0])
    if file.suffix == ".json":
        config = places.with_known_cache(config, overrides)
        places.check_corpus(config.data, overrides, file, "--config.")
    return config


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Gives the config with some fields replaced, checked as a whole again. Raises UserError."""
    values = _overridden(to_dict(config), overrides)
    if not _is_rotary(values["model"]["position"]) and "model.rope.original_context" not in overrides:
        values["model"]["rope"]["original_context"] = None  # was filled in for the encoding before
    return from_dict(values)


def parse_override(text: str) -> tuple[str, str]:
    """Splits FIELD=VALUE. Raises UserError where there is no '='."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UserError(f"override: found {shown(text)}; must be FIELD=VALUE, such as model.position=rope")
    return name, value


def check_field(name: str) -> None:
    """Raises UserError where no field has that dotted name, with the nearest one."""
    fields = _leaf_types(Config)
    if name in fields:
        return
    by_leaf: dict[str, list[str]] = {}
    for field in fields:
        by_leaf.setdefault(field.rsplit(".", 1)[-1], []).append(field)
    leaf = name.rsplit(".", 1)[-1]
    near = by_leaf.get(leaf) or difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    near = near or [field for close in difflib.get_close_matches(leaf, by_leaf, n=1) for field in by_leaf[close]]
    if inside := [field.removeprefix(f"{name}.") for field in fields if field.startswith(f"{name}.")]:
        hint = f"; it is a section, of {', '.join(inside)}"
    elif near:
        hint = f"; did you mean {' or '.join(near)}?"
    else:
        sections = dict.fromkeys(field.split(".")[0] for field in fields if "." in field)
        hint = f"; configs/default.py lists them, in the sections {', '.join(sections)}"
    raise UserError(f"{name}: no such config field{hint}")


def to_dict(config: Config) -> dict[str, Any]:
    """Gives nested plain dicts, as config.json holds them."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Builds the config from nested plain dicts, filling what is None. Raises UserError naming the field."""
    return _build(Config, _filled(values), "")


def read(path: Path) -> Config:
    """Reads a run's config.json, as data. Raises UserError naming the file."""
    try:
        values = files.read_sealed(path)
    except FileNotFoundError:
        raise UserError(f"{path}: not found; a run directory holds the config.json of its run") from None
    except ValueError as error:
        raise UserError(f"{path}: not a run's config ({error})") from None
    if "model_type" in values:
        raise UserError(
            f"{path}: found a model of Transformers; python -m mini_gpt.hugging_face import makes a run of it"
        )
    for name, value in ADDED.items():
        section, _, field = name.partition(".")
        if isinstance(values, Mapping) and isinstance(values.get(section), Mapping):
            values[section].setdefault(field, value)
    try:
        return _build(Config, values, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Gives {dotted name: (value in a, value in b)} for every field that differs."""
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Gives {dotted name: value} for nested dicts."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _run_config_file(path: str) -> dict[str, Any]:
    file, _, argument = path.partition(":")
    if not Path(file).is_file():
        raise UserError(f"--config: {file} not found; name a file such as configs/tiny.py")
    if file.endswith(".json"):
        return to_dict(read(Path(file)))
    spec = importlib.util.spec_from_file_location(f"config_{Path(file).stem}", file)
    if spec is None:
        raise UserError(f"--config: found {file}; must be a Python file, such as configs/tiny.py, or a config.json")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        values = (module.get_config(argument) if argument else module.get_config()).to_dict()
    except UserError:
        raise
    except Exception as error:  # whatever a config file raises is for its author, in one line
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{file}: {type(error).__name__}: {reason}") from error
    return values


def _overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    hints = _leaf_types(Config)
    for name, value in overrides.items():
        check_field(name)
        *sections, leaf = name.split(".")
        node = values
        for section in sections:
            node[section] = dict(node[section])
            node = node[section]
        node[leaf] = _parse(value, hints[name], name) if isinstance(value, str) else value
    return values


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Answers each None that follows from other fields; what is missing or of a wrong type, _build names."""
    values = dict(values)
    model = dict(values["model"]) if isinstance(values.get("model"), Mapping) else None
    if model is None:
        return values

    def fill(name: str, value: Any) -> None:
        if name in model and model[name] is None:
            model[name] = value

    position = model.get("position")
    if isinstance(position, list | tuple) and len(position) == 1:
        model["position"] = position[0]  # a pattern of one is no pattern
    width = model.get("d_model")
    if isinstance(width, int):
        # SwiGLU has three matrices instead of two: 8/3 of the width keeps the count (Shazeer 2020), in multiples of 8.
        fill("d_ff", 8 * round(width / 3) if model.get("activation") == "swiglu" else 4 * width)
    positions = [n for n in (model.get("random_positions"), values.get("context_length")) if isinstance(n, int)]
    # Within bounds: what is wrong with the field that it follows, that field says.
    fill("max_positions", min(max(1, positions[0]), 2**31 - 1) if positions else None)
    fill("num_kv_heads", model.get("num_heads"))
    for name in ("embedding_dropout", "sublayer_dropout", "attention_dropout"):
        fill(name, model.get("dropout"))
    if "rope" in model:
        model["rope"] = _filled_rope(model["rope"], position, values.get("context_length"))
    return values | {"model": model}


def _is_rotary(position: Any) -> bool:
    return position == "rope" or (isinstance(position, list | tuple) and "rope" in position)


def _filled_rope(rope: Any, position: Any, context_length: Any) -> Any:
    """Answers original_context, where there is something to scale: what the context was before the factor."""
    if not _is_rotary(position) or not isinstance(rope, Mapping) or rope.get("original_context", 0) is not None:
        return rope
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or not isinstance(context_length, int) or not factor >= 1:
        return rope
    return dict(rope) | {"original_context": max(1, round(context_length / factor))}


def _leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    leaves = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            leaves.update(_leaf_types(hint, f"{prefix}{name}."))
        else:
            leaves[prefix + name] = hint
    return leaves


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{prefix.rstrip('.') or 'config'}: found {shown(values)}; must be a section of fields")
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise UserError(f"{prefix}{name}: no such config field{hint}")
    fields = {}
    for name, hint in hints.items():
        if name not in values:
            raise UserError(f"{prefix}{name}: missing; configs/default.py holds every field")
        if dataclasses.is_dataclass(hint):
            fields[name] = _build(hint, values[name], f"{prefix}{name}.")
        else:
            fields[name] = _checked(values[name], hint, prefix + name)
    return cls(**fields)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """Gives the value in the field's type (an int for a float, a list for a tuple are taken), or raises UserError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _checked(value, option, name)
            except UserError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple) and (arguments[-1] is ... or len(value) == len(arguments)):
            inner = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
            return tuple(_checked(item, kind, name) for item, kind in zip(value, inner, strict=True))
    elif hint is types.NoneType:
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is bool or hint is str:
        if isinstance(value, hint):
            return value
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31:
        return value
    raise UserError(f"{name}: found {shown(value)}; must be {_describe(hint)}")


def _parse(text: str, hint: Any, name: str) -> Any:
    """Reads a value typed on a command line, by the field's type; an unreadable text is left for _checked to name."""
    arguments = typing.get_args(hint)
    if hint is str or (typing.get_origin(hint) is Literal):
        return text
    if types.NoneType in arguments and text == "None":
        return None
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if str in arguments and not text.startswith(("(", "[")):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} of "
        return f"a tuple of {count}{_describe(arguments[0])}"
    names = {
        int: "a whole number below 2**31",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "None",
    }
    return names[hint]

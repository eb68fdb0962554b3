"""Configs from configs/*.py and from the config.json of runs: checked field by field, filled in, and frozen.

Each None that follows other fields is filled in from them. `model.dtype=auto` is resolved when the model is built.
"""

import ast
import dataclasses
import difflib
import importlib.util
import sys
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mini_gpt.config import places
from mini_gpt.config.fields import REQUIRED, build, choices, converted, specs
from mini_gpt.config.schema import Config, pattern
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

PACKAGE = Path(__file__).parent.parent
ROOTS = (Path(), PACKAGE.parent, PACKAGE)  # of configs/: this directory, a checkout, an installed package
DEEPEST = 3  # sections inside sections; a damaged config.json may have more


def load(path: str | Path, overrides: Mapping[str, Any] = types.MappingProxyType({})) -> Config:
    """Return the config of a file, with overrides by dotted name: values, or text as on a command line.

    The file is `configs/tiny.py`, `configs/presets.py:gpt3_175b` (with an argument for its get_config), or a run's
    config.json, where places are used only if the user has typed them (mini_gpt/config/places.py). Raises UserError for
    an unknown field, a wrong type, a value out of range, and a corpus in a place that was never typed.
    """
    config = _checked(flatten(_values_of_file(str(path))) | _typed(overrides))
    file = Path(str(path).partition(":")[0])
    if file.suffix == ".json":
        config = with_known_cache(config, overrides)
        places.check_corpus(config.data, overrides, file, "--config.")
    return config


def with_known_cache(config: Config, typed: Collection[str]) -> Config:
    """Return the config with the default cache, unless the user has typed `data.cache_dir`."""
    if places.is_known_cache(config.data, typed):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=None))


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return the config with some fields replaced, checked as a whole again. Raises UserError."""
    values = flatten(to_dict(config)) | _typed(overrides)
    if "rope" not in pattern(values["model.position"]) and "model.rope.original_context" not in overrides:
        values["model.rope.original_context"] = None  # it was filled in for the previous encoding
    return _checked(values)


def parse_override(text: str) -> tuple[str, str]:
    """Split FIELD=VALUE. Raises UserError if there is no '='."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UserError(f"override: found {shown(text)}; must be FIELD=VALUE, such as model.position=rope")
    return name, value


def check_field(name: str) -> None:
    """Raise UserError, with the nearest names, if no field has this dotted name."""
    fields = specs(Config)
    if name in fields:
        return
    leaves, leaf = {field: field.rsplit(".", 1)[-1] for field in fields}, name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    if leaf in leaves.values() or not near:
        close = difflib.get_close_matches(leaf, leaves.values(), n=1)
        near = [field for field in fields if leaves[field] in close]
    if inside := [field.removeprefix(f"{name}.") for field in fields if field.startswith(f"{name}.")]:
        hint = f"it is a section, of {', '.join(inside)}"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = "python -m mini_gpt.config lists all fields"
    raise UserError(f"{shown(name)[1:-1]}: no such config field; {hint}")


def defaults() -> dict[str, Any]:
    """Return the default of every field, as nested dicts; None for the fields that follow others."""
    return build(Config, {name: spec.default for name, spec in specs(Config).items()}, make=dict)


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested plain dicts, as in config.json."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Build the config from nested plain dicts, with each None filled in. Raises UserError naming the field."""
    return _checked(flatten(values))


def read(path: Path) -> Config:
    """Return the config of a run's config.json. Raises UserError naming the file."""
    try:
        values = files.read_with_checksum(path)
    except FileNotFoundError:
        raise UserError(f"{path}: not found; a run directory holds the config.json of its run") from None
    except ValueError as error:
        raise UserError(f"{path}: not a run's config ({error})") from None
    if "model_type" in values:
        raise UserError(f"{path}: found a model of Transformers; python -m mini_gpt.hugging_face import converts it")
    try:
        return from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Return {dotted name: (value in a, value in b)} of the fields that differ."""
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: value} of nested dicts."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping) and prefix.count(".") < DEEPEST
        flat |= flatten(value, f"{prefix}{name}.") if inside else {f"{prefix}{name}": value}
    return flat


def _values_of_file(path: str) -> Mapping[str, Any]:
    name, _, argument = path.partition(":")
    file = next((str(root / name) for root in ROOTS if (root / name).is_file()), None)
    if file is None:
        raise UserError(f"--config: {name} not found; name a file such as configs/tiny.py")
    if file.endswith(".json"):
        return to_dict(read(Path(file)))
    spec = importlib.util.spec_from_file_location(f"config_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"--config: found {file}; must be a Python file, such as configs/tiny.py, or a config.json")
    try:
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(file).resolve().parent.parent))  # for `from configs import default`
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        return (module.get_config(argument) if argument else module.get_config()).to_dict()
    except UserError:
        raise
    except Exception as error:  # any error of the user's code becomes one line
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{file}: {type(error).__name__}: {reason}") from error


def _checked(values: Mapping[str, Any]) -> Config:
    """Build the config from {dotted name: value}; fill in what older runs lacked, and each None that follows others."""
    for name in values:
        check_field(name)
    given: dict[str, Any] = {}
    unset: dict[str, Any] = {}
    for name, spec in specs(Config).items():
        value = values.get(name, spec.before)
        if value is REQUIRED:
            raise UserError(f"{name}: missing; python -m mini_gpt.config lists all fields")
        if value is None and spec.follows:
            unset[name] = spec.follows
        else:
            given[name] = converted(name, value, spec.hint)
    for name, follows in unset.items():
        given[name] = follows(given) if callable(follows) else given[follows]
    return build(Config, given)


def _typed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    typed = {}
    for name, value in overrides.items():
        check_field(name)
        typed[name] = _parse(value, specs(Config)[name].hint) if isinstance(value, str) else value
    return typed


def _parse(text: str, hint: Any) -> Any:
    """Read a value from a command line, by the field's type; unreadable text is returned, and refused later."""
    if text in choices(hint) or (str in (hint, *typing.get_args(hint)) and text != "None"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False}.get(text.lower(), text)

"""Load a config from configs/*.py or from the config.json of a run, and check each field.

A field that is None and has `follows` is computed from other fields. The model resolves `model.dtype=auto`.
"""

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from mini_gpt.config.attention import beta_fast
from mini_gpt.config.data import NO_FILES
from mini_gpt.config.fields import Spec, Values, build, choices, convert, specs
from mini_gpt.config.schema import Config
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require, shown

PACKAGE = Path(__file__).parent.parent
ROOTS = (Path(), PACKAGE.parent, PACKAGE)  # parents of configs/: current directory, checkout, installed package
T = TypeVar("T")
ESCAPE = re.compile(r"\\(?:[nrt\\]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})")


def load(path: str | Path, overrides: Values = types.MappingProxyType({})) -> Config:
    """Return the config of a file, with overrides applied.

    path: such as `configs/tiny.py`, `configs/presets.py:gpt3_175b` (calls get_config("gpt3_175b")), or a config.json.
    overrides: {dotted name: value}; text is parsed as on the command line.

    Raises UserError for an unknown field, a wrong type, or a value out of range.
    """
    file, argument = find_file(str(path))
    return _checked(_values_of_file(file, argument) | _parse_overrides(overrides))


def find_file(path: str, flag: str = "--config", example: str = "configs/tiny.py") -> tuple[Path, str]:
    """Return the file and the argument of a path such as `configs/presets.py:gpt3_175b`. A file's name may contain `:`.

    flag, example: for the message. Raises UserError if there is no such file.
    """
    parts = path.split(":")
    for end in range(len(parts), 0, -1):
        for root in ROOTS:
            if (file := root / ":".join(parts[:end])).is_file():
                return file, ":".join(parts[end:])
    raise UserError(f"{flag}: {path} not found; name a file such as {example}")


def override(config: Config, overrides: Values) -> Config:
    """Return the config with some fields replaced. Checks all fields again. Raises UserError if one is invalid."""
    old = flatten(to_dict(config))
    values = old | _parse_overrides(overrides)
    if "model.rope.beta_fast" not in overrides and values["model.rope.beta_fast"] == beta_fast(old):
        # Computed for the previous scaling. Other computed fields are facts of the weights, and keep their values.
        values["model.rope.beta_fast"] = None
    return _checked(values)


def parse_override(text: str) -> tuple[str, str]:
    """Split FIELD=VALUE. Raises UserError if there is no '='."""
    name, equals, value = text.partition("=")
    require(bool(name and equals), "override", text, "must be FIELD=VALUE, such as model.position=rope")
    return name, value


def unescaped(text: str) -> str:
    """Replace the escapes of Python that a shell keeps, such as the backslash and n of '\\n\\n'. Others are kept.

    For a text to be found in other texts: `--stop` and `data.document_separator`.
    """
    return ESCAPE.sub(lambda match: ast.literal_eval(f'"{match[0]}"'), text)


def check_field(name: str) -> None:
    """Raise UserError that suggests similar names if no field has this dotted name."""
    fields = specs(Config)
    if name in fields:
        return
    if inside := [field.removeprefix(f"{name}.") for field in fields if field.startswith(f"{name}.")]:
        hint = f"it is a section, with the fields {', '.join(inside)}"
    elif near := similar_fields(name.rsplit(".", 1)[-1]):
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = "python -m mini_gpt.config lists all fields"
    raise UserError(f"{shown(name)[1:-1]}: no such config field; {hint}")


def similar_fields(leaf: str) -> list[str]:
    """Return the fields whose last part is the most similar to a name, such as model.num_layers for n_layer."""
    leaves = {field: field.rsplit(".", 1)[-1] for field in specs(Config)}
    close = difflib.get_close_matches(leaf, leaves.values(), n=1)
    return [field for field in leaves if leaves[field] in close]


def defaults() -> dict[str, Any]:
    """Return nested dicts of all defaults. A field with `follows` has None."""
    return build(Config, {name: spec.default for name, spec in specs(Config).items()}, make=dict)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested plain dicts, the form of config.json."""
    return dataclasses.asdict(config)


def from_dict(values: Values) -> Config:
    """Build a checked config from nested plain dicts. Raises UserError that names the field."""
    return _checked(flatten(values))


def read(path: Path) -> Config:
    """Return the config of a run's config.json. Raises UserError that names the file."""
    try:
        values = files.read_with_checksum(path)
    except FileNotFoundError:
        raise UserError(f"{path}: not found; a run directory must have a config.json") from None
    except ValueError as error:
        raise UserError(f"{path}: not a run's config ({error})") from None
    if "model_type" in values:
        raise UserError(f"{path}: found a model of Transformers; python -m mini_gpt.hugging_face import converts it")
    try:
        return from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def differences(a: Config, b: Config) -> dict[str, tuple[object, object]]:
    """Return {dotted name: (value in a, value in b)} of the fields that differ.

    A field that follows from other fields in both is left out: one of those differs too.
    """
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    given = left.keys() - (computed(left) & computed(right))
    return {name: (left[name], right[name]) for name in left if name in given and left[name] != right[name]}


def flatten(values: Values, prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: value} of nested dicts."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _values_of_file(file: Path, argument: str) -> dict[str, Any]:
    """Return {dotted name: value} of a config file. A run's computed values become None, to follow overrides."""
    if file.suffix == ".json":
        require(not argument, "--config", f"{file}:{argument}", "must end with .json")
        values = flatten(to_dict(read(file)))
        return values | dict.fromkeys(computed(values))
    if file.suffix != ".py":
        raise UserError(f"--config: found {file}; must be a Python file, such as configs/tiny.py, or a config.json")

    def values_of(module: ModuleType) -> dict[str, Any]:
        takes_one = bool(inspect.signature(module.get_config).parameters)
        require(takes_one or not argument, "--config", f"{file}:{argument}", "must end with .py: it has no variants")
        config = module.get_config(argument) if argument else module.get_config()
        require(hasattr(config, "to_dict"), f"{file}: get_config()", config, "must return a config, as default.py does")
        return flatten(config.to_dict())

    return call(file, values_of)


def call(file: Path, use: Callable[[ModuleType], T]) -> T:
    """Return use(module) for the module of a Python file. Raises UserError in one line for any error of its code."""
    spec: Any = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    try:
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(file.resolve().parent.parent))  # for `from configs import default`
        try:
            # Python's cache of compiled files would miss a change within a second that keeps the size.
            exec(compile(file.read_bytes(), file, "exec"), module.__dict__)
        finally:
            sys.path.pop(0)
        return use(module)
    except UserError:
        raise
    except Exception as error:  # report any error of the user's code in one line
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{file}: {type(error).__name__}: {reason}") from error


def _checked(values: Values) -> Config:
    """Build a checked config from {dotted name: value}. Fill in fields that are None by `Spec.follows`."""
    for name in values:
        check_field(name)
    if missing := [name for name in specs(Config) if name not in values]:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(f"{names}: missing; if an older version made this config, train again with the current one")
    unset = {name: spec for name, spec in specs(Config).items() if values[name] is None and spec.follows}
    found = {name: convert(name, values[name], spec.hint) for name, spec in specs(Config).items() if name not in unset}
    for name, spec in unset.items():
        found[name] = convert(name, _followed(spec, found), spec.hint)
    return build(Config, found)


def computed(values: Values) -> set[str]:
    """Return the fields that have the value that follows from other fields."""
    fields = specs(Config).items()
    return {name for name, spec in fields if spec.follows and values[name] == _followed(spec, values)}


def _followed(spec: Spec, values: Values) -> object:
    """Return the value of a field that follows from other fields."""
    return spec.follows(values) if callable(spec.follows) else values[spec.follows or ""]


def _parse_overrides(overrides: Values) -> dict[str, Any]:
    parsed = {}
    for name, value in overrides.items():
        check_field(name)
        parsed[name] = _parse(value, specs(Config)[name].hint) if isinstance(value, str) else value
    if isinstance(separator := parsed.get("data.document_separator"), str):
        parsed["data.document_separator"] = unescaped(separator)
    corpus = parsed.get("data.corpus")
    if isinstance(corpus, str) and corpus.startswith(NO_FILES):
        parsed.setdefault("data.path", None)  # it was given for the previous corpus
    return parsed


def _parse(text: str, hint: object) -> object:
    """Parse text by the type of its field. Text that can't be parsed is returned, and `convert` raises later."""
    if text in choices(hint) or (str in (hint, *typing.get_args(hint)) and text != "None"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return {"true": True, "false": False}.get(text.lower(), text)

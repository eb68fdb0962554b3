"""Read and check the fields of a Transformers config.json."""

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mini_gpt.config.fields import LARGEST
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require

CONFIG, WEIGHTS = "config.json", "model.safetensors"
T = TypeVar("T")


class FieldError(UserError):
    """A field that is not supported. replace: sets it to a supported value, so that other fields can be checked too."""

    def __init__(self, message: str, replace: Callable[[], None]):
        super().__init__(message)
        self.replace = replace


class Settings:
    """The fields of a config.json, or of a section in it.

    Each method raises UserError, naming the file and the field, if the value is not allowed.
    """

    def __init__(self, path: Path, values: Any, prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix
        where = f"{path}: {prefix.rstrip('.')}" if prefix else str(path)
        require(isinstance(values, dict), where, values, "must be a JSON object")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> "Settings":
        """Return a section; it is empty if its field is missing or null."""
        return Settings(self.path, self.get(name, {}), f"{self.prefix}{name}.")

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number in 1..LARGEST. Another value ends `read_all`, because later checks need it."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise UserError(str(self.error(name, f"must be a whole number in 1..{LARGEST}")))
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number >= 0."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise self.error(name, "must be a finite number >= 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def one_of(self, name: str, known: Mapping[str, str], default: str) -> str:
        """Return mini_gpt's name for a field's value."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"must be {' or '.join(known)} to be imported")
        return known[value]

    def of_layers(self, name: str, default: Sequence[Any], layers: int, known: Sequence[Any]) -> Sequence[Any]:
        """Return a list with one of the known values for each layer."""
        values = self.get(name, default)
        if not isinstance(values, list) or len(values) != layers or not all(value in known for value in values):
            raise self.error(name, f"must be a list of {layers} values, each {' or '.join(map(str, known))}")
        return values

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Give fields the names by which they are read. Raises UserError if a field has two values."""
        for alias, name in aliases.items():
            value = self.values.get(alias)
            if value is not None and self.get(name, value) != value:
                raise self.error(alias, f"must be equal to {name}, which Transformers replaces by it")
            if value is not None:
                self.values[name] = value

    def require(self, wanted: Mapping[str, Any]) -> None:
        """Raise UserError if a field differs from `wanted`. A missing field has the wanted value."""
        for name, value in wanted.items():
            if self.get(name, value) != value:
                raise self.error(name, f"must be {json.dumps(value)} to be imported", value)

    def error(self, name: str, right: str, supported: Any = None) -> FieldError:
        """Return an error for a field. supported: a value with which other fields can be read; None: the default."""
        found = json.dumps(self.values[name], ensure_ascii=False)[:200] if name in self.values else "nothing"
        message = f"{self.path}: {self.prefix}{name}: found {found}; {right}"
        return FieldError(message, lambda: self.values.update({name: supported}))


def read_all(settings: Settings, use: Callable[[Settings], T]) -> T:
    """Return `use(settings)`. Raises a UserError that names all fields that are not supported, not only the first."""
    settings, start = Settings(settings.path, copy.deepcopy(settings.values)), f"{settings.path}: "
    problems: dict[str, str] = {}  # by field
    while True:
        try:
            used = use(settings)
            break
        except UserError as error:
            if not problems and not isinstance(error, FieldError) and not str(error).startswith(start):
                raise  # of another file
            message = str(error).removeprefix(start)
            field = message.partition(": found ")[0]
            repeated = field in problems
            problems.setdefault(field, message)
            if repeated or not isinstance(error, FieldError):
                break
            error.replace()
    if problems:
        several = f"{len(problems)} fields cannot be imported: " if len(problems) > 1 else ""
        raise UserError(f"{start}{several}{'. '.join(problems.values())}")
    return used


def read(path: Path) -> Settings:
    """Read a config.json. Raises UserError if it is missing or not valid JSON."""
    try:
        return Settings(path, files.read_json(find_file(path.parent, path.name)))
    except FileNotFoundError:
        encoders = sorted(path.parent.glob(f"*_Transformer/{CONFIG}"))  # of sentence-transformers
        remedy = f"name {encoders[0].parent}" if encoders else f"name a directory that holds a model's {CONFIG}"
        raise UserError(f"{path}: not found; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None


def find_file(source: Path, name: str) -> Path:
    """Return the path of a file of a model. Raise UserError if it is a link out of the model's directory.

    In the Hub's cache, links from models--OWNER--NAME/snapshots/REVISION to models--OWNER--NAME/blobs are allowed.
    """
    parent = source.resolve().parent
    return files.file_inside(source, name, also=parent.parent / "blobs" if parent.name == "snapshots" else None)


def is_file_name(text: str) -> bool:
    """Return whether a text can be the name of a file in a directory: printable, not too long, without a slash."""
    return text.isprintable() and text not in ("", ".", "..") and "/" not in text and len(text) <= files.LONGEST_NAME

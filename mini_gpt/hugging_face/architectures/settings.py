"""Read a config.json of Transformers, field by field."""

import json
import sys
from pathlib import Path
from typing import Any

from mini_gpt.config.model_schema import LARGEST
from mini_gpt.hugging_face import source_files
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, shown

# Names of activations: the one that is exported, and others that are imported as the same function.
ACTIVATION_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu"}
ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATION_NAMES.items()}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}


class Settings:
    """The fields of a config.json, or of a section in it.

    Each method raises UserError, naming the file and the field, if the value is not allowed.
    """

    def __init__(self, path: Path, values: Any, prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix
        if not isinstance(values, dict):
            where = f"{path}: {prefix.rstrip('.')}" if prefix else path
            raise UserError(f"{where}: found {shown(values)}; must be an object of fields")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> "Settings":
        """Return a field that is an object; empty if it is missing or null."""
        return Settings(self.path, self.get(name, {}), f"{self.prefix}{name}.")

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a whole number in 1..LARGEST."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self.error(name, f"must be a whole number in 1..{LARGEST}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number of at least 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise self.error(name, "must be a number of at least 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def one_of(self, name: str, known: dict[str, str], default: str) -> str:
        """Return our name for a field's value."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"must be {' or '.join(known)} to be imported")
        return known[value]

    def must_be(self, name: str, wanted: Any, default: Any) -> None:
        """Raise UserError if a field has another value than the only one that is supported."""
        if self.get(name, default) != wanted:
            raise self.error(name, f"must be {json.dumps(wanted)} to be imported")

    def error(self, name: str, right: str) -> UserError:
        found = json.dumps(self.values[name], ensure_ascii=False)[:200] if name in self.values else "nothing"
        return UserError(f"{self.path}: {self.prefix}{name}: found {found}; {right}")


def read(path: Path) -> Settings:
    """Read a config.json. Raises UserError if it is missing or not valid JSON."""
    try:
        return Settings(path, files.read_json(source_files.find(path.parent, path.name)))
    except FileNotFoundError:
        raise UserError(f"{path}: not found; name a directory that holds a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({error})") from None

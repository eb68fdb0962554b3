"""A config.json of Hugging Face's, read field by field."""

import json
import sys
from pathlib import Path
from typing import Any

from mini_gpt import files
from mini_gpt.errors import UserError, shown
from mini_gpt.hugging_face import source_files
from mini_gpt.model_schema import LARGEST

# Of a feed-forward of two products: what is written for ours, and what else says the same.
ACTIVATION_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu"}
ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATION_NAMES.items()}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}


class Settings:
    """The fields of a config.json, or of a section in it.

    Each reader raises UserError, naming the file and the field, where the value is not what it must be.
    """

    def __init__(self, path: Path, values: Any, prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix
        if not isinstance(values, dict):
            where = f"{path}: {prefix.rstrip('.')}" if prefix else path
            raise UserError(f"{where}: found {shown(values)}; must be an object of fields")

    def get(self, name: str, default: Any = None) -> Any:
        """Gives a field's value, or the default where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> "Settings":
        """Gives a field that is an object, empty where it is missing or null."""
        return Settings(self.path, self.get(name, {}), f"{self.prefix}{name}.")

    def whole(self, name: str, default: int | None = None) -> int:
        """Gives a whole number above 0, no larger than any model has."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise self.error(name, f"must be a whole number in 1..{LARGEST}")
        return value

    def number(self, name: str, default: float) -> float:
        """Gives a number of 0 at least that a float holds."""
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
        """Gives what a field's value is called here."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(name, f"can be read where it is {' or '.join(known)}")
        return known[value]

    def must_be(self, name: str, wanted: Any, default: Any) -> None:
        """Raises UserError where a field has another value than the only one that a block of ours can have."""
        if self.get(name, default) != wanted:
            raise self.error(name, f"can be read where it is {json.dumps(wanted)}")

    def error(self, name: str, right: str) -> UserError:
        found = json.dumps(self.values[name], ensure_ascii=False)[:200] if name in self.values else "nothing"
        return UserError(f"{self.path}: {self.prefix}{name}: found {found}; {right}")


def read(path: Path) -> Settings:
    """Reads a config.json. Raises UserError where there is none."""
    try:
        return Settings(path, files.read_json(source_files.find(path.parent, path.name)))
    except FileNotFoundError:
        raise UserError(f"{path}: not found; name a directory that holds a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({error})") from None

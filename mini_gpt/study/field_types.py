"""Check the types of a study's fields, which a study file gives."""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from mini_gpt.runtime.errors import require

NAMES = {collections.abc.Mapping: "a mapping, such as {...}", collections.abc.Sequence: "a list", type(None): "None"}


def check(field: str, value: Any, leave_out: Sequence[str] = ()) -> None:
    """Raise UserError unless the fields of a dataclass have their types.

    field: its name in messages.
    leave_out: fields with checks of their own.
    """
    for part in dataclasses.fields(value):
        found, allowed = getattr(value, part.name), _allowed(part.type)
        is_right = isinstance(found, allowed) and type(found) not in {bool, str} - {*allowed}  # a text is a sequence
        names = " or ".join(NAMES.get(one, one.__name__) for one in allowed)
        if part.name not in leave_out:
            require(is_right, f"{field}: {part.name}", found, f"must be {names}")


def _allowed(hint: Any) -> tuple[type, ...]:
    """Return the types that a type hint allows; for numbers, also whole ones."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    options = tuple(typing.get_origin(option) or option for option in options)
    return (*options, int) if float in options else options

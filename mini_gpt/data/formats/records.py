"""What a file of documents yields: pieces of text, and faults."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from mini_gpt.data.corpus import Piece

SURROGATE = re.compile("[\ud800-\udfff]")
LEAVE_OUT = "data.on_error=skip leaves such records out"
LONGEST = 2**28  # characters or bytes of a record, which is held in memory
SHOWN_FIELDS = 8


class Fault(NamedTuple):
    """A record, or the rest of a file, that can't be read."""

    message: str  # with the file, and the record or line


Parts = Iterator[Piece | Fault]


def checked(text: Any, where: str, field: str) -> Piece | Fault:
    """Return the text of a record, or what is wrong with it."""
    if not isinstance(text, str):
        return Fault(f"{where}: {field} is {_kind(text)}; must be a text: {LEAVE_OUT}")
    if not text.isascii() and (lone := SURROGATE.search(text)):
        return Fault(f"{where}: {field} has {lone[0]!r}, half of a character; remove it, or {LEAVE_OUT}")
    if "\0" in text:
        return Fault(f"{where}: {field} has a zero byte at index {text.index(chr(0))}; remove it, or {LEAVE_OUT}")
    return Piece(text)


def of_record(record: Any, where: str, field: str) -> Piece | Fault:
    """Return the text in a field of a record; a record may also be the text itself."""
    if isinstance(record, str):
        return checked(record, where, "the record")
    if not isinstance(record, dict):
        return Fault(f"{where}: the record is {_kind(record)}; must be an object with a field {field!r}, or a text")
    if field not in record:
        return Fault(f"{where}: {missing(field, list(record))}")
    return checked(record[field], where, field)


def missing(field: str, fields: list[str]) -> str:
    """Return the problem of a record without a field."""
    found = ", ".join(repr(str(name)[:40]) for name in fields[:SHOWN_FIELDS]) or "none"
    more = f" and {len(fields) - SHOWN_FIELDS} more" if len(fields) > SHOWN_FIELDS else ""
    return f"has no field {field!r}; its fields are {found}{more}: name one with data.text_field, or {LEAVE_OUT}"


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"of the type {type(value).__name__}")

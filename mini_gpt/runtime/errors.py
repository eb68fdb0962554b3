"""Errors for users, and parts of their messages."""

import difflib
import re
from collections.abc import Iterable

LONGEST_SHOWN = 200  # characters
FULL_MEMORY = "RESOURCE_EXHAUSTED|out of memory|can't start new thread|cannot allocate memory"


class UserError(Exception):
    """An error that the user can fix. The message names the field or file, what was found, and what to do."""


def require(condition: bool, field: str, found: object, remedy: str) -> None:
    """Raise UserError, "FIELD: found FOUND; REMEDY", unless the condition holds."""
    if not condition:
        raise UserError(f"{field}: found {shown(found)}; {remedy}")


def shown(found: object) -> str:
    """Return the repr of a value for a message, cut after LONGEST_SHOWN characters."""
    try:
        text = repr(found)
    except (ValueError, RecursionError):  # a number of over 4,300 digits, or a list in a list in a list ...
        return f"a value of type {type(found).__name__} that is too long to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean NAME?" with the known name that is most similar, or `otherwise` if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def memory_error(error: BaseException) -> str | None:
    """Return the first line of any library's out-of-memory error; None for other errors."""
    is_full = isinstance(error, MemoryError) or re.search(FULL_MEMORY, str(error), re.IGNORECASE)
    return first_line(error)[:LONGEST_SHOWN] if is_full else None


def printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret; keep newlines."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)

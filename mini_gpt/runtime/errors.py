"""Errors for users: one line on stderr, and exit status 1."""

import difflib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

LONGEST_SHOWN = 200  # characters
FULL_MEMORY = "RESOURCE_EXHAUSTED|out of memory|can't start new thread|cannot allocate memory"
waits_for_others = False  # True in a job of several processes: a normal exit would wait for the other processes


class UserError(Exception):
    """An error that the user can fix. The message names the field or file, what was found, and what to do."""


def require(condition: bool, field: str, found: Any, remedy: str) -> None:
    """Raise UserError, "FIELD: found FOUND; REMEDY", unless the condition holds."""
    if not condition:
        raise UserError(f"{field}: found {shown(found)}; {remedy}")


def shown(found: Any) -> str:
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


def memory_error(error: BaseException) -> str | None:
    """Return the first line of any library's out-of-memory error; None for other errors."""
    text = str(error) or type(error).__name__
    is_full = isinstance(error, MemoryError) or re.search(FULL_MEMORY, text, re.IGNORECASE)
    return text.splitlines()[0][:LONGEST_SHOWN] if is_full else None


def printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret; keep newlines."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def run(main: Callable[[], None]) -> None:
    """Run a command. Print an expected error as one line on stderr, and exit with status 1."""
    _open_streams()
    try:
        _run(main)
    except BaseException as stop:
        if not waits_for_others:
            raise
        code = stop.code if isinstance(stop, SystemExit) else "".join(traceback.format_exception(stop))
        if isinstance(code, str):
            print(code, file=sys.stderr, flush=True)
        _flush()
        os._exit(1 if isinstance(code, str) else code or 0)


def _run(main: Callable[[], None]) -> None:
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(1)  # the reader of the pipe has closed it
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        message, full = str(error), None if isinstance(error, UserError) else memory_error(error)
        if full is not None:
            message = f"out of memory ({full}); free memory, raise its limit (ulimit -v), or reduce the model or text"
        elif isinstance(error, RuntimeError):
            raise
        elif isinstance(error, OSError):
            message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or message
        sys.exit(printable(f"error: {message}").replace("\n", "\\n"))
    except UnicodeEncodeError as error:
        sys.exit(f"error: found text that is not valid Unicode ({error.reason}); give UTF-8")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _flush()


class _Log(io.FileIO):
    """Standard error. If a write fails, it becomes /dev/null: a run continues if its terminal is closed."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(content)


def _open_streams() -> None:
    """Open closed standard streams as /dev/null. Otherwise the next opened file would receive what is printed.

    Invalid input becomes surrogates. Characters that the encoding lacks become "?". Failed logging is ignored.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number
        pass
    os.close(handle)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the process ends
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        log = io.BufferedWriter(_Log(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(log, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)


def _flush() -> None:
    """Flush stdout. If that fails, discard the rest: Python would flush it again at the exit, and fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

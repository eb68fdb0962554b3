"""The run of a command: standard streams, and expected errors as one line on stderr with exit status 1."""

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from mini_gpt.runtime.errors import UserError, memory_error, printable

waits_for_others = False  # True in a job of several processes: a normal exit would wait for the other processes


def run(main: Callable[[], None]) -> None:
    """Run a command. Print an expected error as one line on stderr, and exit with status 1."""
    _set_up_streams()
    try:
        _run(main)
    except BaseException as stop:
        if not waits_for_others:
            raise
        code = stop.code if isinstance(stop, SystemExit) else "".join(traceback.format_exception(stop))
        if isinstance(code, str):
            print(code, file=sys.stderr, flush=True)
        os._exit(1 if isinstance(code, str) else code or 0)


def _run(main: Callable[[], None]) -> None:
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(1)  # the reader of the pipe has closed it
    except UserError as error:
        _fail(str(error))
    except (OSError, MemoryError, RuntimeError) as error:
        if full := memory_error(error):
            _fail(f"out of memory ({full}); free memory, raise its limit (ulimit -v), or reduce the model or text")
        if not isinstance(error, OSError):
            raise
        _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except UnicodeEncodeError as error:
        sys.exit(f"error: found text that is not valid Unicode ({error.reason}); give UTF-8")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _flush()


def _fail(message: str) -> NoReturn:
    sys.exit(printable(f"error: {message}").replace("\n", "\\n"))


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


def _set_up_streams() -> None:
    """Invalid input becomes surrogates. Characters that the encoding lacks become "?". Failed logging is ignored."""
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

"""What the commands share: how overrides become fields and a directory's name, and what is set before JAX starts."""

import argparse
import ctypes
import functools
import logging
import os
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from mini_gpt import config as configs
from mini_gpt import files, processes
from mini_gpt.errors import UserError

log = logging.getLogger(__name__)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
READ_ONLY = "Given directory is read only="  # Orbax warns of what read_only=True asks for
LOOP_CLOSED = "Event loop is closed"
ROOM_BELOW = 600  # bytes of a path, for the files of a run directory


class _AboveTheBar(logging.Handler):
    """Writes a line above the progress bar, where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for the records of libraries that the main thread reports again, or that say what was asked for."""
    if record.name.partition(".")[0] == "mini_gpt":
        return True
    message = record.getMessage()
    error = record.exc_info[1] if record.exc_info else None
    return not (_is_raised_again(error or Exception(message)) or message.startswith(READ_ONLY))


def _is_raised_again(error: BaseException | None) -> bool:
    """Return True for an error of a background thread that the main thread raises when it waits for that thread.

    A full disk fails in several threads of a save. The first is told in one line, without a traceback. The array
    operations beside a failed one find their event loop closed.
    """
    if str(error) == LOOP_CLOSED:
        return True
    reason = files.cant_write(error)
    if reason is not None:
        _warn_once(reason)
    return reason is not None or isinstance(error, UserError)


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning(f"a background thread can't write ({reason}); the run ends when it waits for that thread")


def set_up(cache_dir: str | None = None, flags: argparse.Namespace | None = None) -> None:
    """Show our own log lines and the warnings of libraries, and keep compiled programs for the next start.

    flags: with those of `add_process_flags`, joins the other processes of the job, of which the first alone speaks.
    Must come before anything that touches a device. Raises UserError where the others do not come.
    """
    handler = _AboveTheBar()
    handler.addFilter(_is_news)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mini_gpt").setLevel(logging.INFO)
    sys.unraisablehook = _unless_raised_again(sys.__unraisablehook__)
    threading.excepthook = _unless_raised_again(threading.__excepthook__)
    sys.stdout.reconfigure(errors="replace")  # what a model writes need not fit the terminal's encoding
    jax.config.update("jax_compilation_cache_dir", str(files.cache_directory(cache_dir) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    _keep_freed_memory()
    if flags is not None:
        job = processes.Job(flags.coordinator, flags.num_processes, flags.process_id)
        if processes.start(job, flags.start_timeout) > 0:
            for name in ("mini_gpt", None):
                logging.getLogger(name).setLevel(logging.ERROR)
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it lives as long as the process


def _unless_raised_again(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a hook for errors outside the main thread that leaves out those which the main thread raises too."""
    return lambda raised: None if _is_raised_again(raised.exc_value) else hook(raised)


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what tells a process of the others; without it SLURM, Open MPI or the TPU pod does, where there is one."""
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens: its host, any free port")
    parser.add_argument("--num_processes", type=int, help="how many there are; 1: this one runs alone")
    parser.add_argument("--process_id", type=int, help="which of them this one is, from 0")
    parser.add_argument(
        "--start_timeout", type=float, default=processes.START_TIMEOUT, help="seconds to wait for the others"
    )


def _keep_freed_memory() -> None:
    """Has glibc keep what is freed: XLA allocates a step's temporary memory anew each time, and on CPUs a tenth to a
    third of a step went into page faults (docs/performance.md)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        # Steps in the main thread, whose arena is the only one that keeps more than 64 MB together.
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def add_suite_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what suites that measure against length take."""
    parser.add_argument("--lengths", help="such as 64,1x,2x: x is the longest that was trained")
    parser.add_argument("--strides", help="of sliding windows, likewise; default: 0.25x, or less for short lengths")


def config_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Reads --config.FIELD=VALUE, or --config.FIELD VALUE. Raises UserError for anything else."""
    overrides, rest = {}, list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--config."):
            raise UserError(f"{argument}: no such flag; config fields are given as --config.FIELD=VALUE, see --help")
        text = argument.removeprefix("--config.")
        if "=" not in text and rest:
            text = f"{text}={rest.pop(0)}"
        name, value = configs.parse_override(text)
        overrides[name] = value
    return overrides


def directory(text: str) -> Path:
    """Return the directory that a flag names, with ~ expanded, which no shell does in --workdir=~/run.

    Raises UserError where it is empty, too long, or has a character that no terminal shows as it is.
    """
    if not text:
        raise UserError("found a flag without its directory; such as --workdir=DIR")
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):  # control, not UTF-8, ends of lines
            raise UserError(f"{text!r}: found {character!r} in the path of a directory; name one without it")
    path = Path(text).expanduser()
    longest = os.pathconf("/", "PC_PATH_MAX") - ROOM_BELOW
    if (found := len(os.fsencode(path.absolute()))) > longest:
        raise UserError(f"found a directory whose path has {found} bytes; must have at most {longest}")
    return path


def run_name(config_path: str, overrides: dict[str, str]) -> str:
    """Return the config's name with its argument and the overrides joined to it, such as tiny,model.position=alibi."""
    file, _, argument = config_path.partition(":")
    parts = [Path(file).stem, *([argument] if argument else [])]
    return ",".join([*parts, *(f"{name}={value}" for name, value in overrides.items())])


def default_workdir(config_path: str, overrides: dict[str, str]) -> Path:
    """Return the run directory of a command without --workdir: the run's name under runs/, as a plain file name."""
    return Path("runs") / files.plain_name(run_name(config_path, overrides))

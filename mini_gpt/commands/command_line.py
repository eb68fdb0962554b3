"""What the commands share: how overrides become fields and a directory's name, and what is set before JAX starts."""

import argparse
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from mini_gpt.config import loading as configs
from mini_gpt.runtime import files, processes
from mini_gpt.runtime.errors import UserError

log = logging.getLogger(__name__)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


class _AboveTheBar(logging.Handler):
    """Writes a line above the progress bar, where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def set_up(cache_dir: str | None = None, flags: argparse.Namespace | None = None) -> None:
    """Shows our own log lines and no library's, and keeps compiled programs for the next start.

    flags: with those of `add_process_flags`, joins the other processes of the job, of which the first alone speaks.
    Must come before anything that touches a device. Raises UserError where the others do not come.
    """
    logging.basicConfig(format="%(message)s", level=logging.ERROR, handlers=[_AboveTheBar()], force=True)
    logging.getLogger("mini_gpt").setLevel(logging.INFO)
    # A full disk ends a save in several of Orbax's threads; what it raises where it is waited for is said once, by us.
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    sys.unraisablehook = threading.excepthook = lambda raised: log.debug("in the background: %s", raised)
    sys.stdout.reconfigure(errors="replace")  # what a model writes need not fit the terminal's encoding
    jax.config.update("jax_compilation_cache_dir", str(files.cache_directory(cache_dir) / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    _keep_freed_memory()
    number = 0
    if flags is not None:
        number = processes.start(flags.coordinator, flags.num_processes, flags.process_id, flags.start_timeout)
    if number > 0:
        logging.getLogger("mini_gpt").setLevel(logging.ERROR)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it stays open as long as the process


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
    """Reads a directory from a flag; no shell expands the ~ of --workdir=~/run. Raises UserError where it is empty."""
    if not text:
        raise UserError("found a flag without its directory; such as --workdir=DIR")
    return Path(text).expanduser()


def default_workdir(config_path: str, overrides: dict[str, str]) -> Path:
    """Gives runs/ and the config's name, overrides joined to it: runs/tiny,model.position=alibi."""
    file, _, argument = config_path.partition(":")
    parts = [Path(file).stem + (f":{argument}" if argument else "")]
    parts += [f"{name}={value}" for name, value in overrides.items()]
    name = ",".join(parts).replace("/", "_")
    files.check_name(name, "give --workdir=DIR a name of your own")
    return Path("runs") / name

"""The set-up of a process before JAX starts: its log, the compilation cache and the allocation of memory."""

import ctypes
import gc
import logging
import sys
import traceback
from pathlib import Path

import jax
from tqdm import tqdm

from mini_gpt.runtime import errors, files

LOOP_CLOSED = "Event loop is closed"  # if a write fails, Orbax closes the loop before other writes end
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h


def set_up() -> None:
    """Set up logging, the compilation cache and memory allocation."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[_TqdmHandler()], force=True)
    logging.getLogger("mini_gpt").setLevel(logging.INFO)
    for orbax in ("absl", "asyncio"):  # it logs the errors of its threads and tasks, and raises the first of them later
        logging.getLogger(orbax).setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda raised: None if _is_repeated(raised.exc_value) else sys.__unraisablehook__(raised)
    jax.config.update("jax_compilation_cache_dir", str(files.cache_directory() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    _keep_freed_memory()
    gc.freeze()  # otherwise, visits of the collector to what imports made take 0.3 s up to the first step


class _TqdmHandler(logging.Handler):
    """Write log lines above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(errors.printable(self.format(record)), file=sys.stderr)


def _is_repeated(error: BaseException | None) -> bool:
    """Return whether an error that no code waits for repeats another: Orbax raises the first of its tasks' errors."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    return str(error) == LOOP_CLOSED or any("orbax" in Path(frame.filename).parts for frame in frames)


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, and JAX run its steps in the thread whose memory is kept.

    Otherwise page faults take a tenth to a third of a step (docs/performance.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        # glibc keeps more than 64 MB for the main thread only.
        jax.config.update("jax_cpu_enable_async_dispatch", False)

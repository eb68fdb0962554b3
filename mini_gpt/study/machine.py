"""The parts of this machine that each of several runs gets: cores or devices, and memory."""

import contextlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from mini_gpt.runtime import devices, files
from mini_gpt.runtime.errors import UserError, require

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
CGROUP = Path("/sys/fs/cgroup")  # the limits of a container
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
ASK = "import jax; from mini_gpt.runtime import devices; print(devices.platform(jax.devices()[0]), len(jax.devices()))"


class Slot(NamedTuple):
    """The cores and accelerators of one run at a time.

    cores: None if they are not limited.
    environment: added to the run's.
    accelerators: their number, 0 on CPUs.
    """

    cores: list[int] | None
    environment: dict[str, str]
    accelerators: int = 0


def slots(jobs: int | None = None) -> list[Slot]:
    """Return `jobs` slots of equal size. None: one for each core or GPU; one for all chips of a TPU.

    Raises UserError if there are more jobs than cores and than GPUs, or several on a TPU, or if JAX cannot start.
    """
    platform, count = _accelerators()
    cores = devices.cores()
    limit = min(_cpu_limit() or len(cores), len(cores))
    default = {"cpu": limit, "tpu": 1}.get(platform, count)
    most = 1 if platform == "tpu" else max(default, len(cores))
    jobs = default if jobs is None else jobs
    reason = "since all chips of a TPU work on one run" if platform == "tpu" else "the number of cores or GPUs"
    require(1 <= jobs <= most, "--jobs", jobs, f"must be in 1..{most}, {reason}")
    share, found = max(1, limit // jobs), []
    for number in range(jobs):
        environment = dict.fromkeys(THREADS, str(share))
        if platform in VISIBLE_DEVICES and jobs > 1:
            environment |= _gpus(VISIBLE_DEVICES[platform], count, number, jobs)
        # With a limit on time, other containers may use the same cores, and the kernel must choose.
        is_pinned = hasattr(os, "sched_setaffinity") and 1 < jobs <= limit == len(cores)
        own = cores[number * share : (number + 1) * share] if is_pinned else None
        found.append(Slot(own, environment, max(1, count // jobs) if platform != "cpu" else 0))
    return found


@contextlib.contextmanager
def own_cores(count: int) -> Iterator[Slot]:
    """Yield a slot with `count` cores that no other process has from this function, as long as there are free ones."""
    cores, own = devices.cores(), list[int]()
    with contextlib.ExitStack() as stack:
        for core in cores:
            path = Path(tempfile.gettempdir(), f"mini_gpt-{os.getuid()}-core-{core}")
            file = stack.enter_context(path.open("a"))
            if len(own) < count and files.lock(file):
                own.append(core)
        is_pinned = hasattr(os, "sched_setaffinity") and (_cpu_limit() or len(cores)) >= len(cores)  # as in `slots`
        own = sorted(cores, key=lambda core: core not in own)[:count]
        yield Slot(own if is_pinned else None, dict.fromkeys(THREADS, str(count)))


def call_in(slot: Slot, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function that uses JAX's devices, in a subprocess if the slot has accelerators.

    JAX reserves the memory of accelerators until its process ends, and the runs need it.
    """
    if not slot.accelerators:
        function(*arguments)
        return
    with ProcessPoolExecutor(1, get_context("spawn"), _set_up, (slot.environment,)) as process:
        process.submit(function, *arguments).result()


def _set_up(environment: dict[str, str]) -> None:
    """Set up a process of `call_in`: its environment, and a thread that ends it if its parent dies."""
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(128 + signal.SIGHUP)


def _cpu_limit() -> int | None:
    """Return the number of cores whose time the container may use; None if it is not limited."""
    try:
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        return max(1, math.ceil(quota / period))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return None


def _gpus(variable: str, count: int, number: int, jobs: int) -> dict[str, str]:
    """Return the environment that gives job `number` its share of the GPUs, or one that it shares with other jobs."""
    allowed = os.environ.get(variable) or ",".join(map(str, range(count)))
    each = max(1, count // jobs)
    first = number * each % count
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if jobs > count else {}
    return {variable: ",".join(allowed.split(",")[first : first + each])} | shared


def _accelerators() -> tuple[str, int]:
    """Return JAX's platform and number of devices; asked in a subprocess, because JAX reserves the memory of a GPU."""
    if not any(importlib.util.find_spec(package) for package in devices.PLUGINS):
        return "cpu", 0
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"JAX can't start on the devices of this machine ({reason}); JAX_PLATFORMS=cpu uses the CPU")
    platform, count = asked.stdout.split()[-2:]
    return platform, int(count)


def memory_left() -> int:
    """Return the bytes that new processes can use, within the limit of the container."""
    left = psutil.virtual_memory().available
    try:
        limit, used, kinds = ((CGROUP / f"memory.{name}").read_text().split() for name in ("max", "current", "stat"))
        cached = int(kinds[kinds.index("inactive_file") + 1])  # the kernel frees it when memory is needed
        return left if limit == ["max"] else min(left, int(limit[0]) - int(used[0]) + cached)
    except (OSError, ValueError):
        return left

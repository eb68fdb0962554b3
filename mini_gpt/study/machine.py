"""The parts of this machine that each of several runs gets: cores or devices, and memory."""

import contextlib
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import psutil

from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import require

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
CGROUP = Path("/sys/fs/cgroup")  # the limits of a container
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
ASK = "import jax; from mini_gpt.runtime import devices; print(devices.platform(jax.devices()[0]), len(jax.devices()))"


class Slot(NamedTuple):
    """Where one run at a time is trained.

    cores: None if they are not limited. environment: added to the run's. accelerators: their number, 0 on CPUs.
    """

    cores: list[int] | None
    environment: dict[str, str]
    accelerators: int = 0


def slots(jobs: int | None = None) -> list[Slot]:
    """Return `jobs` slots of equal size. None: one for each core or GPU; on a TPU one, since its chips work together.

    Raises UserError if there are more jobs than cores.
    """
    platform, count = _accelerators()
    cores = _cores()
    most = {"cpu": len(cores), "tpu": 1}.get(platform, count)
    jobs = most if jobs is None else jobs
    require(1 <= jobs <= len(cores), "--jobs", jobs, f"must be in 1..{len(cores)}, the number of cores")
    share, found = len(cores) // jobs, []
    for number in range(jobs):
        environment = dict.fromkeys(THREADS, str(share))
        if platform in VISIBLE_DEVICES and jobs > 1:
            environment |= _gpus(VISIBLE_DEVICES[platform], count, number, jobs)
        is_pinned = hasattr(os, "sched_setaffinity") and jobs > 1
        own = cores[number * share : (number + 1) * share] if is_pinned else None
        found.append(Slot(own, environment, max(1, count // jobs) if platform != "cpu" else 0))
    return found


def check_on_cpu(slots: list[Slot]) -> None:
    """Let JAX in this process, which only checks, use as many CPU devices as a slot has accelerators.

    It would reserve the memory of the accelerators, which the runs need.
    """
    if slots[0].accelerators:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", slots[0].accelerators)


def _cores() -> list[int]:
    """Return the cores that this process may use: not more than the CPU quota of the container."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit ("max")
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        return cores[: max(1, math.ceil(quota / period))]
    return cores


def _gpus(variable: str, count: int, number: int, jobs: int) -> dict[str, str]:
    """Return the environment that gives job `number` its share of the GPUs, or one GPU with other jobs."""
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
    words = asked.stdout.split()
    return (words[-2], int(words[-1])) if asked.returncode == 0 and len(words) >= 2 else ("cpu", 0)


def memory_left() -> int:
    """Return the bytes that new processes can use, within the limit of the container."""
    left = psutil.virtual_memory().available
    try:
        limit, used, kinds = ((CGROUP / f"memory.{name}").read_text().split() for name in ("max", "current", "stat"))
        cached = int(kinds[kinds.index("inactive_file") + 1])  # the kernel frees it when memory is needed
        return left if limit == ["max"] else min(left, int(limit[0]) - int(used[0]) + cached)
    except (OSError, ValueError):
        return left


def memory_total() -> int:
    """Return the bytes of memory, within the limit of the container."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int((CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # no container, or no limit ("max")
        return total

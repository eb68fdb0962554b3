"""Processes that measure in turns on one machine, so that other load changes the times of all of them."""

import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

STATUS = Path("/proc/self/status")  # on Linux
PEAK = "peak\n"  # asks for memory instead of a time


class Worker:
    """A process that measures, each time it is asked.

    It prints a line that starts with `ready` when it has warmed up, with a JSON object about itself if it wants to.
    Then it answers each line of its input with a time in milliseconds. about: the object.

    changed: environment variables to set.
    limit: seconds of CPU time after which the process is ended.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        changed: Mapping[str, str] = MappingProxyType({}),
        limit: int | None = None,
    ):
        self.name, pipe = name, subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | changed,
            stdin=pipe,
            stdout=pipe,
            text=True,
            preexec_fn=None if limit is None else lambda: _limit_seconds(limit),
        )
        while not (line := self._line()).startswith("ready"):
            pass
        self.about: dict[str, Any] = json.loads(line.removeprefix("ready").strip() or "{}")

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            too_slow = self.process.wait() == -signal.SIGXCPU
            sys.exit(f"error: {self.name}: the measurement {'took too long' if too_slow else 'ended, see above'}")
        return line

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def measure(self) -> float:
        """Return the time of one measurement in milliseconds."""
        return self._ask("\n")

    def peak_bytes(self) -> int:
        """Return the peak resident memory of the process. It must use `serve`."""
        return int(self._ask(PEAK))

    def _ask(self, line: str) -> float:
        with contextlib.suppress(BrokenPipeError):  # it ended; _line says so
            self.process.stdin.write(line)
            self.process.stdin.flush()
        return float(self._line())


def _limit_seconds(limit: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def serve(measure: Callable[[], float], about: Mapping[str, Any]) -> None:
    """Be the process of a Worker: warm up before this call. measure: returns seconds."""
    print("ready", json.dumps(about), flush=True)
    for line in sys.stdin:
        print(peak_resident_bytes() if line == PEAK else 1000 * measure(), flush=True)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process. On Linux, getrusage also counts the process that started it."""
    if STATUS.exists():
        return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split()[0])
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def alternate(workers: Mapping[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Return the times of each worker, one in each round. Every second round goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    for number in range(rounds):
        for name in list(workers)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(workers[name].measure())
    return times


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return our time over theirs in each round."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the lower quartile, the median and the upper quartile of at least two values."""
    return dict(zip(("lower", "median", "upper"), statistics.quantiles(values, n=4), strict=True))

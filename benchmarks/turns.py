"""Processes that measure in turns on one machine, so that other load changes the times of all of them."""

import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mini_gpt.runtime.errors import UserError

STATUS = Path("/proc/self/status")  # on Linux
ANSWER = "answer "  # begins a line of a worker; libraries print other lines
LONGEST_REASON = 300  # characters


class Worker:
    """A process that measures, each time it is asked. It calls `serve`, or prints the same lines.

    about: what it said when it had warmed up.
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
        """Start it and wait until it is ready. Raises UserError if it ends before."""
        self.name, self._files = name, tempfile.TemporaryDirectory()
        self._log = Path(self._files.name) / "log"
        with self._log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                # Not by preexec_fn: a fork beside the threads of JAX may hang.
                command if limit is None else ["sh", "-c", 'ulimit -St "$0"; exec "$@"', str(limit), *command],
                cwd=directory,
                env=os.environ | changed,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.about: dict[str, Any] = self._answer()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        """End the process, and copy its log to stderr."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(FileNotFoundError):  # it has been copied
            sys.stderr.write(self._log.read_text(encoding="utf-8", errors="replace"))
        self._files.cleanup()

    def measure(self) -> float:
        """Return one measurement. Raises UserError if the process has ended."""
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return float(self._answer())

    def finish(self) -> dict[str, Any]:
        """Let the process end, and return what it says last."""
        self.process.stdin.close()
        return self._answer()

    def _answer(self) -> Any:
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        reason = why(self.process.wait(), self._log)
        self.__exit__()
        raise UserError(f"{self.name}: {reason}")


def why(status: int, log: Path) -> str:
    """Return why a process failed: the last line that it wrote to its log, or its signal."""
    if status == -signal.SIGXCPU:
        return "the measurement took too long"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:LONGEST_REASON] if lines else f"exit status {status}"


def serve(about: Mapping[str, Any], measure: Callable[[], float], finish: Callable[[], Mapping[str, Any]]) -> None:
    """Be the process of a `Worker`: say `about`, measure for each line of stdin, and say at its end what finish says.

    measure: in milliseconds; call this when it has warmed up.
    """
    print(ANSWER + json.dumps(about), flush=True)
    for _ in sys.stdin:
        print(ANSWER + json.dumps(measure()), flush=True)
    print(ANSWER + json.dumps(finish()), flush=True)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process. On Linux, getrusage also counts the process that started it."""
    if STATUS.exists():
        return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split()[0])
    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def alternate(workers: Mapping[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Return the measurements of each worker, one in each round. Every second round goes backwards."""
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

"""Processes of the parts: each has a time limit, and ends with a result or with a reason in one line.

A part writes its result so far as one line of JSON, each time it has more. So a part that is stopped or crashes keeps
what it has.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mini_gpt.runtime.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
LONGEST_REASON = 300  # characters
ANSWER = "answer "  # begins a line of a worker; libraries print other lines


class Outcome(NamedTuple):
    """What became of a process. result: the last that it wrote; reason: why it failed, or None."""

    result: dict[str, Any]
    reason: str | None
    seconds: float


def run(arguments: list[str], limit: float, log: Path, environment: Mapping[str, str] = os.environ) -> Outcome:
    """Run Python with these arguments for at most `limit` seconds; write what it prints on stderr to a file."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as written, log.open("w", encoding="utf-8") as errors:
        command = [sys.executable, *arguments]
        # A session of its own, so that its children, such as the compilers of PyTorch, are stopped with it.
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=written, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _stop_session(process)
        written.seek(0)
        result = _last_object(written.read())
    reason = None
    if status is None:
        reason = f"stopped at its limit of {limit:g} s"
    elif status != 0:
        reason = why(status, log)
    elif not result:
        reason = "it wrote no result"
    return Outcome(result, reason, time.monotonic() - began)


def why(status: int, log: Path) -> str:
    """Return why a process failed: the last line that it wrote to its log, or its signal."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:LONGEST_REASON] if lines else f"exit status {status}"


def _stop_session(process: subprocess.Popen) -> None:
    """Stop a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_object(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the last line is cut if the process was stopped while it wrote
        if isinstance(found, dict):
            return found
    return {}


def write(result: dict[str, Any]) -> None:
    """Write the result so far, in a part's process."""
    print(json.dumps(result, allow_nan=False), flush=True)


class Worker:
    """A process that measures each time it is asked, so that two programs can take turns.

    info: what it wrote before its first measurement.
    """

    def __init__(self, arguments: list[str]):
        """Start it and wait until it is ready. Raises UserError if it ends before."""
        self.name = arguments[1]
        self.directory = tempfile.TemporaryDirectory()
        self.log = Path(self.directory.name) / "log"
        with self.log.open("w", encoding="utf-8") as errors:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            self.process = subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY, **pipes)
        self.info: dict[str, Any] = json.loads(self._answer())

    def measure(self) -> float:
        """Return one measurement. Raises UserError if the process has ended."""
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return float(self._answer())

    def finish(self) -> dict[str, Any]:
        """End the process, and return what it wrote last."""
        self.process.stdin.close()
        return json.loads(self._answer())

    def stop(self) -> None:
        """Stop the process if it still runs, and copy its log to stderr."""
        self.process.kill()
        self.process.wait()
        sys.stderr.write(self.log.read_text(encoding="utf-8", errors="replace"))
        self.directory.cleanup()

    def _answer(self) -> str:
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER)
        reason = why(self.process.wait(), self.log)
        self.stop()
        raise UserError(f"{self.name}: {reason}")


def serve(info: dict[str, Any], measure: Callable[[], float], finish: Callable[[], dict[str, Any]]) -> None:
    """Answer a `Worker`: write the info, a measurement for each line of stdin, and at its end what `finish` returns."""
    print(ANSWER + json.dumps(info), flush=True)
    for _ in sys.stdin:
        print(ANSWER + json.dumps(measure()), flush=True)
    print(ANSWER + json.dumps(finish()), flush=True)

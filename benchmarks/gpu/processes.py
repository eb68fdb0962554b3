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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import turns

REPOSITORY = Path(__file__).resolve().parents[2]


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
        reason = turns.why(status, log)
    elif not result:
        reason = "it wrote no result"
    return Outcome(result, reason, time.monotonic() - began)


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

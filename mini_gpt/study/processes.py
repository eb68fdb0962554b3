"""Start a process of a study in a slot, with a JSON object as its standard input."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from mini_gpt.study.machine import Slot

ROOT = Path(__file__).parents[2]


def start(module: str, content: Mapping[str, Any], slot: Slot, **streams: Any) -> subprocess.Popen:
    """Start `python -m module` in a process group of its own, on the cores and with the environment of a slot.

    The process gets `content` and the id of this process ("parent").

    streams: stdout and stderr, as of Popen.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **slot.environment, "PYTHONPATH": paths}
    command = [sys.executable, "-m", module]
    hang_up = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the process would ignore it, and could not be stopped
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, env=environment, start_new_session=True, **streams
    )
    signal.signal(signal.SIGHUP, hang_up)
    if slot.cores is not None:  # before JAX starts: its thread pools have the size of the affinity
        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process(process.pid).cpu_affinity(slot.cores)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(dict(content) | {"parent": os.getpid()}))
        process.stdin.close()
    process.stdin = None  # so that `communicate` does not use it
    return process

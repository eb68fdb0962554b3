"""Start a process of a study in a slot, with a connection to it: see mini_gpt/study/child.py."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from mini_gpt.study.child import MOST_BYTES
from mini_gpt.study.machine import Slot

ROOT = Path(__file__).parents[2]


class Process(subprocess.Popen):
    """A process with a connection to it, which stays open until `close` or until this process dies."""

    connection: socket.socket

    def close(self) -> str:
        """Close the connection, and return the reason of a failure that the process has sent, or ""."""
        with self.connection, contextlib.suppress(OSError):  # nothing was sent, or the process ended before it read
            return self.connection.recv(MOST_BYTES, socket.MSG_DONTWAIT).decode(errors="replace")
        return ""


def start(module: str, content: Mapping[str, Any], slot: Slot, **streams: Any) -> Process:
    """Start `python -m module` in a process group of its own, on the cores and with the environment of a slot.

    content: the job, which `child.receive` returns in the new process.
    streams: stdout and stderr, as of Popen.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **slot.environment, "PYTHONPATH": paths}
    command = [sys.executable, "-m", module]
    connection, stdin = socket.socketpair()
    hang_up = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the process would ignore it, and could not be stopped
    with stdin:
        process = Process(command, stdin=stdin.fileno(), text=True, env=environment, start_new_session=True, **streams)
    signal.signal(signal.SIGHUP, hang_up)
    process.connection = connection
    if slot.cores is not None:  # before JAX starts: its thread pools have the size of the affinity
        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process(process.pid).cpu_affinity(slot.cores)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(json.dumps(dict(content)).encode() + b"\n")
    return process

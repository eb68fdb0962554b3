"""A process of a study: its start in a slot, its job, and its end with its parent.

Its standard input is a connection to its parent. The job comes through it, as one line of JSON. If the connection
closes, the parent has died.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import psutil

from mini_gpt.runtime import files
from mini_gpt.study.machine import Slot

ROOT = Path(__file__).parents[2]
WORKER = "mini_gpt.study.worker"
STOP = signal.SIGHUP  # not SIGTERM: a second SIGTERM ends a run unsaved, and a scheduler may have sent the first


class Process(subprocess.Popen):
    """A process with a connection to it, which stays open until this process dies."""

    connection: socket.socket

    def send_to_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS then denies the permission
            os.killpg(self.pid, number)


def locked_log(path: Path) -> TextIO | None:
    """Return the log of a run, locked, or None if another process has it.

    The run's process inherits the lock, so the lock lasts until that process ends, even if this one is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    if files.lock(file):
        return file
    file.close()
    return None


def start(module: str, content: Mapping[str, Any], slot: Slot, **streams: Any) -> Process:
    """Start `python -m module` in a process group of its own, on the cores and with the environment of a slot.

    content: the job, which `receive` returns in the new process.
    streams: stdout, stderr and cwd, as of Popen.
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


def receive() -> dict[str, Any]:
    """Return the job of this process. If its parent dies, it receives SIGHUP."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        sys.exit(128 + signal.SIGHUP)
    threading.Thread(target=_hang_up_with_parent, daemon=True).start()
    return json.loads(line)


def _hang_up_with_parent() -> None:
    with contextlib.suppress(ConnectionResetError):
        os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read: it would hold a lock that Python needs when it exits
    os.kill(os.getpid(), signal.SIGHUP)

"""The processes of a study: each runs a module in a slot, and is connected to the process that started it.

The connection is the standard input of the new process. It brings the job, one line of JSON. If it closes, the process
that started the new one has died, and the new one hangs up. The reason of a failure goes back through it: a full disk
can't lose it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from mini_gpt.runtime import errors
from mini_gpt.study.machine import Slot

ROOT = Path(__file__).parents[2]
MOST_BYTES = 4096  # of a reason


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

    content: the job, which `receive` returns in the new process.
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


def receive() -> dict[str, Any]:
    """Return the job of this process. If the process that started it dies, this one receives SIGHUP."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        sys.exit(128 + signal.SIGHUP)
    threading.Thread(target=_hang_up_with_parent, daemon=True).start()
    return json.loads(line)


def _hang_up_with_parent() -> None:
    with contextlib.suppress(ConnectionResetError):
        os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read: it would hold a lock that Python needs when it exits
    os.kill(os.getpid(), signal.SIGHUP)


def run(main: Callable[[], None]) -> None:
    """Run the main function of a process like `errors.run`, and send back the reason of a failure."""
    try:
        errors.run(main)
    except BaseException as stop:
        reason = stop.code if isinstance(stop, SystemExit) else traceback.format_exception_only(stop)[0]
        if isinstance(reason, str):
            with contextlib.suppress(OSError):  # the process that started this one has died
                os.write(sys.stdin.fileno(), reason.encode(errors="replace")[:MOST_BYTES])
        raise

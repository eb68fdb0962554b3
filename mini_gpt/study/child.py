"""A process of a study, seen from inside: its job, its end with its parent, and the reason of its failure.

Its standard input is a connection to its parent. The job comes through it, as one line of JSON. If the connection
closes, the parent has died. The reason of a failure goes back through it: the log may be on a full disk.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from mini_gpt.runtime import program

MOST_BYTES = 4096  # of a reason


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


def run(main: Callable[[], None]) -> None:
    """Run the main function of a process like `program.run`, and send back the reason of a failure."""
    try:
        program.run(main)
    except BaseException as stop:
        reason = stop.code if isinstance(stop, SystemExit) else traceback.format_exception_only(stop)[0]
        if isinstance(reason, str):
            with contextlib.suppress(OSError):  # the parent has died
                os.write(sys.stdin.fileno(), reason.encode(errors="replace")[:MOST_BYTES])
        raise

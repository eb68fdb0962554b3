"""How a run hears that it must stop: SIGTERM (SLURM, cloud TPUs, Kubernetes) and SIGINT, agreed on by all processes."""

import contextlib
import os
import signal
from collections.abc import Iterator

from jax.experimental import multihost_utils

from mini_gpt.runtime import processes

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """heard: the signal that came to this process. signal: that by which the run ends, in all processes alike."""

    def __init__(self):
        self.heard: int | None = None
        self.signal: int | None = None

    def reached(self, step: int) -> bool:
        """Says whether the run ends with this step; must be asked after every step, by all processes."""
        if not processes.are_several():
            self.signal = self.heard
        elif multihost_utils.reached_preemption_sync_point(step):
            self.signal = self.heard or signal.SIGTERM  # which may have come to another process
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """What shells give for a process that a signal ended: 143 for SIGTERM, 130 for SIGINT."""
        return 128 + self.signal


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Turns the first signal into a request, and a second one into an exit at once; what is on disk stays whole.

    Of several processes, JAX's own handler takes SIGTERM and tells the others; SIGINT is passed on to it.
    """
    request = StopRequest()

    def hear(number: int, _) -> None:
        if request.heard is not None:
            os._exit(128 + number)
        request.heard = number
        if processes.are_several():
            os.kill(os.getpid(), signal.SIGTERM)
        # Not by the logger, or print: the signal may have come in the midst of either.
        os.write(2, b"\nsaving after this step; the same signal again leaves at once\n")

    heard = [signal.SIGINT] if processes.are_several() else SIGNALS
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

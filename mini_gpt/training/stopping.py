"""Stopping a run by SIGTERM (SLURM, cloud TPUs, Kubernetes) or SIGINT, at the same step in all processes."""

import contextlib
import os
import signal
from collections.abc import Iterator

from jax.experimental import multihost_utils

from mini_gpt.runtime import processes


class StopRequest:
    """received: the signal of this process. signal: the signal that ends the run, the same in all processes."""

    def __init__(self):
        self.received: int | None = None
        self.signal: int | None = None

    def reached(self, step: int) -> bool:
        """Whether the run ends with this step. All processes must call it after every step."""
        if not processes.are_several():
            self.signal = self.received
        elif multihost_utils.reached_preemption_sync_point(step):
            self.signal = self.received or signal.SIGTERM  # another process may have received it
        return self.signal is not None


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Turn the first signal into a request to stop; the second exits at once. Files on disk stay whole.

    With several processes, JAX's own handler receives SIGTERM and informs the others; SIGINT is forwarded to it.
    """
    request = StopRequest()

    def receive(number: int, _: object) -> None:
        if request.received is not None:
            os._exit(128 + number)
        request.received = number
        if processes.are_several():
            os.kill(os.getpid(), signal.SIGTERM)
        # os.write, not the logger or print: the signal may have interrupted either.
        os.write(2, b"\nstopping: saving after this step; send the signal again to exit at once\n")

    handled = [signal.SIGINT] if processes.are_several() else [signal.SIGTERM, signal.SIGINT]
    before = {number: signal.signal(number, receive) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

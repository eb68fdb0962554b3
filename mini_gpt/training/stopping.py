"""Stopping a run by SIGTERM (SLURM, cloud TPUs, Kubernetes), SIGINT or SIGHUP, at the same step in all processes."""

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from jax.experimental import multihost_utils

from mini_gpt.runtime import processes

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@dataclasses.dataclass
class StopRequest:
    """A request to stop.

    received: the signal to this process.
    agreed: with several processes, the signal that ends the run; set at the same step in all of them.
    """

    received: int | None = None
    agreed: int | None = None

    @property
    def signal(self) -> int | None:
        """The signal that ends the run."""
        return self.agreed if processes.are_several() else self.received

    def reached(self, step: int) -> bool:
        """Return whether the run ends with this step. All processes must call it after every step."""
        if processes.are_several() and multihost_utils.reached_preemption_sync_point(step):
            self.agreed = self.received or signal.SIGTERM  # another process may have received it
        return self.signal is not None


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Let SIGINT end the process at once in the block. Python's own handler would wait for the compiler."""
    is_pythons = signal.getsignal(signal.SIGINT) == signal.default_int_handler  # not ignored, and no other handler
    with handled([signal.SIGINT] if is_pythons else [], signal.SIG_DFL):
        yield


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle signals by `handler` in the block. If SIGHUP was ignored (nohup), it stays ignored.

    Python allows handlers in the main thread only; in another one, signals are left as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    numbers = [number for number in numbers if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Yield a StopRequest. The first signal sets it, a second signal exits at once. Files on disk stay intact.

    With several processes, JAX's SIGTERM handler informs the others, and ignores a second SIGTERM. The other signals
    are converted to SIGTERM. A second SIGHUP does nothing: a closing terminal can send two.
    """
    request, several = StopRequest(), processes.are_several()

    def receive(number: int, _: FrameType | None) -> None:
        if request.received is not None:
            if number == signal.SIGHUP:
                return
            os._exit(128 + number)
        request.received = number
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        # os.write: the signal may have interrupted the logger or print.
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, b"\nstopping: saving after this step; send the signal again to exit at once\n")

    numbers = [signal.SIGINT, signal.SIGHUP] + ([] if several else [signal.SIGTERM])
    with handled(numbers, receive):
        yield request

"""A time limit for tests of untrusted files."""

import contextlib
import signal


@contextlib.contextmanager
def seconds(count):
    """Raise TimeoutError if the block takes over `count` seconds, e.g. because it waits for a FIFO."""

    def late(*_):
        raise TimeoutError(f"not finished after {count} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(count)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

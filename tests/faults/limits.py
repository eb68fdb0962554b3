"""What tests of files from strangers share: a limit of time."""

import contextlib
import signal


@contextlib.contextmanager
def seconds(count):
    """Fails where a block takes longer, as one that waits for a FIFO would."""

    def late(*_):
        raise TimeoutError(f"still at work after {count} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(count)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)

"""What a long evaluation shows of itself: its cost before it is spent, and how much of that is done."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

from mini_gpt.runtime import processes

SECONDS_BETWEEN_LINES = 30.0
log = logging.getLogger(__name__)

Advance = Callable[[int], None]


def silent(tokens: int) -> None:
    """Shows nothing: for what is scored while training."""
    del tokens


@contextlib.contextmanager
def shown(what: str, cost: int) -> Iterator[Advance]:
    """States the cost in tokens, and gives what is told of those done: a bar, or lines where there is no terminal."""
    log.info(f"{what}: {cost:,} tokens go through the model")
    done, last_line = 0, time.monotonic()
    disable = None if processes.is_first() else True  # None: where there is no terminal
    with tqdm(total=cost, unit="token", unit_scale=True, disable=disable, leave=False) as bar:

        def advance(tokens: int) -> None:
            nonlocal done, last_line
            tokens = min(tokens, cost - done)  # the last batch of a windowing is filled up with rows that do not count
            done += tokens
            bar.update(tokens)
            if bar.disable and time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                log.info(f"{done:,} of {cost:,} tokens done")
                last_line = time.monotonic()

        yield advance

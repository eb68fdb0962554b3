"""Progress of a long evaluation in tokens, as a progress bar on a terminal or else as log lines."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from tqdm import tqdm

from mini_gpt.runtime import processes

SECONDS_BETWEEN_LINES = 30.0
SECONDS_TO_FIRST_LINE = 5.0  # after the first batch, whose time is mostly compilation
log = logging.getLogger(__name__)

_count: ContextVar[Callable[[int], None] | None] = ContextVar("count", default=None)  # of the progress that is shown


def advance(tokens: int) -> None:
    """Add tokens that the model has processed to the progress that is shown; without one, do nothing."""
    if count := _count.get():
        count(tokens)


@contextlib.contextmanager
def shown(title: str, cost: int) -> Iterator[None]:
    """Log the cost in tokens. Within the context, show how many tokens were processed, and the time that is left."""
    log.info(f"{title}: {cost:,} tokens go through the model")
    done, first, began, next_line = 0, 0, 0.0, 0.0
    with bar(cost, "token") as shown_bar:

        def count(tokens: int) -> None:
            nonlocal done, first, began, next_line
            tokens, now = min(tokens, cost - done), time.monotonic()  # the cost may be an estimate
            done += tokens
            shown_bar.update(tokens)
            if not began:
                first, began, next_line = done, now, now + min(SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES)
            elif shown_bar.disable and now > next_line and done > first:
                left = duration((cost - done) * (now - began) / (done - first))
                log.info(f"{done:,} of {cost:,} tokens done, about {left} left")
                next_line = now + SECONDS_BETWEEN_LINES

        token = _count.set(count)
        try:
            yield
        finally:
            _count.reset(token)


def bar(total: int, unit: str) -> tqdm:
    """Return a progress bar, which shows nothing without a terminal or in other processes than the main one."""
    disable = None if processes.is_main_process() else True  # None: disabled without a terminal
    return tqdm(total=total, unit=unit, unit_scale=True, disable=disable, leave=False)


def duration(seconds: float) -> str:
    """Return a duration in words, such as 40 s, 12 min or 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

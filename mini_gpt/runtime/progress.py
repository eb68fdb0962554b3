"""Progress of a long evaluation in tokens, as a progress bar."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from tqdm import tqdm

from mini_gpt.runtime import processes

SECONDS_BETWEEN_LINES = 30.0  # without a terminal
log = logging.getLogger(__name__)

_count: ContextVar[Callable[[int], object] | None] = ContextVar("count", default=None)  # of the progress that is shown


def advance(tokens: int) -> None:
    """Add tokens that the model has processed to the progress that is shown; without one, do nothing."""
    if count := _count.get():
        count(tokens)


@contextlib.contextmanager
def shown(title: str, cost: int) -> Iterator[None]:
    """Log the cost in tokens. Within the context, show how many tokens were processed, and the time that is left."""
    log.info(f"{title}: {cost:,} tokens go through the model")
    with bar(cost, "token") as shown_bar:
        token = _count.set(lambda tokens: shown_bar.update(min(tokens, cost - shown_bar.n)))  # cost may be an estimate
        try:
            yield
        finally:
            _count.reset(token)


def bar(total: int, unit: str) -> tqdm:
    """Return a progress bar of the main process; without a terminal, it is a line every 30 seconds."""
    every = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    times = {"mininterval": every, "maxinterval": max(10.0, every), "delay": every}
    return tqdm(total=total, unit=unit, unit_scale=True, disable=not processes.is_main_process(), leave=False, **times)


def duration(seconds: float) -> str:
    """Return a duration in words, such as 40 s, 12 min or 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

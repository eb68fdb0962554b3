"""The time of a suite: how much of its work fits into `--minutes`, and what it leaves out.

Without a budget, as in a study, everything is measured, and nothing depends on the clock.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.runtime import processes, progress, sharding

BATCH_TOKENS = 1024  # at most, with a budget: a batch is the unit of work
RESERVE = 0.15  # of the time, for figures, and for batches that take longer than the measured ones
PROBE = 0.05  # of the time, in which batches are measured before their number is chosen

Item = TypeVar("Item")
log = logging.getLogger(__name__)


class Budget:
    """The time of a suite.

    minutes: from now on.
    earlier: {name: number of items} of an earlier result, to measure the same again.
    """

    def __init__(self, minutes: float, earlier: Mapping[str, int]):
        self.minutes, self.earlier = minutes, earlier
        self.chosen: dict[str, tuple[int, int]] = {}  # {name: (number of items, number of all)} so far
        self.end = time.monotonic() + 60 * minutes * (1 - RESERVE)

    @property
    def left_out(self) -> str | None:
        """What was measured of what there is, such as "96 of 1,024 texts, --minutes=5"; None if this is everything."""
        cut = [f"{count:,} of {every:,} {name}" for name, (count, every) in self.chosen.items() if count < every]
        return f"{', '.join(cut)}, --minutes={self.minutes:g}" if cut else None

    def record(self, name: str, count: int, every: int) -> None:
        self.chosen[name] = (int(count), int(every))
        if count < every:
            log.info(f"--minutes={self.minutes:g}: {count:,} of {every:,} {name}")


current: ContextVar[Budget | None] = ContextVar("budget", default=None)  # of the suite that is measured


@contextlib.contextmanager
def limited(minutes: float | None, earlier: Mapping[str, int]) -> Iterator[Budget | None]:
    """Set the current budget within the context: none if `minutes` is None. Takes the arguments of `Budget`."""
    token = current.set(None if minutes is None else Budget(minutes, earlier))
    try:
        yield current.get()
    finally:
        current.reset(token)


def shown(title: str, cost: int) -> contextlib.AbstractContextManager[None]:
    """Show progress as `progress.shown` does; log the time instead if there is a budget, since it changes the cost."""
    if (budget := current.get()) is None:
        return progress.shown(title, cost)
    log.info(f"{title}: about {progress.duration(60 * budget.minutes)} (--minutes={budget.minutes:g})")
    return contextlib.nullcontext()


def spread(count: int) -> list[int]:
    """Return 0..count - 1 in an order whose beginnings are spread evenly: by their bits in reverse order."""
    return sorted(range(count), key=lambda number: f"{number:032b}"[::-1])


def within(name: str, batches: Iterable[tuple[int, Item]], share: float = 1.0) -> Iterator[tuple[int, Item]]:
    """Yield each (number of rows, batch); with a budget, those that fit in a share of the time that is left.

    These are the first in the order of `spread`, at least one. Their number is chosen after PROBE of the time, from
    the second batch on, because the first is also compiled. If all fit, this is checked again after each batch.
    """
    if (budget := current.get()) is None:
        yield from batches
        return
    batches = list(batches)
    order = spread(len(batches))
    rows = np.cumsum([batches[index][0] for index in order])
    began = compiled = time.monotonic()
    end, most = began + share * (budget.end - began), len(order)
    if name in budget.earlier:
        most = max(1, int((rows <= budget.earlier[name]).sum()))
    budget.record(name, rows[most - 1], rows[-1])
    for number, index in enumerate(order):
        if number > 0 and most == len(order) and name not in budget.earlier:
            now = time.monotonic()
            compiled = now if number == 1 else compiled
            if now >= end:
                most = number
            elif number > 1 and now - compiled >= PROBE * (end - began):
                most = number + int((end - now) / (now - compiled) * (number - 1))
            most = processes.of_main_process(min(most, len(order)))
            budget.record(name, rows[most - 1], rows[-1])
        if number == most:
            break
        yield batches[index]


def fit(name: str, costs: Sequence[float] | np.ndarray, seconds: Callable[[], float], share: float = 1.0) -> int:
    """Return how many of the first items fit in a share of the time that is left, at least one; without a budget, all.

    costs: of each item.
    seconds: measures the time of an item of cost 1.
    """
    if (budget := current.get()) is None:
        return len(costs)
    if name in budget.earlier:
        count = budget.earlier[name]
    else:
        needed = np.cumsum(costs) * seconds()
        count = processes.of_main_process(int((needed <= share * (budget.end - time.monotonic())).sum()))
    count = min(len(costs), max(1, count))
    budget.record(name, count, len(costs))
    return count


def timed(work: Callable[[], Any]) -> float:
    """Do the work twice, and return the seconds of the second time, in which nothing is compiled."""
    work()
    began = time.monotonic()
    work()
    return time.monotonic() - began


def forward_seconds(model: LoadedModel, length: int) -> float:
    """Return the measured seconds per token of a forward pass in rows of `length`."""
    rows = model.rows_at_a_time(length)
    sizes = (length, length, *([model.config.source_length] if model.config.model.has_encoder else []))
    arrays = sharding.put_whole([np.zeros((rows, size), np.int32) for size in sizes], model.mesh)
    return timed(lambda: jax.block_until_ready(model.nll(*arrays))) / (rows * length)

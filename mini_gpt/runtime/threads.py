"""Calls of a function in several threads, with results in order."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield function(item) for each item, in order. Up to `threads` calls run at the same time.

    The first call runs alone, so that a jitted function is compiled only once. Items are taken as they are needed: an
    error of a call is raised here, and no more items are taken.
    """
    items = iter(items)
    if threads == 1:
        yield from map(function, items)
        return
    yield from map(function, itertools.islice(items, 1))
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > threads:  # one more than run, so that no thread waits
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

"""Results in order, how many calls run at the same time, and errors."""

import threading
import time

import pytest

from mini_gpt.runtime.threads import in_order


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_have_the_order_of_the_items(count, threads):
    def slow_if_even(item):
        time.sleep(0.003 if item % 2 == 0 else 0)
        return item * item

    assert list(in_order(slow_if_even, range(count), threads)) == [item * item for item in range(count)]


def test_calls_run_at_the_same_time_after_the_first():
    both, seen = threading.Barrier(2, timeout=20), []

    def call(item):
        seen.append(item)
        if item:
            both.wait()  # fails unless two calls wait together

    results = in_order(call, range(5), 2)
    next(results)
    assert seen == [0]
    assert len(list(results)) == 4


@pytest.mark.parametrize("threads", [1, 3])
def test_items_are_taken_as_they_are_needed(threads):
    taken = []
    items = (taken.append(item) or item for item in range(100))
    results = in_order(abs, items, threads)
    next(results), next(results)
    assert len(taken) <= 2 + threads
    results.close()
    assert len(taken) <= 2 + threads


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_ends_the_calls(threads):
    seen = []

    def call(item):
        seen.append(item)
        if item == 3:
            raise ValueError("item 3")
        return item

    results = in_order(call, range(100), threads)
    with pytest.raises(ValueError, match="item 3"):
        list(results)
    assert len(seen) <= 4 + threads + 1

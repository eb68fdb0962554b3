"""Batches of one shape from any number of items."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def in_full_batches(items: Sequence[Any] | np.ndarray, batch_size: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield (count, batch): lists of `batch_size` items, of which the first `count` are new.

    Copies of its first item fill the last batch, so that a jitted function sees one shape.
    """
    for first in range(0, len(items), batch_size):
        batch = list(items[first : first + batch_size])
        yield len(batch), batch + batch[:1] * (batch_size - len(batch))

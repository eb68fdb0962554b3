"""Batches are a function of seed and step: step n has the same rows after a resume and on any number of hosts."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from mini_gpt.config.schema import Config

Batch = dict[str, np.ndarray]  # inputs, targets: int32; weights: float32, of targets; source: int32, for an encoder
PADDING = -1  # in sources


class Batches(Protocol):
    """Training batches; `self[step]` is the batch of a step, counted from 0.

    rows_per_epoch: the number of different rows, each of which an epoch uses once; None: the rows are endless.
    """

    @property
    def rows_per_epoch(self) -> int | None: ...

    def __getitem__(self, step: int) -> Batch: ...


def iterate(batches: Batches, start: int, count: int) -> Iterator[Batch]:
    """Yield `count` batches from step `start` on, prefetched by a thread."""
    dataset = grain.MapDataset.range(start, start + count).map(batches.__getitem__)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def in_full_batches(items: Sequence[Any] | np.ndarray, batch_size: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield (count, batch). A batch has `batch_size` items; those after the first `count` are padding.

    The last batch is padded with copies of its first item, so that jitted functions compile for one shape.
    """
    for first in range(0, len(items), batch_size):
        batch = list(items[first : first + batch_size])
        yield len(batch), batch + batch[:1] * (batch_size - len(batch))


def windows(
    tokens: np.ndarray, starts: Sequence[int] | np.ndarray, length: int, first: int | None = None
) -> np.ndarray:
    """Return the windows of a stream that begin at `starts`, as int32 [len(starts), length].

    first: the token of an imported model that each row begins with, `Tokenizer.first`; it replaces that of the stream.
    """
    return begun(tokens[np.add.outer(starts, np.arange(length))].astype(np.int32), first)


def begun(rows_BL: np.ndarray, first: int | None) -> np.ndarray:
    """Return the rows with `first` as their first token; None: as they are."""
    if first is None:
        return rows_BL
    rows_BL = rows_BL.copy()
    rows_BL[:, 0] = first
    return rows_BL


def evenly_spaced(num_tokens: int, length: int, count: int) -> np.ndarray:
    """Return the starts of `count` evenly spaced windows in a stream of `num_tokens`."""
    return np.linspace(0, num_tokens - length, count).astype(int)


def next_token_batch(windows_BM: np.ndarray) -> Batch:
    """Return the batch of windows_BM, with M = L + 1. All weights are 1."""
    targets_BL = windows_BM[:, 1:]
    return {"inputs": windows_BM[:, :-1], "targets": targets_BL, "weights": np.ones(targets_BL.shape, np.float32)}


def padding_shares(batch: Batch) -> tuple[float, float]:
    """Return the shares of padding in the rows of sources and in those of targets."""
    return float((batch["source"] == PADDING).mean()), float((batch["weights"] == 0).mean())


def shapes(config: Config) -> dict[str, tuple[tuple[int, int], type]]:
    """Return the shape and the dtype of each array of a training batch."""
    rows = config.train.batch_size
    target = (rows, config.context_length)
    found: dict[str, tuple[tuple[int, int], type]]
    found = {"inputs": (target, np.int32), "targets": (target, np.int32), "weights": (target, np.float32)}
    return found | ({"source": ((rows, config.source_length), np.int32)} if config.model.has_encoder else {})

"""Batches are a function of seed and step: step n has the same rows after a resume and on any number of hosts."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import UserError

Batch = dict[str, np.ndarray]


class Batches(Protocol):
    """Training batches; `self[step]` is the batch of a step, counted from 0."""

    def __getitem__(self, step: int) -> Batch: ...


class TrainBatches:
    """The training batches of a text; `self[step]` is the batch of a step, counted from 0.

    Each epoch cuts the text from a random offset on into windows of the context length, and uses each once, shuffled.
    weights: 1 for targets that count in the loss, else 0. vocab_size: also the id of the mask token. rows: the rows
    of the global batch on this host; None: all. Raises UserError if the split is too short.
    """

    def __init__(self, tokens: np.ndarray, config: Config, *, vocab_size: int, rows: Sequence[int] | None = None):
        self.config = config
        self.vocab_size = vocab_size
        self.rows = range(config.train.batch_size) if rows is None else rows
        length, targets = config.context_length, len(tokens) - 1
        if targets < length:
            remedy = f"context_length={length} needs at least {length + 1}"
            raise UserError(f"data.corpus: the train split has {len(tokens)} tokens; {remedy}")
        # Keep at least one window. Keep further windows only if the slack, the largest offset, is at least length - 1.
        self.windows = max(1, (targets - (length - 1)) // length)
        self.slack = targets - self.windows * length
        self.order = grain.MapDataset.range(self.windows).shuffle(config.data.seed).repeat()
        self.tokens = np.asarray(tokens)  # still memory-mapped, but indexing is faster than with np.memmap
        self._offset = functools.lru_cache(maxsize=2)(self._draw_offset)  # a draw is slower than cutting a window

    def __getitem__(self, step: int) -> Batch:
        config = self.config
        indices = [step * config.train.batch_size + row for row in self.rows]
        starts_B = np.array([self._start(index) for index in indices])
        windows_BM = windows(self.tokens, starts_B, config.context_length + 1)
        if config.train.objective == "next_token":
            return next_token_batch(windows_BM)
        seeds = [(config.data.seed, index) for index in indices]
        return _masked_batch(windows_BM[:, :-1], config.train.mask_rate, self.vocab_size, seeds)

    def _start(self, index: int) -> int:
        return self._offset(index // self.windows) + int(self.order[index]) * self.config.context_length

    def _draw_offset(self, epoch: int) -> int:
        return int(np.random.default_rng((self.config.data.seed, epoch)).integers(self.slack + 1))


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


def windows(tokens: np.ndarray, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """Return the windows of a stream that begin at `starts`, as int32 [len(starts), length]."""
    return tokens[np.add.outer(starts, np.arange(length))].astype(np.int32)


def evenly_spaced(num_tokens: int, length: int, count: int) -> np.ndarray:
    """Return the starts of `count` evenly spaced windows in a stream of `num_tokens`."""
    return np.linspace(0, num_tokens - length, count).astype(int)


def masked_blocks(
    tokens: np.ndarray, config: Config, *, vocab_size: int, batch_size: int, seed: int
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of a stream's full blocks, as `in_full_batches` does. Masks depend on a block's start."""
    length = config.context_length
    for count, starts in in_full_batches(range(0, len(tokens) - length + 1, length), batch_size):
        blocks_BL = windows(tokens, starts, length)
        seeds = [(seed, start) for start in starts]
        yield count, _masked_batch(blocks_BL, config.train.mask_rate, vocab_size, seeds)


def next_token_batch(windows_BM: np.ndarray) -> Batch:
    """Return the batch of windows_BM, with M = L + 1. All weights are 1."""
    targets_BL = windows_BM[:, 1:]
    return {"inputs": windows_BM[:, :-1], "targets": targets_BL, "weights": np.ones(targets_BL.shape, np.float32)}


def _masked_batch(tokens_BL: np.ndarray, rate: float, mask_token: int, seeds: list[tuple[int, int]]) -> Batch:
    """Choose targets, then mask 80%, replace 10% and keep 10% (Devlin et al. 2019, 3.1). seeds: one per row."""
    length = tokens_BL.shape[1]
    rngs = [np.random.default_rng(seed) for seed in seeds]
    chosen_BL = np.stack([rng.random(length) for rng in rngs]) < rate
    uniform_BL = np.stack([rng.random(length) for rng in rngs])
    random_BL = np.stack([rng.integers(mask_token, size=length, dtype=np.int32) for rng in rngs])
    inputs_BL = np.where(chosen_BL & (uniform_BL < 0.8), mask_token, tokens_BL)
    inputs_BL = np.where(chosen_BL & (uniform_BL >= 0.9), random_BL, inputs_BL)
    return {"inputs": inputs_BL, "targets": tokens_BL, "weights": chosen_BL.astype(np.float32)}


def shapes(config: Config) -> dict[str, tuple[tuple[int, int], type]]:
    """Return the shape and the dtype of each array of a training batch."""
    rows = config.train.batch_size
    target = (rows, config.context_length)
    found: dict[str, tuple[tuple[int, int], type]]
    found = {"inputs": (target, np.int32), "targets": (target, np.int32), "weights": (target, np.float32)}
    return found | ({"source": ((rows, config.source_length), np.int32)} if config.model.encoder_layers else {})

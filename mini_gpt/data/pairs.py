"""Pairs of a source and a target, in rows that hold several pairs.

A row of sources is the tokens of its sources, and a row of targets those of its targets. A separator comes before each
text. The separator after a target is predicted too: it is the end of the target. Attention stays within a pair.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data.batches import PADDING, Batch, next_token_batch
from mini_gpt.runtime.errors import UserError

SOURCE_STEP = 16  # tokens, by which rows grow for sources longer than in training, so that few shapes are compiled
log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """The tokens of a source and of a target, without separators."""

    source: np.ndarray
    target: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The tokens that the pair takes in a row of sources and in a row of targets, with its separators."""
        return np.array([len(self.source) + 1, len(self.target) + 1])


def in_rows(pairs: Iterable[Pair], limits: tuple[int, int]) -> Iterator[list[Pair]]:
    """Yield the pairs of each row. A row ends before a pair that does not fit. limits: tokens of both rows."""
    row: list[Pair] = []
    total = np.zeros(2, int)
    for pair in pairs:
        if row and (total + pair.sizes > limits).any():
            yield row
            row, total = [], np.zeros(2, int)
        row.append(pair)
        total += pair.sizes
    yield row


def batch_of(rows: Sequence[Sequence[Pair]], separator: int, limits: tuple[int, int]) -> Batch:
    """Return the batch of rows of pairs.

    limits: tokens of a row of sources, and of a row of targets.

    The rows of sources are longer if a source is longer, by a multiple of SOURCE_STEP.
    """
    needed = max(sum(len(pair.source) + 1 for pair in row) for row in rows)
    size = limits[0] + max(0, -(-(needed - limits[0]) // SOURCE_STEP) * SOURCE_STEP)
    source_BS = np.full((len(rows), size), PADDING, np.int32)
    rows_BM = np.full((len(rows), limits[1] + 1), separator, np.int32)
    weights_BL = np.zeros((len(rows), limits[1]), np.float32)
    for row, pairs in enumerate(rows):
        for array_BM, side in ((source_BS, 0), (rows_BM, 1)):
            tokens = np.concatenate([part for pair in pairs for part in ([separator], pair[side])])
            array_BM[row, : len(tokens)] = tokens
        weights_BL[row, : len(tokens)] = 1
    return next_token_batch(rows_BM) | {"weights": weights_BL, "source": source_BS}


class StoredPairs(Sequence[Pair]):
    """The pairs of a split of a text, in which sources and targets alternate, with separators between them."""

    def __init__(self, tokens: np.ndarray, separator: int):
        self.tokens = np.asarray(tokens)
        ends = np.concatenate([[-1], np.flatnonzero(self.tokens == separator), [len(self.tokens)]])
        self.ends = ends[: len(ends) if len(self.tokens) else 1]

    def __len__(self) -> int:
        return len(self.ends) // 2

    def __getitem__(self, index):  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, middle, last = self.ends[2 * index : 2 * index + 3]
        return Pair(self.tokens[first + 1 : middle], self.tokens[middle + 1 : last])

    def fitting(self, config: Config, split: str) -> np.ndarray:
        """Return the indices of the pairs that fit in a training row. Raises UserError if there is none."""
        sizes_P2, limits = self.sizes_P2, (config.source_length, config.context_length)
        indices = np.flatnonzero((sizes_P2 <= limits).all(axis=1))
        if not len(indices):
            raise UserError(
                f"source_length, context_length: found {limits}; no pair of the {split} split fits: raise them"
            )
        return indices

    def spread(self, config: Config, split: str, count: int | None = None) -> list[Pair]:
        """Return up to `count` evenly spaced pairs that fit in a training row. Raises UserError if there is none.

        count: None: those of an evaluation during training, with about `eval.tokens` tokens in their targets.
        """
        indices = self.fitting(config, split)
        if count is None:
            count = max(1, int(config.eval.tokens / self.sizes_P2[indices, 1].mean()))
        some = np.linspace(0, len(indices) - 1, min(count, len(indices))).astype(int)
        return self.take(indices[some])

    def take(self, indices: np.ndarray) -> list[Pair]:
        """Return the pairs at these indices."""
        return [self[int(index)] for index in indices]

    @property
    def sizes_P2(self) -> np.ndarray:
        """`Pair.sizes` of all pairs."""
        return np.diff(self.ends).reshape(-1, 2)


class PairBatches:
    """The training batches of stored pairs; `self[step]` is the batch of a step, counted from 0.

    The pairs are shuffled once and put into rows. Each epoch uses each row once, in another order. Pairs longer than a
    row are not used.

    rows: the rows of the global batch on this host; None: all.

    Raises UserError if no pair fits.
    """

    def __init__(self, pairs: StoredPairs, config: Config, separator: int, *, rows: Sequence[int] | None = None):
        self.pairs, self.config, self.separator = pairs, config, separator
        self.rows = range(config.train.batch_size) if rows is None else rows
        self.limits = (config.source_length, config.context_length)
        fitting = pairs.fitting(config, "train")
        if len(fitting) < len(pairs):
            left_out = f"{len(pairs) - len(fitting):,} of {len(pairs):,} training pairs are not used"
            log.warning(f"{left_out}: their source or target is longer than {self.limits} tokens")
        self.order = np.random.default_rng(config.data.seed).permutation(fitting)
        self.starts = _row_starts(pairs.sizes_P2[self.order], self.limits)
        self.rows_per_epoch = len(self.starts) - 1
        self.epochs = grain.MapDataset.range(self.rows_per_epoch).shuffle(config.data.seed).repeat()

    def __getitem__(self, step: int) -> Batch:
        numbers = [int(self.epochs[step * self.config.train.batch_size + row]) for row in self.rows]
        parts = [self.order[self.starts[number] : self.starts[number + 1]] for number in numbers]
        return batch_of([self.pairs.take(part) for part in parts], self.separator, self.limits)


def _row_starts(sizes_P2: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """Return the index of the first pair of each row of `in_rows`, and the number of pairs."""
    ends_P2, starts = np.cumsum(sizes_P2, axis=0), [0]
    while starts[-1] < len(sizes_P2):
        before = ends_P2[starts[-1] - 1] if starts[-1] else np.zeros(2, int)
        fitting = [np.searchsorted(ends_P2[:, side], before[side] + limits[side], side="right") for side in (0, 1)]
        starts.append(int(min(fitting)))
    return np.array(starts)

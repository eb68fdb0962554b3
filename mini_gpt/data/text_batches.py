"""Batches of a text, whose rows the objective makes from windows of the text."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.batches import Batch, in_full_batches, windows
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError


class Vocab(NamedTuple):
    """The size of a tokenizer's vocabulary, the id of the mask token, and that of the first token of each row."""

    size: int
    mask_id: int
    first_id: int | None = None


def vocab_of(tokenizer: Tokenizer) -> Vocab:
    return Vocab(tokenizers.vocab_size(tokenizer), tokenizers.mask(tokenizer), tokenizer.first)


class TextBatches:
    """The training batches of a text; `self[step]` is the batch of a step, counted from 0.

    An epoch cuts the text into windows of `config.text_length` tokens, from a random offset on. It uses each window
    once, in random order. The weights of a batch are 1 for targets that count in the loss, else 0.

    rows: the rows of the global batch on this host; None: all.

    Raises UserError if the split is too short.
    """

    def __init__(self, tokens: np.ndarray, config: Config, *, vocab: Vocab, rows: Sequence[int] | None = None):
        self.config, self.vocab = config, vocab
        self.rows = range(config.train.batch_size) if rows is None else rows
        self.length = config.text_length
        length, targets = self.length, len(tokens) - 1
        if targets < length:
            name = config.objective_class.length_field
            remedy = f"{name}={getattr(config, name)} needs at least {length + 1}"
            raise UserError(f"data.corpus: the train split has {len(tokens)} tokens; {remedy}")
        # rows × length + slack = targets. With several rows, the slack, the largest offset, is at least length - 1.
        self.rows_per_epoch = max(1, (targets - (length - 1)) // length)
        self.slack = targets - self.rows_per_epoch * length
        self.order = grain.MapDataset.range(self.rows_per_epoch).shuffle(config.data.seed).repeat()
        self.tokens = tokens
        self._offset = functools.lru_cache(maxsize=2)(self._draw_offset)  # slower than to cut a window

    def __getitem__(self, step: int) -> Batch:
        config = self.config
        indices = [step * config.train.batch_size + row for row in self.rows]
        starts_B = np.array([self._start(index) for index in indices])
        windows_BM = windows(self.tokens, starts_B, self.length + 1, self.vocab.first_id)
        seeds = [(config.data.seed, index) for index in indices]
        return config.objective_class.batch_of(windows_BM, config, self.vocab, seeds)  # may corrupt them

    def _start(self, index: int) -> int:
        return self._offset(index // self.rows_per_epoch) + int(self.order[index]) * self.length

    def _draw_offset(self, epoch: int) -> int:
        return int(np.random.default_rng((self.config.data.seed, epoch)).integers(self.slack + 1))


def corrupted_blocks(
    tokens: np.ndarray, config: Config, *, vocab: Vocab, batch_size: int, seed: int
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of a stream's full blocks, as `in_full_batches` does.

    What is corrupted in a block depends on the seed and on the start of the block.
    """
    length = config.text_length
    for count, starts in in_full_batches(range(0, len(tokens) - length + 1, length), batch_size):
        blocks_BL = windows(tokens, starts, length, vocab.first_id)
        seeds = [(seed, start) for start in starts]
        yield count, config.objective_class.corrupted(blocks_BL, config, vocab, seeds)

"""Batches of a text: next tokens, masked tokens, or corrupted spans."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.batches import Batch, in_full_batches, next_token_batch, windows
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError


class Vocab(NamedTuple):
    """The size of a tokenizer's vocabulary, the id of the mask token, and that of the first token of each row."""

    size: int
    mask_id: int
    first_id: int | None = None


def vocab_of(tokenizer: Tokenizer) -> Vocab:
    return Vocab(tokenizers.vocab_size(tokenizer), tokenizers.mask(tokenizer), tokenizer.first)


def text_length(config: Config) -> int:
    """Return the tokens of text in one row. With span corruption, the row is longer than its source."""
    if config.train.objective != "span_corruption":
        return config.context_length
    from mini_gpt.data import spans

    return spans.sizes(config).text


class TextBatches:
    """The training batches of a text; `self[step]` is the batch of a step, counted from 0.

    An epoch cuts the text into windows of `text_length` tokens, from a random offset on. It uses each window once, in
    random order. The weights of a batch are 1 for targets that count in the loss, else 0.

    rows: the rows of the global batch on this host; None: all.

    Raises UserError if the split is too short.
    """

    def __init__(self, tokens: np.ndarray, config: Config, *, vocab: Vocab, rows: Sequence[int] | None = None):
        self.config, self.vocab = config, vocab
        self.rows = range(config.train.batch_size) if rows is None else rows
        self.length = text_length(config)
        length, targets = self.length, len(tokens) - 1
        if targets < length:
            name = "context_length" if config.train.objective != "span_corruption" else "source_length"
            remedy = f"{name}={getattr(config, name)} needs at least {length + 1}"
            raise UserError(f"data.corpus: the train split has {len(tokens)} tokens; {remedy}")
        # Keep at least one window. Keep further windows only if the slack, the largest offset, is at least length - 1.
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
        if config.train.objective == "next_token":
            return next_token_batch(windows_BM)
        seeds = [(config.data.seed, index) for index in indices]
        return _corrupted(windows_BM[:, :-1], config, self.vocab, seeds)

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
    length = text_length(config)
    for count, starts in in_full_batches(range(0, len(tokens) - length + 1, length), batch_size):
        blocks_BL = windows(tokens, starts, length, vocab.first_id)
        seeds = [(seed, start) for start in starts]
        yield count, _corrupted(blocks_BL, config, vocab, seeds)


def _corrupted(texts_BN: np.ndarray, config: Config, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
    """Return the batch of the objective, masked or span_corruption. seeds: one per row."""
    if config.train.objective == "span_corruption":
        from mini_gpt.data import spans

        return spans.batch_of(texts_BN, config, vocab.size, seeds)
    return _masked_batch(texts_BN, config.train.mask_rate, vocab, seeds)


def _masked_batch(tokens_BL: np.ndarray, rate: float, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
    """Choose targets, then mask 80%, replace 10% and keep 10% (Devlin et al. 2019, 3.1). seeds: one per row."""
    length, (size, mask, first) = tokens_BL.shape[1], vocab
    rngs = [np.random.default_rng(seed) for seed in seeds]
    chosen_BL = np.stack([rng.random(length) for rng in rngs]) < rate
    chosen_BL[:, 0] &= first is None
    uniform_BL = np.stack([rng.random(length) for rng in rngs])
    random_BL = np.stack([rng.integers(size - (mask < size), size=length, dtype=np.int32) for rng in rngs])
    random_BL += random_BL >= mask  # any token but the mask
    inputs_BL = np.where(chosen_BL & (uniform_BL < 0.8), mask, tokens_BL)
    inputs_BL = np.where(chosen_BL & (uniform_BL >= 0.9), random_BL, inputs_BL)
    return {"inputs": inputs_BL, "targets": tokens_BL, "weights": chosen_BL.astype(np.float32)}

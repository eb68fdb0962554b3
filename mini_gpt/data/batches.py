"""Batches are a function of seed and step: step n has the same rows after a resume and on any number of hosts."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import tasks, tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError, require

Batch = dict[str, np.ndarray]
DTYPES = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}  # of the arrays in a Batch, all [B, L]
PADDING = -1  # in "source", int32 [B, S], which a batch has too if the model has an encoder
SOURCE_STEP = 16  # tokens, by which rows grow for sources longer than in training, so that few shapes are compiled


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


class TaskBatches:
    """The training batches of a task. Each row is one problem. Only answers count, and places of `Task.scored`.

    Rows are padded with separators. The masked objective masks the whole answer. Raises UserError like `check_fits`.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, rows: Sequence[int] | None = None):
        check_fits(config)
        check_alphabet(config, tokenizer)
        self.config = config
        self.tokenizer = tokenizer
        self.rows = range(config.train.batch_size) if rows is None else rows

    def __getitem__(self, step: int) -> Batch:
        config, data = self.config, self.config.data
        indices = [step * config.train.batch_size + row for row in self.rows]
        lengths = tasks.trained_lengths(data)
        problems = [tasks.problem(data.corpus, "train", data.seed, index, **lengths) for index in indices]
        return problem_batch(problems, config, self.tokenizer, config.context_length)


def iterate(batches: TrainBatches | TaskBatches, start: int, count: int) -> Iterator[Batch]:
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


def problem_batch(problems: list[tuple[str, str]], config: Config, tokenizer: Tokenizer, length: int) -> Batch:
    """Return the batch of (question, answer) problems, in rows of `length` inputs.

    Only answers have weight, and the places of `Task.scored` in questions. With an encoder, the question is the source,
    and a row has the answer only, after a separator.
    """
    if config.model.encoder_layers:
        return _pair_batch(problems, config, tokenizer, length)
    rows_BM = np.full((len(problems), length + 1), tokenizers.separator(tokenizer), np.int32)
    answer_BM = np.zeros(rows_BM.shape, np.float32)
    for row, (question, answer) in enumerate(problems):
        text = f"{question}{tasks.ANSWER}{answer}{tasks.END}"
        rows_BM[row, : len(text)] = tokenizer.encode(text)
        answer_BM[row, len(question) + 1 : len(text)] = 1
        answer_BM[row, tasks.find(config.data.corpus).scored(question)] = 1
    if config.train.objective == "next_token":
        return next_token_batch(rows_BM) | {"weights": answer_BM[:, 1:]}
    tokens_BL, answer_BL = rows_BM[:, :-1], answer_BM[:, :-1]
    inputs_BL = np.where(answer_BL > 0, tokenizers.vocab_size(tokenizer), tokens_BL).astype(np.int32)
    return {"inputs": inputs_BL, "targets": tokens_BL, "weights": answer_BL}


def _pair_batch(pairs: list[tuple[str, str]], config: Config, tokenizer: Tokenizer, length: int) -> Batch:
    """Return the batch of (source, target) pairs. Each target is preceded by a separator."""
    longest = max(config.source_length, *(len(source) for source, _ in pairs))
    size = config.source_length + -(-(longest - config.source_length) // SOURCE_STEP) * SOURCE_STEP
    if config.model.position == "learned":
        size = max(longest, min(size, config.model.max_positions))
    source_BS = np.full((len(pairs), size), PADDING, np.int32)
    rows_BM = np.full((len(pairs), length + 1), tokenizers.separator(tokenizer), np.int32)
    weights_BL = np.zeros((len(pairs), length), np.float32)
    for row, (source, target) in enumerate(pairs):
        source_BS[row, : len(source)] = tokenizer.encode(source)
        end = len(target) + len(tasks.END)
        rows_BM[row, 1 : 1 + end] = tokenizer.encode(target + tasks.END)
        weights_BL[row, :end] = 1
    return next_token_batch(rows_BM) | {"weights": weights_BL, "source": source_BS}


def shapes(config: Config) -> dict[str, tuple[tuple[int, int], type]]:
    """Return the shape and the dtype of each array of a training batch."""
    rows = config.train.batch_size
    found: dict[str, tuple[tuple[int, int], type]] = {
        name: ((rows, config.context_length), dtype) for name, dtype in DTYPES.items()
    }
    return found | ({"source": ((rows, config.source_length), np.int32)} if config.model.encoder_layers else {})


def check_alphabet(config: Config, tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer, of a run or from --init_from, lacks a character of the task."""
    alphabet = tasks.find(config.data.corpus).alphabet
    try:
        tokenizer.encode(alphabet)
    except UserError:
        reason = "its problems have characters that the tokenizer of this run lacks; train another run"
        raise UserError(f"data.corpus: found {config.data.corpus}; {reason}") from None


def row_length(config: Config, length: int) -> int:
    """Return the row length that fits any problem of length `length`."""
    if config.model.encoder_layers:
        return tasks.find(config.data.corpus).sizes_of(length)[1]
    return tasks.find(config.data.corpus).size(length) - (config.train.objective == "next_token")


def check_fits(config: Config) -> None:
    """Raise UserError if the task has no problems of `data.task_length`, or the context is too short for them."""
    data = config.data
    tasks.check_length(data.corpus, "data.task_length", data.task_length)
    needed = row_length(config, data.task_length)
    remedy = f"{data.corpus} with data.task_length={data.task_length} needs at least {needed}"
    require(needed <= config.context_length, "context_length", config.context_length, remedy)
    if config.model.encoder_layers:
        source, _ = tasks.find(data.corpus).sizes_of(data.task_length)
        remedy = f"{data.corpus} with data.task_length={data.task_length} needs at least {source}"
        require(source <= config.source_length, "source_length", config.source_length, remedy)

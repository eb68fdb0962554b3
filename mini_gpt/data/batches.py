"""Batches as a function of seed and step: whoever asks for step n gets the same rows, on any number of hosts."""

import functools
import itertools
import time
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import tasks, tokenizers
from mini_gpt.data.token_store import TokenSplit
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError

Batch = dict[str, np.ndarray]
DTYPES = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}  # of a batch


class TrainBatches:
    """Random access to the training batches; `self[step]` is the batch of that step, counted from 0.

    Windows of the context length, and one token more, are cut contiguously from the store; an epoch visits each once,
    in an order and from an offset of its own. A batch holds inputs_BL and targets_BL (int32), and weights_BL (float32,
    what counts in the loss).

    vocab_size: the tokenizer's; the id after its last is the mask. rows: which rows of the
    global batch this host takes, all unless given. Raises UserError where the split is too short.
    """

    def __init__(self, split: TokenSplit, config: Config, *, vocab_size: int, rows: Sequence[int] | None = None):
        self.config = config
        self.vocab_size = vocab_size
        self.rows = range(config.train.batch_size) if rows is None else rows
        length = config.context_length
        targets = len(split.tokens) - 1
        if targets < length:
            raise UserError(
                f"data.corpus: the {split.name} split has {len(split.tokens)} tokens; "
                f"context_length={length} needs at least {length + 1}"
            )
        # As many windows as fit behind any offset below their length; what is left over is room for larger offsets.
        self.windows = max(1, (targets - (length - 1)) // length)
        self.slack = targets - self.windows * length
        self.order = grain.MapDataset.range(self.windows).shuffle(config.seed).repeat()
        self.tokens = np.asarray(split.tokens)  # still the mapped file, without the cost of memmap's own indexing
        self._offset = functools.lru_cache(maxsize=2)(self._draw_offset)  # to draw one costs more than to cut a window

    def __getitem__(self, step: int) -> Batch:
        config = self.config
        places = [step * config.train.batch_size + row for row in self.rows]
        starts_B = np.array([self._start(place) for place in places])
        windows = self.tokens[starts_B[:, None] + np.arange(config.context_length + 1)].astype(np.int32)
        if config.train.objective == "next_token":
            batch = {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
            batch["weights"] = np.ones(batch["targets"].shape, np.float32)
        else:
            seeds = [(config.seed, place) for place in places]
            batch = _masked(windows[:, :-1], config.train.mask_rate, self.vocab_size, seeds)
        return batch

    def _start(self, place: int) -> int:
        return self._offset(place // self.windows) + int(self.order[place]) * self.config.context_length

    def _draw_offset(self, epoch: int) -> int:
        return int(np.random.default_rng((self.config.seed, epoch)).integers(self.slack + 1))


class TaskBatches:
    """Random access to batches of a task's problems, one a row, as TrainBatches: only the answer counts in the loss.

    Rows are filled up with separators. Next-token prediction reads the question and writes the answer; under the masked
    objective the answer's places are masked, all of them. Raises UserError where the context is too short.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, rows: Sequence[int] | None = None):
        check_fits(config)
        tokenizer.encode(tasks.ALPHABET)  # another run's tokenizer need not have it
        self.config = config
        self.tokenizer = tokenizer
        self.rows = range(config.train.batch_size) if rows is None else rows

    def __getitem__(self, step: int) -> Batch:
        config = self.config
        places = [step * config.train.batch_size + row for row in self.rows]
        lengths = {"shortest": tasks.find(config.data.corpus).shortest, "longest": config.data.task_length}
        problems = [tasks.problem(config.data.corpus, "train", config.seed, place, **lengths) for place in places]
        return problem_batch(problems, config, self.tokenizer, config.context_length)


def check_fits(config: Config) -> None:
    """Raises UserError where the task has no problems of the length that the config names, or the context no room."""
    data = config.data
    tasks.check_length(data.corpus, "data.task_length", data.task_length)
    needed = row_length(config, data.task_length)
    if needed > config.context_length:
        raise UserError(
            f"context_length: found {config.context_length}; {data.corpus} with "
            f"data.task_length={data.task_length} needs at least {needed}"
        )


def row_length(config: Config, length: int) -> int:
    """Gives how many inputs a task's problems of a length need at most."""
    return tasks.find(config.data.corpus).size(length) - (config.train.objective == "next_token")


def problem_batch(problems: list[tuple[str, str]], config: Config, tokenizer: Tokenizer, length: int) -> Batch:
    """Gives inputs_BL, targets_BL and weights_BL of problems, (question, answer), for `length` inputs."""
    filling = tokenizers.separator(tokenizer)
    rows = np.full((len(problems), length + 1), filling, np.int32)
    answer = np.zeros(rows.shape, np.float32)
    for row, (question, solution) in enumerate(problems):
        text = f"{question}{tasks.ANSWER}{solution}{tasks.END}"
        rows[row, : len(text)] = tokenizer.encode(text)
        answer[row, len(question) + 1 : len(text)] = 1
    if config.train.objective == "next_token":
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": answer[:, 1:]}
    mask = tokenizers.vocab_size(tokenizer)
    rows, answer = rows[:, :-1], answer[:, :-1]
    return {"inputs": np.where(answer > 0, mask, rows).astype(np.int32), "targets": rows, "weights": answer}


def in_full_batches(items: Sequence, batch_size: int) -> Iterator[tuple[int, list]]:
    """Yield (count, items) of `batch_size` items, of which the first `count` are new; the last batch is filled up."""
    for first in range(0, len(items), batch_size):
        batch = list(items[first : first + batch_size])
        yield len(batch), batch + batch[:1] * (batch_size - len(batch))


def iterate(batches: TrainBatches | TaskBatches, start: int, count: int) -> Iterator[Batch]:
    """Yields so many batches from a step on, prepared ahead by Grain's threads."""
    dataset = grain.MapDataset.range(start, start + count).map(batches.__getitem__)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def tokens_per_second(prepared: Iterator[Batch], count: int) -> float:
    """Gives the speed at which `count` batches come from `iterate`, past the first few, with nobody else at work."""
    for _ in itertools.islice(prepared, 8):  # as many as stand ready at once, and more
        pass
    begun = time.perf_counter()
    tokens = sum(batch["inputs"].size for batch in itertools.islice(prepared, count))
    return tokens / (time.perf_counter() - begun)


def masked_blocks(
    tokens: np.ndarray, config: Config, *, vocab_size: int, batch_size: int
) -> Iterator[tuple[int, Batch]]:
    """Yields (rows, batch) over a stream's whole blocks, their masks drawn from the place of the block alone.

    The last batch is filled up with copies of its first block: past `rows`, nothing counts.
    """
    length = config.context_length
    blocks = range(0, len(tokens) - length + 1, length)
    for first in range(0, len(blocks), batch_size):
        starts = list(blocks[first : first + batch_size])
        filled = starts + starts[:1] * (batch_size - len(starts))
        windows_BL = np.stack([tokens[start : start + length] for start in filled]).astype(np.int32)
        yield len(starts), _masked(windows_BL, config.train.mask_rate, vocab_size, [(0, start) for start in filled])


def _masked(tokens_BL: np.ndarray, rate: float, mask_token: int, seeds: list[tuple[int, int]]) -> Batch:
    """Draws what is predicted: of the chosen, 80% are masked, 10% replaced, 10% kept (Devlin et al. 2019, 3.1)."""
    length = tokens_BL.shape[1]
    draws = [np.random.default_rng(seed) for seed in seeds]
    chosen_BL = np.stack([draw.random(length) for draw in draws]) < rate
    fate_BL = np.stack([draw.random(length) for draw in draws])
    random_BL = np.stack([draw.integers(mask_token, size=length, dtype=np.int32) for draw in draws])
    inputs_BL = np.where(chosen_BL & (fate_BL < 0.8), mask_token, tokens_BL)
    inputs_BL = np.where(chosen_BL & (fate_BL >= 0.9), random_BL, inputs_BL)
    return {"inputs": inputs_BL, "targets": tokens_BL, "weights": chosen_BL.astype(np.float32)}

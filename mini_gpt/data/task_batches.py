"""Batches of a task's problems. With an encoder, the question is the source, and the answer is the target."""

import itertools
from collections.abc import Sequence

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import pairs, tasks, tokenizers
from mini_gpt.data.batches import Batch, next_token_batch
from mini_gpt.data.pairs import Pair
from mini_gpt.data.tasks import Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError, require

MOST_IN_A_BATCH = 2**32  # problems; the first index of a step's problems is a multiple of this


class TaskBatches:
    """The training batches of a task; `self[step]` is the batch of a step, counted from 0.

    Without an encoder, each row is one problem; with one, rows hold several (see `pairs`). Raises UserError like
    `check_fits`.

    rows: the rows of the global batch on this host; None: all.
    """

    rows_per_epoch = None

    def __init__(self, config: Config, tokenizer: Tokenizer, *, rows: Sequence[int] | None = None):
        check_fits(config)
        check_alphabet(config.data.corpus, tokenizer)
        self.config = config
        self.tokenizer = tokenizer
        self.rows = range(config.train.batch_size) if rows is None else rows

    def __getitem__(self, step: int) -> Batch:
        config, size = self.config, self.config.train.batch_size
        if not config.model.has_encoder:
            drawn = [self._problem(step * size + row) for row in self.rows]
            return problem_batch(drawn, config, self.tokenizer, config.context_length)
        indices = itertools.count(step * MOST_IN_A_BATCH)
        drawn_pairs = (pair_of(self.tokenizer, self._problem(index)) for index in indices)
        limits = (config.source_length, config.context_length)
        rows = list(itertools.islice(pairs.in_rows(drawn_pairs, limits), size))
        return pairs.batch_of([rows[row] for row in self.rows], tokenizers.separator(self.tokenizer), limits)

    def _problem(self, index: int) -> Problem:
        data = self.config.data
        return tasks.problem(data.corpus, "train", data.seed, index, **tasks.trained_lengths(data))


def problem_batch(problems: Sequence[Problem], config: Config, tokenizer: Tokenizer, length: int) -> Batch:
    """Return the batch of (question, answer) problems, one in each row of `length` inputs.

    Only answers have weight, and the places of `Task.scored` in questions. The masked objective masks the whole answer.
    If a task tags, answers are the targets of questions, see `Task.tags`. With an encoder, only answers have weight,
    and rows have no questions. Rows are padded with separators.
    """
    if config.model.has_encoder:
        rows = [[pair_of(tokenizer, problem)] for problem in problems]
        return pairs.batch_of(rows, tokenizers.separator(tokenizer), (config.source_length, length))
    task = tasks.find(config.data.corpus)
    if task.tags:
        return _tagged_batch(problems, tokenizer, length)
    rows_BM = np.full((len(problems), length + 1), tokenizers.separator(tokenizer), np.int32)
    answer_BM = np.zeros(rows_BM.shape, np.float32)
    for row, (question, answer) in enumerate(problems):
        text = f"{question}{tasks.ANSWER}{answer}{tasks.END}"
        rows_BM[row, : len(text)] = tokenizer.encode(text)
        answer_BM[row, len(question) + 1 : len(text)] = 1
        answer_BM[row, task.scored(question)] = 1
    if not config.objective_class.masks:
        return next_token_batch(rows_BM) | {"weights": answer_BM[:, 1:]}
    tokens_BL, answer_BL = rows_BM[:, :-1], answer_BM[:, :-1]
    inputs_BL = np.where(answer_BL > 0, tokenizers.mask(tokenizer), tokens_BL).astype(np.int32)
    return {"inputs": inputs_BL, "targets": tokens_BL, "weights": answer_BL}


def _tagged_batch(problems: Sequence[Problem], tokenizer: Tokenizer, length: int) -> Batch:
    """Return the batch of problems whose answers tag their questions; the end of an answer is the target of ANSWER."""
    sides_2BL = np.full((2, len(problems), length), tokenizers.separator(tokenizer), np.int32)
    weights_BL = np.zeros(sides_2BL.shape[1:], np.float32)
    for row, (question, answer) in enumerate(problems):
        texts = question + tasks.ANSWER, answer + tasks.END
        sides_2BL[:, row, : len(question) + 1] = [*map(tokenizer.encode, texts)]
        weights_BL[row, : len(question) + 1] = 1
    return {"inputs": sides_2BL[0], "targets": sides_2BL[1], "weights": weights_BL}


def pair_of(tokenizer: Tokenizer, problem: Problem) -> Pair:
    """Return the tokens of a question and of its answer."""
    return Pair(*map(tokenizer.encode, problem))


def row_lengths(config: Config, length: int) -> tuple[int, int]:
    """Return the lengths of rows that fit any problem of `length`: of sources (0 without an encoder), of the others."""
    task = tasks.find(config.data.corpus)
    if config.model.has_encoder:
        question, answer = task.sizes_of(length)
        return question + 1, answer  # the end of the answer is in `answer`, like the separator before it
    return 0, task.size(length) - (not config.objective_class.masks)


def check_alphabet(corpus: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if a tokenizer, of a run or from --init_from, lacks a character of the task."""
    try:
        tokenizer.encode(tasks.find(corpus).alphabet)
    except UserError as error:
        raise UserError(f"data.corpus: {corpus} needs another tokenizer than that of this run ({error})") from None


def check_fits(config: Config) -> None:
    """Raise UserError if the task has no problems of `data.task_length`, or the rows are too short for them."""
    data = config.data
    tasks.check_length(data.corpus, "data.task_length", data.task_length)
    found = {"source_length": config.source_length, "context_length": config.context_length}
    for (name, length), needed in zip(found.items(), row_lengths(config, data.task_length), strict=True):
        remedy = f"{data.corpus} with data.task_length={data.task_length} needs at least {needed}"
        require(needed <= length, name, length, remedy)

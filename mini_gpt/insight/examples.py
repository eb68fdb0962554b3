"""A source and a target of a model with an encoder, with the tokens of both that belong together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, tasks
from mini_gpt.data.tasks.base import Link, Problem
from mini_gpt.data.tokenizers import Tokenizer

Alignment = Sequence[Link]  # in tokens of a text with a token per character


class Example(NamedTuple):
    """One problem, in int32 tokens without padding.

    source: the encoder's tokens: a separator, then the question. inputs: those of the decoder: a separator, then the
    answer. written: the tokens that the decoder must write at these places: the answer and its end. alignment: the true
    one of question and answer, or () if it is not known.
    """

    source: np.ndarray
    inputs: np.ndarray
    written: np.ndarray
    alignment: Alignment = ()


def of_problem(problem: Problem, config: Config, tokenizer: Tokenizer, alignment: Alignment | None = None) -> Example:
    """Return the example of a (question, answer) problem. alignment: None: that of the task, if it is known."""
    if alignment is None:
        align = tasks.find(config.data.corpus).align
        alignment = align(*problem) if align else ()
    length = max(config.context_length, len(problem[1]) + 1)
    batch = {name: rows[0] for name, rows in task_batches.problem_batch([problem], config, tokenizer, length).items()}
    is_target_L = batch["weights"] > 0
    inputs, written = (batch[name][is_target_L] for name in ("inputs", "targets"))
    return Example(batch["source"][batch["source"] >= 0], inputs, written, alignment)


def cells(alignment: Alignment, shape: tuple[int, int]) -> np.ndarray:
    """Return is_aligned_LS, bool: whether query L, which writes target token L, belongs to source token S.

    The first source token is the separator before the question.
    """
    is_aligned_LS = np.zeros(shape, bool)
    for (first, end), (first_query, end_query) in alignment:
        is_aligned_LS[first_query:end_query, 1 + first : 1 + end] = True
    return is_aligned_LS

"""Tasks: problems of any length with one right answer. They show how a model handles order and distance.

The text of a problem is its question, "=", its answer and a newline; of one that tags, see `Task`. Split, seed, index
and range of lengths determine a problem. A hash of the question assigns it to a split, so no validation or test problem
is in the training data.
"""

import functools
import pkgutil

import numpy as np

from mini_gpt.config.data import TASK, DataConfig
from mini_gpt.data import splits
from mini_gpt.data.corpora import Corpus, digest
from mini_gpt.data.tasks.base import ALPHABET, ANSWER, END, Problem, Task
from mini_gpt.runtime.errors import UserError, require, suggestion

__all__ = ["ALPHABET", "ANSWER", "END", "Problem", "Task"]

VERSION = 2  # part of the corpus's fingerprint; increase it if problems change
MODULES = ("strings", "arithmetic", "counting", "reasoning", "recall", "language", "groups")  # each has TASKS


def open_corpus(data: DataConfig) -> Corpus:
    """Return a corpus without texts: a task makes its problems itself. Raises UserError if there is no such task."""
    find(data.corpus)
    return Corpus(data.corpus, digest(data.corpus, VERSION), 0, {})


@functools.cache
def known() -> dict[str, Task]:
    """Return all tasks by name. Their modules are imported when the first task is used."""
    found: dict[str, Task] = {}
    for module in MODULES:
        found |= pkgutil.resolve_name(f"{__name__}.{module}:TASKS")
    return found


def find(corpus: str) -> Task:
    """Return the task of `task:NAME`. Raises UserError if there is none."""
    name = corpus.removeprefix(TASK)
    if name not in known():
        hint = suggestion(name, known())
        raise UserError(f"data.corpus: found {corpus!r}; the tasks are {', '.join(known())}{hint}")
    return known()[name]


def check_length(corpus: str, field: str, length: int) -> None:
    """Raise UserError that names the field if the task has no problems of this length."""
    task = find(corpus)
    limits = f"of length {task.shortest} to {task.longest} ({task.unit})"
    require(task.shortest <= length <= task.longest, field, length, f"{corpus} has problems {limits}")


def trained_lengths(data: DataConfig) -> dict[str, int]:
    """Return the shortest and the longest length of the training problems, as arguments of `problem`."""
    return {"shortest": find(data.corpus).shortest, "longest": data.task_length}


def problem(corpus: str, split: str, seed: int, index: int, *, shortest: int, longest: int) -> Problem:
    """Return the (question, answer) of a split, seed and index, with a length in shortest..longest.

    The length is the larger of two uniform draws, to favor long problems: the ends of long answers are learnt last.
    Draws problems until one belongs to the split. Raises UserError if none does: short lengths have few questions.
    """
    rng = np.random.default_rng((seed, index, shortest, longest))
    task = find(corpus)
    for _ in range(10_000):
        question, answer = task.draw(rng, int(rng.integers(shortest, longest + 1, size=2).max()))
        if split_of(question) == split:
            return question, answer
    raise UserError(f"{corpus}: no problem of length {shortest} to {longest} belongs to the {split} split")


def different(corpus: str, split: str, count: int, *, shortest: int, longest: int) -> list[Problem]:
    """Return up to `count` distinct problems of a split. Short lengths may have fewer."""
    found: dict[str, str] = {}
    for index in range(4 * count):
        question, answer = problem(corpus, split, 0, index, shortest=shortest, longest=longest)
        found[question] = answer
        if len(found) == count:
            break
    return list(found.items())


def split_of(question: str) -> str:
    return splits.by_eighths(question)

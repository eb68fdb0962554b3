"""Problems with one right answer, endless and of any length: what a model does with order, told from its answers.

A problem is text: its question, "=", its answer, and a line's end. It is a function of the split, seed, index and
length. A hash of the question gives it to a split, so no validation or test problem is ever trained on.
"""

import difflib
import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mini_gpt.config.schema import TASK
from mini_gpt.runtime.errors import UserError

ANSWER, END = "=", "\n"  # the answer begins after the one, and is complete with the other
ALPHABET = "".join(sorted(string.ascii_letters + string.digits + "+_?. " + ANSWER + END))  # of all tasks alike
VERSION = 2  # of all that decides the problems; a run records it with the task's name

PASSKEY_TEXT = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back. ")

Question, Answer = str, str


@dataclass(frozen=True)
class Task:
    """`draw(draw, length)` gives a (question, answer); no problem of a length has more than `size(length)` characters.

    unit: what the length counts. shortest, longest: the lengths that there are.
    """

    draw: Callable[[np.random.Generator, int], tuple[Question, Answer]]
    size: Callable[[int], int]
    unit: str
    shortest: int = 2
    longest: int | None = None


def _letters(draw: np.random.Generator, length: int) -> str:
    return "".join(string.ascii_lowercase[i] for i in draw.integers(26, size=length))


def _copy(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    text = _letters(draw, length)
    return text, text


def _reverse(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    text = _letters(draw, length)
    return text, text[::-1]


def _sort(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    text = _letters(draw, length)
    return text, "".join(sorted(text))


def _addition(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    """Two numbers of as many digits; the sum begins with its last digit, so that a carry is known when it is needed.

    Lee et al. 2023, reversed format.
    """
    a, b = ("".join(map(str, [draw.integers(1, 10), *draw.integers(10, size=length - 1)])) for _ in range(2))
    return f"{a}+{b}", str(int(a) + int(b))[::-1]


def _missing_duplicate(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    """A binary word twice, with one bit of the two left out (Ruoss et al. 2023); the length is the word's."""
    word = "".join(map(str, draw.integers(2, size=length)))
    gap = int(draw.integers(2 * length))
    return (word + word)[:gap] + "_" + (word + word)[gap + 1 :], (word + word)[gap]


def _associative_recall(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    """Pairs of a letter and a digit, all letters different, then one of the letters (Graves et al. 2014, 4.3)."""
    keys = [string.ascii_letters[i] for i in draw.permutation(52)[:length]]
    values = draw.integers(10, size=length)
    asked = int(draw.integers(length))
    pairs = "".join(f"{key}{value}" for key, value in zip(keys, values, strict=True))
    return f"{pairs}?{keys[asked]}", str(values[asked])


def _passkey(draw: np.random.Generator, length: int) -> tuple[Question, Answer]:
    """Five digits somewhere in a text without news (Mohtashami and Jaggi 2023)."""
    first, place = int(draw.integers(len(PASSKEY_TEXT))), int(draw.integers(length + 1))
    text = [PASSKEY_TEXT[(first + i) % len(PASSKEY_TEXT)] for i in range(length)]
    key = "".join(map(str, draw.integers(10, size=5)))
    text.insert(place, f"The pass key is {key}. Remember it. ")
    return "".join(text) + "What is the pass key?", key


TASKS = {
    "copy": Task(_copy, lambda n: 2 * n + 2, "letters"),
    "reverse": Task(_reverse, lambda n: 2 * n + 2, "letters"),
    "sort": Task(_sort, lambda n: 2 * n + 2, "letters"),
    "addition": Task(_addition, lambda n: 3 * n + 4, "digits of each number", shortest=1),
    "missing_duplicate": Task(_missing_duplicate, lambda n: 2 * n + 3, "bits of the word"),
    "associative_recall": Task(_associative_recall, lambda n: 2 * n + 5, "pairs", longest=52),
    "passkey": Task(_passkey, lambda n: 20 * n + 64, "sentences around the key", shortest=1),
}


def find(corpus: str) -> Task:
    """Gives the task of `task:NAME`. Raises UserError with the list and the nearest name."""
    name = corpus.removeprefix(TASK)
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {TASK}{near[0]}?" if near else ""
        raise UserError(f"data.corpus: found {corpus!r}; the tasks are {', '.join(TASKS)}{hint}")
    return TASKS[name]


def check_length(corpus: str, field: str, length: int) -> None:
    """Raises UserError where the task has no problems of that length."""
    task = find(corpus)
    if length < task.shortest or (task.longest is not None and length > task.longest):
        most = f" and at most {task.longest}" if task.longest is not None else ""
        raise UserError(
            f"{field}: found {length}; {corpus} has problems of at least {task.shortest}{most} ({task.unit})"
        )


def problem(corpus: str, split: str, seed: int, index: int, *, shortest: int, longest: int) -> tuple[Question, Answer]:
    """Gives the (question, answer) of a split, seed and index, of a length from shortest..longest.

    The length is the larger of two even draws: the last places of long answers are rare, and the last to be learnt.
    Drawn until a question belongs to the split. Raises UserError where the split has none: short lengths have few
    questions in all.
    """
    draw = np.random.default_rng((seed, index, shortest, longest))
    task = find(corpus)
    for _ in range(10_000):
        question, answer = task.draw(draw, int(draw.integers(shortest, longest + 1, size=2).max()))
        if split_of(question) == split:
            return question, answer
    raise UserError(f"{corpus}: no problem of length {shortest} to {longest} belongs to the {split} split")


def different(corpus: str, split: str, count: int, *, shortest: int, longest: int) -> list[tuple[Question, Answer]]:
    """Gives up to `count` problems of a split, no question twice: short lengths have fewer in all."""
    found: dict[Question, Answer] = {}
    for index in range(4 * count):
        question, answer = problem(corpus, split, 0, index, shortest=shortest, longest=longest)
        found[question] = answer
        if len(found) == count:
            break
    return list(found.items())


def split_of(question: Question) -> str:
    """Gives the split that a question belongs to: one in eight to validation, one to test."""
    draw = hashlib.blake2b(question.encode(), digest_size=1).digest()[0]
    return "test" if draw < 32 else "validation" if draw < 64 else "train"

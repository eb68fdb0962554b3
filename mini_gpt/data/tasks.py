"""Tasks: problems of any length with one right answer. They show how a model handles order and distance.

The text of a problem is its question, "=", its answer and a newline. Split, seed, index and range of lengths determine
a problem. A hash of the question assigns it to a split, so no validation or test problem is in the training data.
"""

import difflib
import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mini_gpt.config.data import TASK, DataConfig
from mini_gpt.runtime.errors import UserError, shown

ANSWER, END = "=", "\n"  # the answer starts after ANSWER and ends with END
ALPHABET = "".join(sorted(string.ascii_letters + string.digits + "+_?. " + ANSWER + END))  # characters of all tasks
VERSION = 2  # part of the corpus's fingerprint; increase it if problems change

PASSKEY_TEXT = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back. ")

MOST_DIGITS = 4_299  # Python converts at most 4,300 digits, and a sum can have one more digit

Problem = tuple[str, str]  # question, answer
Rng = np.random.Generator


@dataclass(frozen=True)
class Task:
    """A kind of problem. draw: (rng, length) -> (question, answer). size: length -> maximum number of characters.

    unit: of the length. shortest, longest: range of allowed lengths.
    """

    draw: Callable[[Rng, int], Problem]
    size: Callable[[int], int]
    unit: str
    shortest: int = 2
    longest: int = 100_000  # far above any context length


def _from_letters(answer: Callable[[str], str]) -> Task:
    """Return a task with random letters as its question and an answer of equal length."""

    def draw(rng: Rng, length: int) -> Problem:
        letters = "".join(string.ascii_lowercase[i] for i in rng.integers(26, size=length))
        return letters, answer(letters)

    return Task(draw, lambda n: 2 * n + 2, "letters")


def _addition(rng: Rng, length: int) -> Problem:
    """Return an addition of two `length`-digit numbers. The answer is reversed (Lee et al. 2023)."""
    a, b = ("".join(map(str, [rng.integers(1, 10), *rng.integers(10, size=length - 1)])) for _ in range(2))
    return f"{a}+{b}", str(int(a) + int(b))[::-1]


def _missing_duplicate(rng: Rng, length: int) -> Problem:
    """Return a binary word of `length` bits, written twice with one bit missing (Ruoss et al. 2023)."""
    twice = 2 * "".join(map(str, rng.integers(2, size=length)))
    gap = int(rng.integers(2 * length))
    return twice[:gap] + "_" + twice[gap + 1 :], twice[gap]


def _associative_recall(rng: Rng, length: int) -> Problem:
    """Return (letter, digit) pairs with distinct letters, then one of the letters (Graves et al. 2014, 4.3)."""
    keys = [string.ascii_letters[i] for i in rng.permutation(52)[:length]]
    values = rng.integers(10, size=length)
    query = int(rng.integers(length))
    pairs = "".join(f"{key}{value}" for key, value in zip(keys, values, strict=True))
    return f"{pairs}?{keys[query]}", str(values[query])


def _passkey(rng: Rng, length: int) -> Problem:
    """Return a repetitive text with five digits at a random place (Mohtashami and Jaggi 2023)."""
    first, place = int(rng.integers(len(PASSKEY_TEXT))), int(rng.integers(length + 1))
    text = [PASSKEY_TEXT[(first + i) % len(PASSKEY_TEXT)] for i in range(length)]
    key = "".join(map(str, rng.integers(10, size=5)))
    text.insert(place, f"The pass key is {key}. Remember it. ")
    return "".join(text) + "What is the pass key?", key


TASKS = {
    "copy": _from_letters(lambda letters: letters),
    "reverse": _from_letters(lambda letters: letters[::-1]),
    "sort": _from_letters(lambda letters: "".join(sorted(letters))),
    "addition": Task(_addition, lambda n: 3 * n + 4, "digits of each number", shortest=1, longest=MOST_DIGITS),
    "missing_duplicate": Task(_missing_duplicate, lambda n: 2 * n + 3, "bits of the word"),
    "associative_recall": Task(_associative_recall, lambda n: 2 * n + 5, "pairs", longest=52),
    "passkey": Task(_passkey, lambda n: 20 * n + 64, "sentences around the key", shortest=1),
}


def find(corpus: str) -> Task:
    """Return the task of `task:NAME`. Raises UserError if there is none."""
    name = corpus.removeprefix(TASK)
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {TASK}{near[0]}?" if near else ""
        raise UserError(f"data.corpus: found {corpus!r}; the tasks are {', '.join(TASKS)}{hint}")
    return TASKS[name]


def check_length(corpus: str, field: str, length: int) -> None:
    """Raise UserError that names the field if the task has no problems of this length."""
    task = find(corpus)
    if not task.shortest <= length <= task.longest:
        limits = f"of length {task.shortest} to {task.longest} ({task.unit})"
        raise UserError(f"{field}: found {shown(length)}; {corpus} has problems {limits}")


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
    """Return the split of a question: validation for one in eight, test for one in eight, else train."""
    byte = hashlib.blake2b(question.encode(), digest_size=1).digest()[0]
    return "test" if byte < 32 else "validation" if byte < 64 else "train"

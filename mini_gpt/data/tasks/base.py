"""A task: how to draw its problems, and the characters of which they consist."""

import re
import string
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ANSWER, END = "=", "\n"  # the answer starts after ANSWER and ends with END
ALPHABET = "".join(sorted(string.ascii_letters + string.digits + "+_?. " + ANSWER + END))  # of most tasks
FORMULAS = "".join(sorted(ALPHABET + "()*-,:>"))
SYMBOLS = "".join(map(chr, range(0x100, 0x200)))  # 256 letters, for tasks with many different tokens

Problem = tuple[str, str]  # question, answer
Span = tuple[int, int]  # the first character, and the one after the last
Link = tuple[Span, Span]  # a part of a question, and the part of the answer with the same meaning
Rng = np.random.Generator


@dataclass(frozen=True)
class Task:
    """A kind of problem.

    draw: (rng, length) -> (question, answer).
    size: length -> maximum number of characters; of a task that tags, without the answer, but with its end.
    unit: of the length.
    shortest, longest: range of allowed lengths.
    alphabet: the characters of all problems.
    scored: question -> indices of its characters that count like those of the answer.
    sizes: length -> maximum number of characters of the question, and of the answer with its end; by default that of
      the whole problem.
    align: (question, answer) -> the parts with the same meaning; None if they are not known.
    tags: whether the answer has a character for each of the question, and the model, which reads the question and "=",
      predicts it in its place. So the model does not read the answer, as it does in other tasks. An encoder-decoder
      writes it as in other tasks.
    """

    draw: Callable[[Rng, int], Problem]
    size: Callable[[int], int]
    unit: str
    shortest: int = 2
    longest: int = 100_000  # far above any context length
    alphabet: str = ALPHABET
    scored: Callable[[str], list[int]] = lambda question: []
    sizes: Callable[[int], tuple[int, int]] | None = None
    align: Callable[[str, str], list[Link]] | None = None
    tags: bool = False

    def sizes_of(self, length: int) -> tuple[int, int]:
        """Return the maximum number of characters of a question, and of an answer with its end."""
        return self.sizes(length) if self.sizes else (self.size(length), self.size(length))


def pick(rng: Rng, symbols: str, count: int) -> str:
    """Return `count` random symbols."""
    return "".join(symbols[i] for i in rng.integers(len(symbols), size=count))


def word_spans(text: str) -> list[Span]:
    """Return the words of a text, which spaces separate."""
    return [match.span() for match in re.finditer(r"[^ ]+", text)]

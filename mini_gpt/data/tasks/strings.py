"""Tasks on strings: copy, reverse, sort, and others."""

import string
from collections.abc import Callable

from mini_gpt.data.tasks.base import SYMBOLS, Problem, Rng, Task, pick


def _from_letters(answer: Callable[[str], str]) -> Task:
    """Return a task with random letters as its question and an answer of equal length."""

    def draw(rng: Rng, length: int) -> Problem:
        letters = pick(rng, string.ascii_lowercase, length)
        return letters, answer(letters)

    return Task(draw, lambda n: 2 * n + 2, "letters")


def _from_distinct_symbols(answer: Callable[[str], str]) -> Task:
    """Return a task with different symbols as its question and an answer of equal length."""

    def draw(rng: Rng, length: int) -> Problem:
        symbols = "".join(SYMBOLS[i] for i in rng.permutation(len(SYMBOLS))[:length])
        return symbols, answer(symbols)

    alphabet = "\n=" + SYMBOLS
    return Task(draw, lambda n: 2 * n + 2, "symbols", shortest=1, longest=len(SYMBOLS), alphabet=alphabet)


def _from_bits(answer: Callable[[str], str], size: Callable[[int], int] = lambda n: 2 * n + 2) -> Task:
    """Return a task with random bits as its question."""

    def draw(rng: Rng, length: int) -> Problem:
        bits = pick(rng, "01", length)
        return bits, answer(bits)

    return Task(draw, size, "bits", shortest=4)


def _missing_duplicate(rng: Rng, length: int) -> Problem:
    """Return a binary word of `length` bits, written twice with one bit missing (Ruoss et al. 2023)."""
    twice = 2 * "".join(map(str, rng.integers(2, size=length)))
    gap = int(rng.integers(2 * length))
    return twice[:gap] + "_" + twice[gap + 1 :], twice[gap]


def _bucket_sort(rng: Rng, length: int) -> Problem:
    digits = pick(rng, "12345", length)
    return digits, "".join(sorted(digits))


def _stack_manipulation(rng: Rng, length: int) -> Problem:
    """Return a stack of bits, the top last, and actions: p pops, a pushes 0, b pushes 1 (Delétang et al. 2023).

    The answer is the last stack, the top first.
    """
    depth = int(rng.integers(1, length))
    stack, actions = pick(rng, "01", depth), pick(rng, "pab", length - depth)
    left = list(stack)
    for action in actions:
        if action != "p":
            left.append("0" if action == "a" else "1")
        elif left:
            left.pop()
    return f"{stack}{actions}", "".join(reversed(left)) + "."


TASKS = {
    "copy": _from_letters(lambda letters: letters),
    "reverse": _from_letters(lambda letters: letters[::-1]),
    "sort": _from_letters(lambda letters: "".join(sorted(letters))),
    "missing_duplicate": Task(_missing_duplicate, lambda n: 2 * n + 3, "bits of the word"),
    "unique_copy": _from_distinct_symbols(lambda symbols: symbols),
    "unique_sort": _from_distinct_symbols(lambda symbols: "".join(sorted(symbols))),
    "repeat_copy": _from_bits(lambda bits: bits),
    "reverse_string": _from_bits(lambda bits: bits[::-1]),
    "duplicate_string": _from_bits(lambda bits: 2 * bits, lambda n: 3 * n + 2),
    "odds_first": _from_bits(lambda bits: bits[::2] + bits[1::2]),
    "bucket_sort": Task(_bucket_sort, lambda n: 2 * n + 2, "digits"),
    "stack_manipulation": Task(_stack_manipulation, lambda n: 2 * n + 3, "bits and actions", shortest=3),
}

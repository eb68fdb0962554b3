"""Word problems of groups: the product of each prefix of a word (Liu et al. 2023; Merrill et al. 2024).

A letter stands for an element, a permutation; element i of a group in sorted order is SYMBOLS[i], the identity is the
first. The elements of a word are uniform and independent, so all its products are uniform too: chance is 1/order at
each place, and no label is more frequent. At the first place, the product is the element itself.

The groups z60 and s3 are solvable, a5 and s5 are not: their word problems are NC¹-complete (Barrington 1989), so that
a fixed number of layers is conjectured not to solve all lengths. z60 has as many elements as a5.
"""

import functools
import itertools

from mini_gpt.data.tasks.base import SYMBOLS, Problem, Rng, Task

Permutation = tuple[int, ...]  # x ↦ permutation[x]


@functools.cache
def product(a: Permutation, b: Permutation) -> Permutation:
    """Return a·b, the permutation x ↦ a(b(x))."""
    return tuple(a[x] for x in b)


def _is_even(permutation: Permutation) -> bool:
    return sum(first > second for first, second in itertools.combinations(permutation, 2)) % 2 == 0


def _word_problem(elements: list[Permutation]) -> Task:
    letters = dict(zip(elements, SYMBOLS, strict=False))

    def draw(rng: Rng, length: int) -> Problem:
        word = [elements[i] for i in rng.integers(len(elements), size=length)]
        question, answer = ("".join(letters[g] for g in part) for part in (word, itertools.accumulate(word, product)))
        return question, answer

    alphabet = "\n=" + "".join(letters.values())
    return Task(draw, lambda n: n + 2, "elements", alphabet=alphabet, tags=True)


GROUPS: dict[str, list[Permutation]] = {
    "z60": [tuple((x + turn) % 60 for x in range(60)) for turn in range(60)],
    "s3": list(itertools.permutations(range(3))),
    "a5": list(filter(_is_even, itertools.permutations(range(5)))),
    "s5": list(itertools.permutations(range(5))),
}
TASKS = {f"group_{name}": _word_problem(elements) for name, elements in GROUPS.items()}

"""Tasks with a short answer about a whole string: counts, parity, positions on a cycle."""

import itertools
import string
from collections import Counter

from mini_gpt.data.tasks.base import Problem, Rng, Task, pick


def _majority(rng: Rng, length: int) -> Problem:
    """Return letters of which one is the most frequent, and this letter (Huang et al. 2025)."""
    while True:
        letters = pick(rng, string.ascii_lowercase, length)
        first, *others = Counter(letters).most_common(2)
        if not others or first[1] > others[0][1]:
            return letters, first[0]


def _bits_with_majority(rng: Rng, length: int) -> tuple[str, str]:
    """Return bits with a uniform number of ones, other than half of them, and the more frequent bit."""
    counts = [ones for ones in range(length + 1) if 2 * ones != length]
    ones = counts[rng.integers(len(counts))]
    bits = "".join(map(str, rng.permutation([1] * ones + [0] * (length - ones))))
    return bits, "1" if 2 * ones > length else "0"


def _interleaved_majority(rng: Rng, length: int) -> Problem:
    """Return three interleaved bit strings of `length` bits, and the more frequent bit of each (Huang et al. 2025)."""
    words, answers = zip(*(_bits_with_majority(rng, length) for _ in range(3)), strict=True)
    return "".join(map("".join, zip(*words, strict=True))), "".join(answers)


def _parity(rng: Rng, length: int) -> Problem:
    """Return bits with a uniform number of ones, and e if the number is even, else o (Huang et al. 2025)."""
    ones = int(rng.integers(length + 1))
    bits = "".join(map(str, rng.permutation([1] * ones + [0] * (length - ones))))
    return bits, "eo"[ones % 2]


def _even_pairs(rng: Rng, length: int) -> Problem:
    """Return bits, and whether the number of unequal neighbours is even: 1 or 0 (Delétang et al. 2023)."""
    bits = pick(rng, "01", length)
    return bits, str(1 - sum(a != b for a, b in itertools.pairwise(bits)) % 2)


def _cycle_navigation(rng: Rng, length: int) -> Problem:
    """Return moves on a cycle of five places (0 stay, 1 forward, 2 back), and the last place (Delétang et al. 2023)."""
    moves = rng.integers(3, size=length)
    return "".join(map(str, moves)), str(int(sum((0, 1, -1)[move] for move in moves)) % 5)


TASKS = {
    "majority": Task(_majority, lambda n: n + 3, "letters", shortest=1),
    "binary_majority": Task(_bits_with_majority, lambda n: n + 3, "bits", shortest=4),
    "binary_majority_interleave": Task(_interleaved_majority, lambda n: 3 * n + 5, "bits of each string", shortest=3),
    "parity": Task(_parity, lambda n: n + 3, "bits", shortest=4),
    "even_pairs": Task(_even_pairs, lambda n: n + 3, "bits", shortest=4),
    "cycle_navigation": Task(_cycle_navigation, lambda n: n + 3, "moves"),
}

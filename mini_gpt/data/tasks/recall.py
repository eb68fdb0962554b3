"""Tasks of recall: find what was said about a key, or the last value that was written."""

import string

import numpy as np

from mini_gpt.data.tasks.base import Problem, Rng, Task

PASSKEY_TEXT = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ", "There and back. ")
FIRST = 0x4E00  # the first of many CJK characters, which stand for the tokens of `mqar`
MQAR_TOKENS = 8192  # the first half are keys, the second half values
MQAR_POWER = 0.01  # of the distribution of distances
MQAR_LENGTH = 8  # tokens for each pair, before the answer
FLIP_FLOP = {"": 0.8, "_sparse": 0.98, "_dense": 0.1}  # share of instructions to ignore


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


def _mqar(rng: Rng, length: int) -> Problem:
    """Return key-value pairs, then each key again, followed by its value, among random tokens (Arora et al. 2024).

    The distances have a power law. The value after the last key is the answer; the others count as well.
    """
    half, slots = MQAR_TOKENS // 2, (MQAR_LENGTH - 2) * length // 2
    keys, values = rng.permutation(half)[:length], half + rng.permutation(half)[:length]
    shares = MQAR_POWER * np.arange(1, slots + 1) ** (MQAR_POWER - 1)
    places = rng.choice(slots, size=length, replace=False, p=shares / shares.sum())
    tokens = half + rng.integers(half, size=2 * slots)  # values, so that a key outside the pairs is always a query
    tokens[2 * places], tokens[2 * places + 1] = keys, values
    pairs = np.stack([keys, values], axis=1).reshape(-1)
    last = 2 * int(places.max())
    text = "".join(chr(FIRST + token) for token in [*pairs, *tokens[: last + 2]])
    return text[:-1], text[-1]


def _mqar_scored(question: str) -> list[int]:
    """Return the places of the values after a key that was seen before."""
    is_query = [ord(symbol) < FIRST + MQAR_TOKENS // 2 and symbol in question[:i] for i, symbol in enumerate(question)]
    return [i + 1 for i, found in enumerate(is_query[:-1]) if found]


def _flip_flop(ignored: float) -> Task:
    """Return flip-flop language modelling: after r comes the bit that was last written (Liu et al. 2023).

    Instructions are w (write), i (ignore) and r (read), each with a bit. The last is a read, and its bit the answer.
    """

    def draw(rng: Rng, length: int) -> Problem:
        shares = [(1 - ignored) / 2, ignored, (1 - ignored) / 2]
        instructions = ["w", *("wir"[i] for i in rng.choice(3, size=length - 2, p=shares)), "r"]
        bits, stored = rng.integers(2, size=length), 0
        text = ""
        for instruction, bit in zip(instructions, bits, strict=True):
            stored = int(bit) if instruction == "w" else stored
            text += instruction + str(stored if instruction == "r" else bit)
        return text[:-1], text[-1]

    def scored(question: str) -> list[int]:
        return [i + 1 for i, symbol in enumerate(question[:-1]) if symbol == "r"]

    return Task(draw, lambda n: 2 * n + 2, "instructions", shortest=4, scored=scored)


MQAR = "".join(map(chr, range(FIRST, FIRST + MQAR_TOKENS)))
TASKS = {
    "associative_recall": Task(_associative_recall, lambda n: 2 * n + 5, "pairs", longest=52),
    "passkey": Task(_passkey, lambda n: 20 * n + 64, "sentences around the key", shortest=1),
    "mqar": Task(
        _mqar,
        lambda n: MQAR_LENGTH * n + 2,
        "pairs",
        longest=MQAR_TOKENS // 2,
        alphabet="\n=" + MQAR,
        scored=_mqar_scored,
    ),
    **{f"flip_flop{name}": _flip_flop(ignored) for name, ignored in FLIP_FLOP.items()},
}

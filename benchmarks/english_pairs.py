"""Pairs of English sentences that differ in one word, made from templates, and known facts.

For an imported model that knows English: each pair has two texts of the same number of tokens and the token that
should follow each. Words that the tokenizer splits are left out.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.insight.mechanisms.patching import TextPair as Pair

NAMES = ("John", "Mary", "Tom", "Anna", "James", "Sarah", "David", "Laura", "Paul", "Emma", "Mark", "Alice")
PLACES, THINGS = ("store", "park", "school", "office", "garden"), ("book", "drink", "ring", "letter", "ball")
NOUNS = ("war", "project", "journey", "trial", "siege")
SINGULAR = ("key", "dog", "picture", "teacher", "car", "door", "student", "friend", "book", "tree")
ATTRACTORS = ("house", "garden", "road", "table", "window")
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Russia": "Moscow",
    "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Cuba": "Havana", "Poland": "Warsaw", "Austria": "Vienna",
    "Ireland": "Dublin", "Portugal": "Lisbon", "Sweden": "Stockholm", "Norway": "Oslo", "Kenya": "Nairobi",
    "Peru": "Lima", "Turkey": "Ankara", "Canada": "Ottawa", "Denmark": "Copenhagen", "Iran": "Tehran",
}  # fmt: skip
PAIRS = 32  # of each task


def tasks(tokenizer: Tokenizer) -> dict[str, list[Pair]]:
    """Return pairs for each task: the same number of tokens, and answers of one token.

    indirect object: Wang et al. 2023. greater than: Hanna et al. 2023. agreement: Linzen et al. 2016, with another noun
    between.
    """
    sentences = {"indirect object": _objects(), "greater than": _years(), "agreement": _agreement()}
    return {name: _encoded(tokenizer, each) for name, each in sentences.items()}


def _objects() -> Iterator[tuple[str, str, str, str]]:
    for (one, two), (place, thing) in _mixed(itertools.permutations(NAMES, 2), itertools.product(PLACES, THINGS)):
        text = f"When {one} and {two} went to the {place}, {{}} gave a {thing} to"
        yield text.format(two), text.format(one), f" {one}", f" {two}"


def _years() -> Iterator[tuple[str, str, str, str]]:
    for noun, (tens, ones) in _mixed(NOUNS, itertools.product(range(5, 8), range(1, 10))):
        text = f"The {noun} lasted from the year 17{{}} to the year 17"
        yield text.format(f"{tens}{ones}"), text.format(f"0{ones}"), "8", "1"


def _agreement() -> Iterator[tuple[str, str, str, str]]:
    for noun, attractor in _mixed(SINGULAR, ATTRACTORS):
        yield f"The {noun} near the {attractor}s", f"The {noun}s near the {attractor}s", " is", " are"
        yield f"The {noun}s near the {attractor}", f"The {noun} near the {attractor}", " are", " is"


def _mixed(*choices: Iterator | Sequence) -> Iterator[tuple]:
    """Yield all combinations in a fixed random order."""
    found = list(itertools.product(*map(list, choices)))
    for index in np.random.default_rng(0).permutation(len(found)):
        yield found[index]


def _encoded(tokenizer: Tokenizer, sentences: Iterator[tuple[str, str, str, str]]) -> list[Pair]:
    """Return the first PAIRS pairs whose texts have as many tokens as each other, and whose answers have one token."""
    pairs = []
    for sentence in sentences:
        clean_L, corrupted_L, *answers = (tokenizer.encode(text).astype(np.int32) for text in sentence)
        if len(clean_L) == len(corrupted_L) and all(len(answer) == 1 for answer in answers):
            pairs.append(Pair(clean_L, corrupted_L, *(int(answer[0]) for answer in answers)))
        if len(pairs) == PAIRS:
            break
    return pairs


def facts(tokenizer: Tokenizer) -> list[tuple[str, np.ndarray, int]]:
    """Return sentences without their last word, their tokens, and the first token of that word."""
    found = []
    for country, capital in CAPITALS.items():
        text = f"The capital of {country} is"
        found.append((text, tokenizer.encode(text).astype(np.int32), int(tokenizer.encode(f" {capital}")[0])))
    return found

"""Attention beside a recurrent model: the sizes, and the loss by the distance of the needed word."""

import numpy as np
import pytest

from benchmarks import distances
from mini_gpt.data import english, tokenizers
from mini_gpt.runtime import sharding

STORY = english.read("Some boxes that a small bird chases are empty. They are heavy.")
TOKENIZER = tokenizers.WordTokenizer.of_texts(english.write(seed).text for seed in range(800))


class FakeModel:
    """A model whose loss of a token is its id."""

    def __init__(self):
        self.mesh = sharding.make_mesh(1, 1, 1)

    def rows_at_a_time(self, length, count):
        return 2

    def nll(self, inputs_BL, targets_BL):
        assert (inputs_BL[:, 1:] == targets_BL[:, :-1]).all()
        return targets_BL


def test_the_needed_words_are_those_of_the_grammar():
    words = [word.text for word in STORY.words]
    found = sorted((words[index], place) for place, index in distances.needed(STORY))
    assert found == [
        ("They", ("antecedent", 8)),
        ("are", ("subject", 1)),
        ("are", ("subject", 4)),
        ("chases", ("subject", 1)),
    ]


def test_the_loss_of_a_needed_word_is_its_own_above_that_of_the_grammar():
    ids = {text.decode(): token for token, text in enumerate(TOKENIZER.texts)}
    found = distances.losses(FakeModel(), TOKENIZER, [STORY, english.write(3), STORY])
    (they,) = (index for (kind, _), index in distances.needed(STORY) if kind == "antecedent")
    expected = ids[" They"] - STORY.words[they].nats
    assert [value for value in found["antecedent", 8] if value == pytest.approx(expected)] == 2 * [
        pytest.approx(expected)
    ]


def test_differences_are_paired_by_seed():
    place, rare = ("answer", 8), ("answer", 16)
    of = lambda values: {seed: {place: value, rare: 0.0} for seed, value in enumerate(values)}
    (row,) = distances.rows({"a": of([1.0, 2.0, 4.0]), "b": of([2.0, 4.0, 7.0])}, {place: 30, rare: 3})
    assert (row["distance"], row["words"], row["a"], row["difference"]) == ("8–15", 30, pytest.approx(7 / 3), -2.0)
    half = 4.303 * np.std([-1, -2, -3], ddof=1) / 3**0.5  # Student's t, two degrees of freedom
    assert (row["low"], row["high"]) == (pytest.approx(-2 - half, abs=0.1), pytest.approx(-2 + half, abs=0.1))

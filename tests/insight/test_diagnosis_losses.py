"""The checks of losses, on hand-made numbers."""

import itertools
import math

import numpy as np
import pytest

from mini_gpt.insight.diagnosis import losses


def test_a_loss_that_rises_again_is_found():
    falling = np.linspace(5, 2, 100)

    def training(values, step=1000):
        rows = [{"step": at, "train/loss": value, "train/gradient_norm": 1.0} for at, value in enumerate(values)]
        return losses.training(rows, step)

    (finding,) = training(falling)
    assert not finding.found and finding.value == pytest.approx(0)
    (finding,) = training([*falling, *np.full(30, 4.0)])
    assert finding.found and finding.value == pytest.approx(4 - falling[-6:].mean(), rel=0.01)
    assert not training([*falling, *np.full(30, 4.0)], step=99)[0].found, "it rises after the model's step"
    assert training([1.0] * 5) == [], "too few rows"
    (finding,) = losses.training([{"step": 1, "train/loss": 1.0}] * 30, 1)  # non-finite norms are not logged
    assert not finding.found
    (finding,) = training(2 + 1.5 * np.random.default_rng(0).normal(size=60))
    assert finding.value > losses.RISE and not finding.found, "noise is not a rise"


ROWS = [{"step": step, "validation/loss": loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5))]
IMPORTED = {"recorded": None, "recorded_train": None}


@pytest.mark.parametrize(
    "changed, found",
    [
        ({}, []),
        ({"loss": 2.005}, []),  # another device rounds otherwise
        ({"loss": 2.02}, ["recorded loss"]),
        ({"loss": 2.1}, ["recorded loss"]),
        ({"loss": 1.9}, ["recorded loss"]),  # it reads its targets, or it is another checkpoint
        ({"loss": math.nan, "train": math.nan}, ["loss", "recorded loss"]),
        ({"loss": 2.2, "same_step": False}, []),
        ({"loss": 2.4, "same_step": False}, ["recorded loss"]),
        ({"train": 2.4, "recorded": None}, ["recorded loss"]),
        ({"train": 0.17, "loss": 1.98, "recorded": 1.98, "rise": 0.52}, ["overfitting"]),
        ({"train": 1.7, "rise": 0.15}, ["overfitting"]),
        ({"train": 1.99, "rise": 0.15}, []),  # training text became harder too: not overfit
        ({"train": 0.9, "recorded": None}, ["overfitting"]),
        ({"loss": 2.6, "recorded": 2.6, "train": 2.5, "recorded_train": 2.5}, []),  # early
        ({"loss": 3.19, "recorded": 3.19}, ["loss"]),
        ({"loss": 2.6} | IMPORTED, ["loss"]),
        ({"loss": 2.3} | IMPORTED, []),
        ({"loss": 2.6, "bigram": None} | IMPORTED, []),  # masked
    ],
)
def test_losses_are_compared_with_the_record(changed, found):
    healthy = {"loss": 2.0, "train": 1.9, "recorded": 2.0, "rise": 0.0, "same_step": True}
    healthy |= {"recorded_train": 1.95, "unigram": 3.2, "bigram": 2.4}
    made = losses.Losses(**healthy | changed)
    assert [result.check for result in losses.check(made) if result.found] == found


def test_the_record_of_the_nearest_evaluation_is_taken():
    names = ("recorded", "rise", "same_step")
    taken = [tuple(map(losses.recorded(ROWS, step).get, names)) for step in (9, 10, 22, 28, 30)]
    expected = [(3.0, 0.0, False), (3.0, 0.0, True), (2.0, 0.0, False), (2.5, 0.0, False), (2.5, 0.5, True)]
    assert taken == expected, "a later evaluation does not count in the rise"
    falling = [{"step": step, "train/loss": 20.0 - step} for step in range(15)]
    assert losses.recorded(falling, 9)["recorded_train"] == np.mean([15, 14, 13, 12, 11]), "the last five rows so far"


def test_the_bigram_loss_is_that_of_the_formula():
    train, texts = np.array([0, 1, 2, 0, 1, 0, 2, 2]), [np.array([0, 1, 1]), np.array([1, 3, 2])]
    counts = np.array([3, 2, 3, 0]) + 1
    unigram_V = np.log(counts / counts.sum())
    expected = []
    for first, second in (pair for text in texts for pair in itertools.pairwise(text)):
        followers = [b for a, b in itertools.pairwise(train) if a == first]
        share = math.exp(unigram_V[second])
        if followers:
            kinds = len(set(followers))
            share = (followers.count(second) + kinds * share) / (len(followers) + kinds)
        expected.append(-math.log(share))
    assert losses.bigram(train, texts, unigram_V) == pytest.approx(np.mean(expected))

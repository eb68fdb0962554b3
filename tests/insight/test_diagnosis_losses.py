"""The checks of losses and of the temperature, on hand-made numbers."""

import itertools
import math

import numpy as np
import pytest

from mini_gpt.insight.diagnosis import losses


def test_a_loss_that_rises_again_is_found():
    falling = np.linspace(5, 2, 100)
    row = lambda loss: {"train/loss": loss, "train/gradient_norm": 1.0}
    (finding,) = losses.training([row(loss) for loss in falling])
    assert not finding.found and finding.value == pytest.approx(0)
    (finding,) = losses.training([row(loss) for loss in [*falling, *np.full(30, 4.0)]])
    assert finding.found and finding.value == pytest.approx(4 - falling[-6:].mean(), rel=0.01)
    assert losses.training([row(1.0)] * 5) == [], "too few rows"
    (finding,) = losses.training([{"train/loss": 1.0}] * 30)  # non-finite norms are not logged
    assert not finding.found
    noisy = 2 + 1.5 * np.random.default_rng(0).normal(size=60)
    (finding,) = losses.training([row(loss) for loss in noisy])
    assert finding.value > losses.RISE and not finding.found, "noise is not a rise"


ROWS = [{"step": step, "validation/loss": loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5))]


def made_losses(**changed):
    """Return hand-made losses of a healthy model, with some changed."""
    healthy = {"loss": 2.0, "train": 1.9, "windows": 2.0, "recorded": 2.0, "rise": 0.0, "same_step": True}
    healthy |= {"recorded_train": 1.95, "unigram": 3.2, "bigram": 2.4}
    return losses.Losses(**healthy | changed)


def compared(**changed):
    """Return the names of what is found in hand-made losses, and whether they are suspicious."""
    made = made_losses(**changed)
    return [result.check for result in losses.check(made) if result.found], made.suspicious


@pytest.mark.parametrize(
    "changed, found",
    [
        ({}, []),
        ({"loss": 2.01, "windows": 2.2}, []),  # another device rounds otherwise
        ({"loss": 2.1}, ["recorded loss"]),
        ({"loss": 1.9}, ["recorded loss"]),  # it reads its targets, or it is another checkpoint
        ({"loss": math.nan, "windows": math.nan, "train": math.nan}, ["loss", "recorded loss"]),
        ({"loss": 2.2, "same_step": False}, []),
        ({"loss": 2.4, "same_step": False}, ["recorded loss"]),
        ({"train": 2.4, "recorded": None}, ["recorded loss"]),
        ({"train": 0.17, "loss": 1.98, "recorded": 1.98, "rise": 0.52}, ["overfitting"]),
        ({"train": 1.7, "rise": 0.15}, ["overfitting"]),
        ({"train": 1.99, "rise": 0.15}, []),  # training text became harder too: not overfit
        ({"train": 0.9, "recorded": None}, ["overfitting"]),
        (
            {"windows": 2.6, "loss": 2.6, "recorded": 2.6, "train": 2.5, "recorded_train": 2.5},
            [],
        ),  # early
        ({"windows": 3.19, "loss": 2.0}, ["loss"]),
        ({"windows": 2.6, "recorded": None, "recorded_train": None}, ["loss"]),  # imported
        ({"windows": 2.3, "recorded": None, "recorded_train": None}, []),
        ({"windows": 2.6, "recorded": None, "recorded_train": None, "bigram": None}, []),  # masked
    ],
)
def test_losses_are_compared_with_the_record(changed, found):
    assert compared(**changed)[0] == found
    imported = {"recorded", "recorded_train"} <= changed.keys() and found == ["loss"]
    finite = math.isfinite(changed.get("loss", 2.0))
    assert compared(**changed)[1] == (finite and ("recorded loss" in found or imported))


def test_the_record_of_the_nearest_evaluation_is_taken():
    names = ("recorded", "rise", "same_step")
    taken = [tuple(map(losses.recorded(ROWS, step).get, names)) for step in (9, 10, 22, 28, 30)]
    expected = [(3.0, 0.0, False), (3.0, 0.0, True), (2.0, 0.0, False), (2.5, 0.0, False), (2.5, 0.5, True)]
    assert taken == expected, "a later evaluation does not count in the rise"
    falling = [{"step": step, "train/loss": 20.0 - step} for step in range(15)]
    assert losses.recorded(falling, 9)["recorded_train"] == np.mean([15, 14, 13, 12, 11]), "the last five rows so far"


def test_the_bigram_loss_is_that_of_the_formula():
    train, window = np.array([0, 1, 2, 0, 1, 0, 2, 2]), np.array([[0, 1, 1, 3, 2]])
    counts = np.array([3, 2, 3, 0]) + 1
    unigram_V = np.log(counts / counts.sum())
    expected = []
    for first, second in zip(window[0], window[0, 1:], strict=False):
        followers = [b for a, b in itertools.pairwise(train) if a == first]
        share = math.exp(unigram_V[second])
        if followers:
            kinds = len(set(followers))
            share = (followers.count(second) + kinds * share) / (len(followers) + kinds)
        expected.append(-math.log(share))
    assert losses.bigram(train, window, unigram_V) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("temperature", [0.2, 1.0, 4.0])
def test_the_fitted_temperature_is_the_true_one(temperature):
    rng = np.random.default_rng(0)
    true_SV = 2 * rng.normal(size=(4000, 12))
    targets_S = (true_SV + rng.gumbel(size=true_SV.shape)).argmax(-1)  # samples of softmax(true)
    log_SV = true_SV * temperature  # dividing by the temperature restores the true logits
    log_SV -= np.log(np.exp(log_SV).sum(-1, keepdims=True))
    fitted, gain = losses.fit_temperature(log_SV, targets_S)
    assert fitted == pytest.approx(temperature, rel=0.06)
    for smoothing in (0.0, 0.1):
        result = checked(log_SV, targets_S, smoothing, **IMPORTED)
        assert result.found is (temperature > 1 or (temperature < 1 and smoothing == 0)) and result.value == fitted
        assert not result.found or gain > 0.05
    assert not checked(log_SV, targets_S, 0.0, **IMPORTED, unigram=0.1).found, "a unigram model is better"


IMPORTED = {"recorded": None, "recorded_train": None}


def checked(log_SV, targets_S, smoothing, **changed):
    """Return the check of the temperature, with hand-made losses of a healthy model, some of them changed."""
    (result,) = losses.temperature(log_SV, targets_S, made_losses(**{"unigram": 9.0} | changed), smoothing)
    return result


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_small_logits_are_a_fault_only_if_the_loss_is_not_the_recorded_one(smoothing):
    rng = np.random.default_rng(1)
    true_SV = 2 * rng.normal(size=(4000, 12))
    targets_S = (true_SV + rng.gumbel(size=true_SV.shape)).argmax(-1)
    normalised = lambda logits_SV: logits_SV - np.log(np.exp(logits_SV).sum(-1, keepdims=True))
    loss = lambda log_SV: -float(np.take_along_axis(log_SV, targets_S[:, None], axis=1).mean())
    small_SV, right = normalised(0.3 * true_SV), loss(normalised(true_SV))
    found = lambda **changed: checked(small_SV, targets_S, smoothing, loss=loss(small_SV), **changed).found
    assert not found(recorded=loss(small_SV)), "still learning, or smoothed"
    assert not found(recorded=loss(small_SV) - 0.1, same_step=False), "near enough to the nearest evaluation"
    assert found(recorded=right), "the logits became smaller after training"
    assert not found(recorded=right - 2), "another fault: the temperature explains less than the difference"
    large_SV = normalised(3 * true_SV)
    for recorded in (loss(large_SV), right):
        assert checked(large_SV, targets_S, smoothing, loss=loss(large_SV), recorded=recorded).found


def test_predictions_of_infrequent_tokens_are_found():
    rng = np.random.default_rng(0)
    unigram_V = np.log(rng.dirichlet(np.ones(60)) + 1e-9)
    counts_V = np.exp(unigram_V) * 1e6
    log_SV = unigram_V + 0.3 * rng.normal(size=(200, 60))
    assert [result.found for result in losses.vocabulary(log_SV, counts_V)] == [False]
    assert [result.found for result in losses.vocabulary(log_SV[:, rng.permutation(60)], counts_V)] == [True]

"""How often verdicts and intervals are false, in simulated studies; the guide "Study" states these rates."""

import numpy as np
import pytest

from mini_gpt.study import analysis, statistics
from mini_gpt.study.definition import Comparison

LEVEL, SMALLEST = 0.05, 1.0


def has_false_verdict(rng, true_differences, seeds, deviations, smallest=SMALLEST):
    """Return whether a simulated study with normal differences has some false verdict. All claims are "lower"."""
    pairs = {}
    for index, (true, deviation) in enumerate(zip(true_differences, deviations, strict=True)):
        row = lambda value: {"own": value, "reason": None}
        drawn_S = rng.normal(true, deviation, seeds)
        which = Comparison(f"a{index}", "lower", "b", "tasks", "own", "", 8, smallest)
        pairs[which] = {seed: (row(drawn), row(0.0)) for seed, drawn in enumerate(drawn_S)}
    right = {"shown": lambda true: true < 0, "opposite shown": lambda true: true > 0}
    right |= {"equivalent": lambda true: abs(true) < smallest, "undecided": lambda true: True}
    found = analysis.outcomes(pairs, LEVEL, seeds)
    return any(not right[one.verdict](true) for one, true in zip(found, true_differences, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "true_differences, seeds, deviations",
    [
        (
            [0.0] + [SMALLEST] * 11,
            10,
            [3.0] + [0.3] * 11,
        ),  # eleven are shown, and must not weaken the test of the other
        ([0.0, SMALLEST], 10, [1.0, 1.0]),
        ([0.5, -0.5, 0.0, 0.0], 8, [0.2, 0.2, 0.2, 2.0]),  # in the first two, both null hypotheses are false
    ],
)
def test_few_studies_have_any_false_verdict(true_differences, seeds, deviations):
    rng, studies = np.random.default_rng(0), 1500
    false = np.mean([has_false_verdict(rng, true_differences, seeds, deviations) for _ in range(studies)])
    assert false <= LEVEL + 3 * np.sqrt(LEVEL * (1 - LEVEL) / studies), false


@pytest.mark.slow
def test_few_studies_without_a_smallest_effect_have_any_false_verdict():
    """Four differences are shown in all studies; Holm's method then tests the last one at the full level."""
    rng, studies, true, deviations = np.random.default_rng(0), 600, [5.0] * 4 + [0.0], [0.3] * 4 + [1.0]
    false = np.mean([has_false_verdict(rng, true, 8, deviations, smallest=0.0) for _ in range(studies)])
    assert LEVEL / 2 <= false <= LEVEL + 3 * np.sqrt(LEVEL * (1 - LEVEL) / studies), false


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds, covered, false_equivalent, false_p",
    [(3, 0.88, 0.17, 0.0), (5, 0.88, 0.16, 0.0), (8, 0.89, 0.14, 0.09), (10, 0.90, 0.13, 0.09)],
)
def test_skewed_differences_have_the_rates_of_the_guide(seeds, covered, false_equivalent, false_p):
    """Exponential differences with a mean of 0; they are shifted to the smallest effect for the test of equivalence."""
    drawn_TS = np.random.default_rng(seeds).exponential(size=(4000, seeds)) - 1
    draws_TR = [statistics.draw_means(drawn_S) for drawn_S in drawn_TS]
    inside = [low <= 0 <= high for low, high in (statistics.interval(draws_R, LEVEL) for draws_R in draws_TR)]
    p_equivalent_T = np.array([statistics.equivalence_p(draws_R + 50, 50) for draws_R in draws_TR])
    assert np.mean(inside) == pytest.approx(covered, abs=0.015)
    assert np.mean(p_equivalent_T <= LEVEL) == pytest.approx(false_equivalent, abs=0.02)
    assert np.mean(p_equivalent_T <= LEVEL / 12) == pytest.approx(0.04, abs=0.012)  # of twelve comparisons
    small_p = [statistics.sign_flip_p(drawn_S) <= LEVEL for drawn_S in drawn_TS[:1000]]
    assert np.mean(small_p) == pytest.approx(false_p, abs=0.03)


def test_ranges_of_three_equal_seeds_are_often_apart():
    """docs/results/extrapolation.md states these shares: of one pair of conditions, and of some pair of six."""
    drawn_TCS = np.random.default_rng(0).normal(size=(20_000, 6, 3))
    lowest_TC, highest_TC = drawn_TCS.min(2), drawn_TCS.max(2)
    below_TCC = highest_TC[:, :, None] < lowest_TC[:, None, :]
    assert (below_TCC | below_TCC.transpose(0, 2, 1))[:, 0, 1].mean() == pytest.approx(0.1, abs=0.01)
    assert below_TCC.any((1, 2)).mean() == pytest.approx(0.57, abs=0.015)


@pytest.mark.slow
def test_p_ignores_the_choice_of_items():
    """The items shift all seeds by a shared error, here with twice the standard error of the seeds."""
    rng, seeds = np.random.default_rng(0), 8
    shifts_T = rng.normal(0, 2 / np.sqrt(seeds), 3000)
    false = np.mean([statistics.sign_flip_p(rng.normal(shift, 1, seeds)) <= LEVEL for shift in shifts_T])
    assert false == pytest.approx(0.31, abs=0.03)

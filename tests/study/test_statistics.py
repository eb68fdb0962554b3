"""Statistics of studies: independent recomputation, simulations with known effects, and the rates of errors."""

import itertools

import numpy as np
import pytest
from scipy import stats

from mini_gpt.study import analysis, statistics
from mini_gpt.study.definition import Comparison
from mini_gpt.study.statistics import PairedItems
from tests.conftest import slow

# Statistics of studies: independent recomputation, and simulations with known effects.


def test_the_spread_of_known_values():
    found = statistics.spread([1.0, 2.0, 3.0, 10.0])
    assert found == (4.0, pytest.approx(np.sqrt((9 + 4 + 1 + 36) / 3)), 2.5, 1.0, 10.0)
    assert statistics.spread([7.0]) == (7.0, None, 7.0, 7.0, 7.0)


def test_the_probability_of_improvement_counts_pairs():
    first, second = [1.0, 2.0, 5.0], [2.0, 4.0]
    pairs = [(a < b) + 0.5 * (a == b) for a, b in itertools.product(first, second)]
    assert statistics.probability_lower(first, second) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("seeds", [1, 2, 3, 5, 8])
def test_the_sign_flip_test_counts_all_patterns(seeds):
    rng = np.random.default_rng(seeds)
    for values in (rng.normal(size=seeds), rng.normal(2, size=seeds), rng.integers(-2, 3, size=seeds) / 1.0):
        means = [np.mean(values * signs) for signs in itertools.product([1, -1], repeat=seeds)]
        expected = np.mean(np.abs(means) >= abs(np.mean(values)) - 1e-12)
        assert statistics.sign_flip_p(values) == pytest.approx(min(1, expected))
    assert statistics.sign_flip_p(np.full(seeds, 0.1)) == statistics.smallest_p(seeds) == min(1, 2 / 2**seeds)
    assert statistics.sign_flip_p(np.zeros(seeds)) == 1


def test_above_sixteen_seeds_the_smallest_p_is_that_of_the_random_patterns():
    assert statistics.sign_flip_p(np.linspace(1, 2, 30)) == pytest.approx(statistics.smallest_p(30))


def test_holm_adjusts_known_values():
    assert np.ravel(statistics.holm([[0.01], [0.04], [0.03]])) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([[0.9], [0.5]]) == [[1.0], [1.0]]
    assert statistics.holm([]) == []


def rejected_one_by_one(p_values_CT, level):
    """Return which tests are rejected (Shaffer 1986): p is compared with level / the most null hypotheses that can
    still be true, which is found by listing all allowed sets of true ones."""
    tests = list(np.ndindex(p_values_CT.shape))
    allowed = [
        {test for test in chosen if test}
        for chosen in itertools.product(*[[None, (row, 0), (row, 1)] for row in range(len(p_values_CT))])
    ]
    rejected = set()
    for _ in tests:
        most = max(len(true) for true in allowed if not true & rejected)
        rejected |= {test for test in tests if most and p_values_CT[test] <= level / most}
    return rejected


def test_both_tests_of_a_comparison_share_one_family():
    rng = np.random.default_rng(0)
    for _ in range(100):
        p_values_CT = rng.choice([1e-4, 0.002, 0.008, 0.012, 0.02, 0.04, 0.3, 1.0], (4, 2))
        adjusted_CT = np.array(statistics.holm(p_values_CT.tolist()))
        for level in (0.05, 0.1):
            found = set(zip(*np.nonzero(adjusted_CT <= level + 1e-12), strict=True))
            assert found == rejected_one_by_one(p_values_CT, level), p_values_CT
    known = statistics.holm([[0.001, 0.001], [0.01, 1], [0.04, 1]])
    np.testing.assert_allclose(known, [[0.003, 0.003], [0.02, 1], [0.08, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("call", [statistics.spread, statistics.sign_flip_p, statistics.draw_means])
def test_a_value_that_is_not_finite_is_refused(call, bad):
    with pytest.raises(ValueError, match="must be finite"):
        call([1.0, bad, 2.0])


@pytest.mark.parametrize(
    "difference, claim, p, equivalent_p, expected",
    [
        (-1, "lower", 0.05, 1, "shown"),
        (1, "lower", 0.05, 1, "opposite shown"),
        (1, "higher", 0.01, 1, "shown"),
        (-1, "higher", 0.01, 1, "opposite shown"),
        (-1, "lower", 0.051, 1, "undecided"),
        (-1, "lower", 0.01, 0.05, "equivalent"),
        (1, "lower", 0.9, 0.051, "undecided"),
    ],
)
def test_verdicts(difference, claim, p, equivalent_p, expected):
    assert statistics.verdict(difference, claim, p, equivalent_p, level=0.05) == expected


def made_up(rng, seeds, effect, seed_deviation, item_deviation, items=64):
    """Return the differences of seeds, and of items: effects of the seed, of the item, and noise."""
    seed_S1, item_P = rng.normal(0, seed_deviation, (seeds, 1)), rng.normal(0, item_deviation, items)
    weights_P = np.full(items, 7.0)
    differences_SP = (effect + seed_S1 + item_P + rng.normal(0, 0.5, (seeds, items))) * weights_P
    return differences_SP.sum(1) / weights_P.sum(), PairedItems(differences_SP, weights_P)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds, seed_deviation, item_deviation", [(5, 1, 0), *slow((8, 1, 2), (3, 1, 1), (5, 0.3, 4), (10, 2, 0))]
)
def test_intervals_cover_a_known_effect_at_their_level(seeds, seed_deviation, item_deviation):
    rng, effect, level, draws = np.random.default_rng(seeds), 0.7, 0.05, 2000
    covered = 0
    for _ in range(draws):
        differences_S, items = made_up(rng, seeds, effect, seed_deviation, item_deviation)
        low, high = statistics.interval(statistics.draw_means(differences_S, items), level)
        covered += low <= effect <= high
    assert abs(covered / draws - (1 - level)) <= 0.02, covered / draws


def test_equivalence_needs_draws_inside_the_smallest_effect():
    drawn = np.linspace(-1, 1, 1001)
    assert statistics.equivalence_p(drawn, 2.0) == pytest.approx(1 / 1002)
    assert statistics.equivalence_p(drawn, 0.5) == pytest.approx(0.25, abs=0.002)
    assert statistics.equivalence_p(drawn + 2, 0.5) > 0.9
    assert statistics.equivalence_p(drawn, 0) == 1


@pytest.mark.parametrize("seeds, comparisons", [(8, 6), *slow((8, 1), (20, 10))])
def test_the_detectable_difference_is_found_with_the_stated_power(seeds, comparisons):
    level, deviation = 0.05, 0.3
    difference = statistics.detectable_difference(seeds, deviation, comparisons, level)
    rng = np.random.default_rng(0)
    p = [statistics.sign_flip_p(rng.normal(difference, deviation, seeds)) for _ in range(300)]
    assert np.mean(np.array(p) <= level / comparisons) == pytest.approx(statistics.POWER, abs=0.08)


def test_above_twelve_seeds_the_detectable_difference_is_that_of_the_t_test():
    difference = statistics.detectable_difference(20, 0.3, 10, 0.05)
    draws = np.random.default_rng(0).normal(difference, 0.3, size=(20_000, 20))
    found = stats.ttest_1samp(draws, 0, axis=1).pvalue <= 0.05 / 10
    assert np.mean(found) == pytest.approx(statistics.POWER, abs=0.01)  # three standard errors


def test_too_few_seeds_can_show_nothing():
    assert statistics.detectable_difference(5, 1.0, 1, 0.05) is None
    assert statistics.seeds_needed(1, 0.05) == 6 and statistics.smallest_p(6) <= 0.05 < statistics.smallest_p(5)
    for comparisons in (1, 2, 6, 7, 25, 26, 100):
        needed = statistics.seeds_needed(comparisons, 0.05)
        assert statistics.smallest_p(needed) <= 0.05 / comparisons < statistics.smallest_p(needed - 1)


def test_without_item_effects_the_interval_is_students():
    differences_S = [0.3, 0.1, 0.5, 0.2]
    low, high = statistics.interval(statistics.draw_means(differences_S), 0.05)
    expected = stats.t.interval(0.95, 3, np.mean(differences_S), stats.sem(differences_S))
    assert (low, high) == pytest.approx(expected, abs=1e-3)


# How often verdicts and intervals are false, in simulated studies; the guide "Study" states these rates.

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

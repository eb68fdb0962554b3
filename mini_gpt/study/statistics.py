"""Statistics of paired runs: spread, exact sign-flip test, intervals over seeds and items, Holm's method and verdicts.

The unit is the seed, which both conditions of a comparison share. Shape suffixes: S seeds, P items, R draws of the
mean difference, F sign patterns.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

DRAWS = 10_000  # of the mean difference
EXACT_SEEDS = 16  # up to this number, the sign-flip test uses all sign patterns
SMALLEST_P = 2 / (2**EXACT_SEEDS + 1)  # of the test with random sign patterns
POWER = 0.8  # of `detectable_difference`


class Spread(NamedTuple):
    """The values of a metric over seeds. standard_deviation: with divisor n - 1; None for one seed."""

    mean: float
    standard_deviation: float | None
    interquartile_mean: float
    lowest: float
    highest: float


def _check_finite(name: str, values: np.ndarray | Sequence[float]) -> None:
    """Raise ValueError if a value is NaN or infinite: comparisons with NaN are false, so it would pass as a small p."""
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: found {values}; all values must be finite")


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value. The interquartile mean ignores a quarter at each end."""
    _check_finite("values", values)
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    middle = float(stats.trim_mean(values, 0.25))
    return Spread(float(np.mean(values)), deviation, middle, float(min(values)), float(max(values)))


def probability_lower(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the share of pairs (one seed of each) in which `first` is lower; a tie is half a pair.

    Agarwal et al. 2021 call it the probability of improvement. It is the Mann-Whitney statistic divided by the number
    of pairs.
    """
    return float(stats.mannwhitneyu(second, first).statistic) / (len(first) * len(second))


def smallest_p(seeds: int) -> float:
    """Return the smallest two-sided p that `sign_flip_p` can give."""
    return min(1.0, 2.0 ** (1 - seeds)) if seeds <= EXACT_SEEDS else SMALLEST_P


def sign_flip_p(differences_S: Sequence[float]) -> float:
    """Return the two-sided p of the sign-flip test (Fisher 1935).

    The null hypothesis is that the differences are symmetric about 0. Exact up to EXACT_SEEDS seeds; above, from
    2**EXACT_SEEDS random patterns.
    """
    _check_finite("differences_S", differences_S)
    if len(differences_S) < 2 or not np.any(differences_S):
        return 1.0
    found = stats.permutation_test(
        (np.asarray(differences_S),),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**EXACT_SEEDS,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


class PairedItems(NamedTuple):
    """Differences of paired items: problems, or parts of a text. Their sum / sum(weights_P) is that of the metric.

    differences_SP: first - second, of each seed and item.
    weights_P: the same for both conditions and all seeds.
    """

    differences_SP: np.ndarray
    weights_P: np.ndarray


def draw_means(differences_S: Sequence[float], items: PairedItems | None = None) -> np.ndarray:
    """Return DRAWS float64 draws of the mean difference, for the variation over seeds and items.

    Seeds: Student's t distribution of the mean, since resampling few seeds gives too short intervals. Items: a
    bootstrap, which resamples the same items for all seeds. Its deviation is added. Needs at least two seeds.
    """
    _check_finite("differences_S", differences_S)
    seeds = len(differences_S)
    mean, error = np.mean(differences_S), np.std(differences_S, ddof=1) / math.sqrt(seeds)
    drawn_R = mean + error * _student_R(seeds - 1)
    if items is not None:
        counts_RP = _counts_RP(len(items.weights_P))
        resampled_R = counts_RP @ items.differences_SP.mean(axis=0) / (counts_RP @ items.weights_P)
        drawn_R = drawn_R + resampled_R - items.differences_SP.mean(axis=0).sum() / items.weights_P.sum()
    return drawn_R


@functools.lru_cache(maxsize=4)
def _student_R(freedom: int) -> np.ndarray:
    """Return DRAWS evenly spaced quantiles in random order: less noise than random values."""
    quantiles_R = stats.t.ppf((np.arange(DRAWS) + 0.5) / DRAWS, freedom)
    return np.random.default_rng(1).permutation(quantiles_R)


@functools.lru_cache(maxsize=4)
def _counts_RP(items: int) -> np.ndarray:
    """Return how often each draw takes each item."""
    return np.random.default_rng(2).multinomial(items, np.full(items, 1 / items), DRAWS).astype(np.float32)


def interval(drawn_R: np.ndarray, level: float) -> tuple[float, float]:
    """Return the percentile interval that contains the share 1 - level of the draws."""
    low, high = np.quantile(drawn_R, [level / 2, 1 - level / 2])
    return float(low), float(high)


def equivalence_p(drawn_R: np.ndarray, smallest_effect: float) -> float:
    """Return the p of two one-sided tests (Schuirmann 1987) for a difference within ± smallest_effect; 1 for 0."""
    if smallest_effect == 0:
        return 1.0
    outside = max(np.sum(drawn_R >= smallest_effect), np.sum(drawn_R <= -smallest_effect))
    return float(outside + 1) / (len(drawn_R) + 1)


def holm(p_values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return adjusted p values of the tests of each comparison: to reject all up to a level keeps the family-wise rate.

    Holm's method (1979), for comparisons in which at most one null hypothesis is true (Shaffer 1986): p is multiplied
    by the number of comparisons that have a test with a p at least as large. With one test in each, this is Holm's
    method.
    """
    tests = sorted((p, row, test) for row, values in enumerate(p_values) for test, p in enumerate(values))
    adjusted, highest, waiting = [list(values) for values in p_values], 0.0, [len(values) for values in p_values]
    for p, row, test in tests:
        highest = max(highest, min(1.0, np.count_nonzero(waiting) * p))
        adjusted[row][test] = highest
        waiting[row] -= 1
    return adjusted


def verdict(difference: float, claim: str, p: float, equivalent_p: float, level: float) -> str:
    """Return "equivalent", "shown", "opposite shown" or "undecided".

    claim: "lower" or "higher"; p values: adjusted.

    A difference within the smallest effect is equivalent, even if it differs significantly from 0.
    """
    if equivalent_p <= level:
        return "equivalent"
    if p > level:
        return "undecided"
    return "shown" if (difference < 0) == (claim == "lower") else "opposite shown"


def seeds_needed(comparisons: int, level: float) -> int:
    """Return the smallest number of seeds with which Holm's first step can succeed.

    level / comparisons must be at least SMALLEST_P.
    """
    return next(seeds for seeds in range(1, EXACT_SEEDS + 2) if smallest_p(seeds) <= level / comparisons)


def too_few(seeds: Sequence[int], comparisons: Sequence[object], level: float) -> bool:
    """Return whether no difference can be shown, because even the smallest possible p is too large."""
    return len(comparisons) > 0 and len(seeds) < seeds_needed(len(comparisons), level)


def detectable_difference(seeds: int, deviation: float, comparisons: int, level: float) -> float | None:
    """Return the difference that is found with probability POWER; None if even the smallest p is too large.

    deviation: standard deviation over seeds of the paired difference, assumed normal. The p of one comparison must be
    at most level / comparisons, Holm's first step. The power is simulated up to 12 seeds; above, it is that
    of the t test.
    """
    needed = level / comparisons
    if smallest_p(seeds) > needed:
        return None
    low, high = 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _power(seeds, middle, needed) >= POWER else (middle, high)
    return high * deviation


def _power(seeds: int, effect: float, level: float) -> float:
    """Return the probability that the sign-flip test finds a difference of `effect` standard deviations."""
    if seeds > 12:
        critical = stats.t.ppf(1 - level / 2, seeds - 1)
        return float(stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))
    draws_RS = np.random.default_rng(3).normal(effect, size=(1000, seeds))
    signs_FS = 1 - 2 * (np.arange(2**seeds)[:, None] >> np.arange(seeds) & 1)
    sums_RF = np.abs(draws_RS @ signs_FS.T)
    return float(np.mean(np.mean(sums_RF >= sums_RF[:, :1] - 1e-12, axis=1) <= level))

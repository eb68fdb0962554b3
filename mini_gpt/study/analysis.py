"""The outcome of each comparison of a study: paired differences, intervals, p values and verdicts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mini_gpt.evaluation import items
from mini_gpt.study import statistics
from mini_gpt.study.definition import Comparison
from mini_gpt.study.statistics import PairedItems

PER_TOKEN = ("nll", "perplexity", "sample_nll")  # cannot be compared between tokenizers
SHARES = ("exact_match", "token_accuracy", "calibration_error", "alignment_error", "first_token", "entropy")
# {metric: lowest and highest possible value}. At the floor or the ceiling, a metric cannot tell conditions apart.
LIMITS = {
    **dict.fromkeys((*SHARES, "acc", "acc_norm"), (0, 1)),
    **dict.fromkeys(("chrf", "bleu"), (0, 100)),
    **dict.fromkeys(("nll", "sample_nll", "bits_per_byte"), (0, math.inf)),
    "perplexity": (1, math.inf),
}
ROUNDING = 1e-9  # relative: differences of equal losses can differ by float64 rounding
Row = Mapping[str, Any]
Pairs = Mapping[int, tuple[Row, Row]]  # {seed: rows of the first and of the second condition}


class Outcome(NamedTuple):
    """A comparison and what its complete runs show.

    differences_S: first - second, of each seed in `seeds`.
    p, equivalent_p: adjusted for all comparisons.
    p_alone: not adjusted.
    probability: share of pairs of runs in which `first` is better, as claimed.
    num_items: items in the bootstrap; 0: the interval has only the variation over seeds.
    reason: why there is no verdict, or why it is undecided with an interval that excludes 0; else "".
    """

    comparison: Comparison
    seeds: list[int]
    differences_S: list[float]
    difference: float | None
    interval: tuple[float, float] | None
    p_alone: float
    p: float
    equivalent_p: float
    probability: float | None
    num_items: int
    verdict: str
    reason: str


def outcomes(pairs: Mapping[Comparison, Pairs], level: float, planned: int) -> list[Outcome]:
    """Return the outcome of each comparison. Holm's correction includes all tests of all comparisons.

    planned: number of seeds. With fewer pairs there is no verdict. Otherwise one could stop as soon as p is small, or
    leave out failed runs. A comparison without a verdict has p = 1, so that it can only raise the p of the others.
    """
    alone = [_alone(comparison, found, level, planned) for comparison, found in pairs.items()]
    tests = [[1.0, 1.0] if one.reason else [one.p_alone, one.equivalent_p] for one in alone]
    for one, p_values in zip(alone, tests, strict=True):
        if one.comparison.smallest_effect == 0:
            p_values.pop()  # it is 1: no test of equivalence
    found = []
    for one, (p, *equivalent) in zip(alone, statistics.holm(tests), strict=True):
        equivalent_p = equivalent[0] if equivalent else 1.0
        verdict = "no verdict"
        if not one.reason:
            assert one.difference is not None
            verdict = statistics.verdict(one.difference, one.comparison.claim, p, equivalent_p, level)
        one = one._replace(p=p, equivalent_p=equivalent_p, verdict=verdict)
        found.append(one._replace(reason=_why_undecided(one, level, len(alone))) if verdict == "undecided" else one)
    return found


def _why_undecided(one: Outcome, level: float, comparisons: int) -> str:
    """Return why p is above the level although the interval excludes 0, or "" if it has 0."""
    assert one.interval is not None
    if one.interval[0] <= 0 <= one.interval[1]:
        return ""
    if one.p_alone <= level:
        adjusted = f"becomes {one.p:.3g} after the adjustment for {comparisons} comparisons"
        return f"the interval excludes 0, but p = {one.p_alone:.3g} {adjusted}, above {level:g}"
    seeds, smallest = len(one.seeds), statistics.smallest_p(len(one.seeds))
    limit = f"; {seeds} seeds can give no smaller p than {smallest:.3g}" if smallest > level else ""
    return f"the interval excludes 0, but p = {one.p_alone:.3g} of the sign-flip test is above {level:g}{limit}"


def _alone(comparison: Comparison, pairs: Pairs, level: float, planned: int) -> Outcome:
    """Return the outcome of one comparison, with unadjusted p values and no verdict."""
    empty = Outcome(comparison, list(pairs), [], None, None, 1.0, 1.0, 1.0, None, 0, "", "")
    if reason := _why_not_comparable(comparison, pairs):
        return empty._replace(reason=reason)
    first, second = ([row[comparison.metric] for row in rows] for rows in zip(*pairs.values(), strict=True))
    differences_S = [a - b for a, b in zip(first, second, strict=True)]
    lower = statistics.probability_lower(first, second)
    found = empty._replace(
        differences_S=differences_S,
        difference=float(np.mean(differences_S)),
        p_alone=statistics.sign_flip_p(differences_S),
        probability=lower if comparison.claim == "lower" else 1 - lower,
    )
    if len(pairs) < 2:
        return found._replace(reason="fewer than two seeds are complete")
    incomplete = f"{len(pairs)} of {planned} seeds are complete" if len(pairs) < planned else ""
    if np.ptp(differences_S) <= ROUNDING * np.max(np.abs([*first, *second])):
        return found._replace(reason=incomplete or "all seeds have the same difference: their variation is not known")
    paired = _paired_items(comparison, pairs)
    drawn_R = statistics.draw_means(differences_S, paired)
    return found._replace(
        interval=statistics.interval(drawn_R, level),
        equivalent_p=statistics.equivalence_p(drawn_R, comparison.smallest_effect),
        num_items=0 if paired is None else len(paired.weights_P),
        reason=incomplete or _at_a_limit(comparison, first, second, found.p_alone <= level),
    )


def _at_a_limit(comparison: Comparison, first: Sequence[float], second: Sequence[float], differs: bool) -> str:
    """Return a reason if both conditions are at the floor or the ceiling of the metric in most seeds, or "".

    A seed is there if both values are within the smallest effect of the limit.

    differs: whether p is small; then the seeds that are not there show a difference.
    """
    for limit in LIMITS.get(comparison.metric, ()):
        distances_S = np.max(np.abs(np.subtract([first, second], limit)), axis=0)
        count = int(np.sum(distances_S <= comparison.smallest_effect))
        if count == len(first) or (2 * count > len(first) and not differs):
            near = f"within {comparison.smallest_effect:g} of {limit}, the limit of {comparison.metric}"
            return f"both conditions are {near}, in {count} of {len(first)} seeds"
    return ""


def _why_not_comparable(comparison: Comparison, pairs: Pairs) -> str:
    """Return why the runs cannot be compared, or ""."""
    if not pairs:
        return "no seed is complete in both conditions"
    for seed, rows in pairs.items():
        for condition, row in zip((comparison.first, comparison.second), rows, strict=True):
            if row.get(comparison.metric) is None:
                return f"{condition}, seed {seed}: {row['reason'] or f'has no {comparison.metric}'}"
    counts = {row.get("tokens_scored", row.get("problems")) for rows in pairs.values() for row in rows}
    if len(counts) > 1 and comparison.metric in PER_TOKEN:
        return "the runs score different tokens; compare bits_per_byte"
    return ""


def _paired_items(comparison: Comparison, pairs: Pairs) -> PairedItems | None:
    """Return the paired results of items; None if a run has none, or if the items of two runs differ."""
    sums, all_weights = [], []
    for rows in pairs.values():
        stored = [row.get("items", {}).get(comparison.metric) for row in rows]
        if None in stored:  # the suite has no items
            return None
        first, second = map(items.unpacked, stored)
        sums.append((first.sums_P, second.sums_P))
        all_weights += [first.weights_P, second.weights_P]
    if any(not np.array_equal(weights_P, all_weights[0]) for weights_P in all_weights):
        return None
    has_weight_P = all_weights[0] > 0  # a draw of items without weight would have no mean
    differences_SP = np.array([a - b for a, b in sums])
    return PairedItems(differences_SP[:, has_weight_P], all_weights[0][has_weight_P])

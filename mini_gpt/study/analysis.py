"""The outcome of each comparison of a study: paired differences, intervals, p values and verdicts."""

from typing import NamedTuple

import numpy as np

from mini_gpt.commands.suites.base import Row
from mini_gpt.study import results as study_results
from mini_gpt.study import statistics
from mini_gpt.study.definition import Comparison
from mini_gpt.study.results import Results
from mini_gpt.study.statistics import PairedItems

PER_TOKEN = ("nll", "perplexity", "sample_nll")  # cannot be compared between tokenizers


class Outcome(NamedTuple):
    """A comparison and what its complete runs show.

    differences_S: first - second, of each seed in `seeds`. p, equivalent_p: adjusted for all comparisons; p_alone: not
    adjusted. probability: share of pairs of runs in which `first` is better, as claimed. num_items: 0 if only seeds are
    resampled. reason: why there is no verdict, else "".
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


def outcomes(results: Results) -> list[Outcome]:
    """Return the outcome of each comparison. Holm's family has all planned comparisons; a missing one has p = 1."""
    study = results.plan.study
    alone = [_alone(comparison, results) for comparison in results.plan.comparisons]
    p_values = statistics.holm([one.p_alone for one in alone])
    equivalent = statistics.holm([one.equivalent_p for one in alone])
    found = []
    for one, p, equivalent_p in zip(alone, p_values, equivalent, strict=True):
        verdict = "no verdict"
        if one.difference is not None and not one.reason:
            verdict = statistics.verdict(one.difference, one.comparison.claim, p, equivalent_p, study.level)
        found.append(one._replace(p=p, equivalent_p=equivalent_p, verdict=verdict))
    return found


def _alone(comparison: Comparison, results: Results) -> Outcome:
    """Return the outcome of one comparison, with unadjusted p values and no verdict."""
    pairs, reason = _pairs(comparison, results)
    values = [tuple(float(row[comparison.metric]) for row in pair) for pair in pairs.values()]
    first, second = [pair[0] for pair in values], [pair[1] for pair in values]
    differences_S = [a - b for a, b in values]
    none = Outcome(comparison, list(pairs), differences_S, None, None, 1.0, 1.0, 1.0, None, 0, "", reason)
    if not pairs or reason:
        return none
    lower = statistics.probability_lower(first, second)
    p = statistics.sign_flip_p(differences_S)
    none = none._replace(
        difference=float(np.mean(differences_S)),
        p_alone=p,
        probability=lower if comparison.claim == "lower" else 1 - lower,
    )
    if len(pairs) < 2:
        return none._replace(reason="fewer than two seeds are complete")
    items = _items(comparison, list(pairs.values()))
    drawn_R = statistics.bootstrap_means(differences_S, items)
    return none._replace(
        interval=statistics.interval(drawn_R, results.plan.study.level),
        equivalent_p=statistics.equivalence_p(drawn_R, comparison.smallest_effect)
        if comparison.smallest_effect
        else 1.0,
        num_items=0 if items is None else len(items.weights_P),
    )


def _pairs(comparison: Comparison, results: Results) -> tuple[dict[int, tuple[Row, Row]], str]:
    """Return {seed: (row of first, row of second)} of the complete runs, and why they cannot be compared, or ""."""
    rows: dict[tuple[str, int], Row] = {}
    for run in results.plan.runs:
        if run.condition in (comparison.first, comparison.second):
            row = results.row(run, comparison.suite, comparison.label, comparison.length)
            if row is not None:
                rows[run.condition, run.seed] = row
    seeds = [
        seed
        for seed in results.plan.study.seeds
        if {(comparison.first, seed), (comparison.second, seed)} <= rows.keys()
    ]
    pairs = {seed: (rows[comparison.first, seed], rows[comparison.second, seed]) for seed in seeds}
    for (condition, seed), row in rows.items():
        if row[comparison.metric] is None:
            return {}, f"{condition}, seed {seed}: {row['reason'] or f'has no {comparison.metric}'}"
    counts = {row.get("tokens_scored", row.get("problems")) for pair in pairs.values() for row in pair}
    if len(counts) > 1 and comparison.metric in PER_TOKEN:
        return {}, "the runs score different tokens; compare bits_per_byte"
    return pairs, "" if pairs else "no seed is complete in both conditions"


def _items(comparison: Comparison, pairs: list[tuple[Row, Row]]) -> PairedItems | None:
    """Return the paired results of items; None if a run has none, or if the items of two runs differ."""
    found = [[study_results.items_of(row, comparison.metric) for row in pair] for pair in pairs]
    sums, all_weights = [], []
    for first, second in found:
        if first is None or second is None:
            return None
        sums.append((first.sums_P, second.sums_P))
        all_weights += [first.weights_P, second.weights_P]
    if any(not np.array_equal(weights_P, all_weights[0]) for weights_P in all_weights):
        return None
    return PairedItems(np.array([a - b for a, b in sums]), all_weights[0])

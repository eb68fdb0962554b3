"""Outcomes of comparisons: pairs of seeds and items, missing runs, and what is refused."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from mini_gpt.evaluation import items
from mini_gpt.evaluation.items import Items
from mini_gpt.study import analysis, paper, report, statistics
from mini_gpt.study.definition import Comparison, Plan, Study
from mini_gpt.study.results import Results

SEEDS, PARTS = 10, 20


@pytest.fixture
def study(overrides):
    conditions = {"a": {"model.d_ff": 128}, "b": {"model.d_ff": 64}, "c": {"model.d_ff": 96}}
    suites, contrasts = {"perplexity": {}}, ["a<b", "b<a", "a<c"]
    return Study("Which?", "configs/default.py", conditions, range(SEEDS), suites, contrasts, overrides, 0.05)


def results_of(study, tmp_path, means, **changes):
    """Return Results with made-up losses: the mean of the condition, an effect of the seed, and noise of parts."""
    rng, results = np.random.default_rng(0), Results.__new__(Results)
    results.plan, results.workdir, results.by_run = Plan("s", study), tmp_path, {}
    shared_S, weights_P = rng.normal(0, 0.1, SEEDS), np.full(PARTS, 8.0)
    for run in results.plan.runs:
        losses_P = means[run.condition] + shared_S[run.seed] + rng.normal(0, 0.004, PARTS)
        row = {"context_length": 32, "nll": float(losses_P.mean()), "bits_per_byte": None, "tokens_scored": 160}
        row |= {"items": items.packed({"nll": Items(losses_P * weights_P, weights_P)}), "reason": None}
        results.by_run[run.name] = {"perplexity": row | changes.get(run.name.replace(",seed=", ""), {})}
    return results


def pairs(first, second=None):
    """Return the pairs of rows with a metric of all names: the second value is 0 unless given."""
    row = lambda value: dict.fromkeys(("nll", "exact_match", "own"), value) | {"reason": None, "tokens_scored": 1}
    both = zip(first, [0.0] * len(first) if second is None else second, strict=True)
    return {seed: (row(a), row(b)) for seed, (a, b) in enumerate(both)}


def outcomes(results):
    return report.Report(results).outcomes


MEANS = {"a": 2.0, "b": 2.1, "c": 2.001}


def test_outcomes_equal_an_independent_computation(study, tmp_path):
    results = results_of(study, tmp_path, MEANS)
    found = outcomes(results)
    assert [one.verdict for one in found] == ["shown", "opposite shown", "equivalent"]
    nll = {c: np.array([results.by_run[f"{c},seed={s}"]["perplexity"]["nll"] for s in range(SEEDS)]) for c in "abc"}
    first, _, third = found
    np.testing.assert_allclose(first.differences_S, nll["a"] - nll["b"])
    assert first.difference == pytest.approx((nll["a"] - nll["b"]).mean()) and first.seeds == list(range(SEEDS))
    assert first.p_alone == statistics.smallest_p(SEEDS) and first.p == pytest.approx(3 * first.p_alone)
    assert first.probability == np.mean(nll["a"][:, None] < nll["b"][None])
    assert first.num_items == PARTS
    low, high = first.interval
    assert low < first.difference < high and high - low < 0.02, "the effect of the seed cancels in pairs"
    assert abs(third.difference) < 0.01 and third.equivalent_p <= 0.05


def test_missing_runs_leave_the_pairs_that_are_complete(study, tmp_path):
    results = results_of(study, tmp_path, MEANS)
    results.by_run["a,seed=3"] = {}
    found = outcomes(results)
    assert found[0].seeds == [seed for seed in range(SEEDS) if seed != 3] and found[0].interval is not None
    assert (found[0].verdict, found[0].reason) == ("no verdict", "9 of 10 seeds are complete")
    for run in results.plan.runs:
        if run.condition == "c" and run.seed > 0:
            results.by_run[run.name] = {}
    one = outcomes(results)[2]
    assert (one.verdict, one.reason, one.interval) == ("no verdict", "fewer than two seeds are complete", None)
    results.by_run["c,seed=0"] = {}
    one = outcomes(results)[2]
    assert (one.verdict, one.reason, one.difference) == ("no verdict", "no seed is complete in both conditions", None)
    assert one.p == 1


def test_an_incomplete_comparison_does_not_help_the_others():
    """Its small p must not take a rank in Holm's method, because it may still become large."""

    which = [Comparison(first, "lower", "b", "perplexity", "nll", "", 8, 0.05) for first in "ac"]
    found = analysis.outcomes(dict(zip(which, [pairs([-1] * 6 + [0.5, 0.4]), pairs([-1] * 7)], strict=True)), 0.05, 8)
    assert [one.p_alone for one in found] == [8 / 256, 2 / 128]
    assert [(one.p, one.verdict) for one in found] == [(16 / 256, "undecided"), (1, "no verdict")]


def test_without_a_smallest_effect_p_is_that_of_closed_testing():
    """Independent: the largest of size · smallest p over all sets of comparisons with this one (Marcus et al. 1976)."""
    which = [Comparison(first, "lower", "b", "tasks", "own", "", 8, 0.0) for first in "acde"]
    drawn = [[-1] * 8, [-1] * 7 + [0.1], [-1] * 6 + [0.5, 0.4], [1, -1, 0.3, 0.2, 0.1, -0.4, 0.6, 0.7]]
    found = analysis.outcomes(dict(zip(which, map(pairs, drawn), strict=True)), 0.05, 8)
    alone = [statistics.sign_flip_p(values) for values in drawn]
    alone[0] = 1.0  # its seeds are equal, so that it has no verdict
    sets = [chosen for size in range(1, 5) for chosen in itertools.combinations(range(4), size)]
    closed = [max(min(1, len(c) * min(alone[i] for i in c)) for c in sets if one in c) for one in range(4)]
    assert [one.p for one in found] == pytest.approx(closed) and found[0].verdict == "no verdict"
    assert all(one.equivalent_p == 1 for one in found)


SAME = "all seeds have the same difference: their variation is not known"
FLOOR = "both conditions are within 0.05 of 0, the limit of exact_match, in {} of 7 seeds"
ABOVE = "the interval excludes 0, but p = {} of the sign-flip test is above 0.05"


@pytest.mark.parametrize(
    "metric, first, second, verdict, reason",
    [
        ("exact_match", [0.0] * 7, [0.0] * 7, "no verdict", SAME),
        ("nll", [3.1, 2.2, 2.7] * 2 + [1.9], [3.0, 2.1, 2.6] * 2 + [1.8], "no verdict", SAME),  # up to rounding
        ("exact_match", [0.0] * 6 + [0.06], [0.0] * 7, "no verdict", FLOOR.format(6)),
        ("exact_match", [1.0, 0.99] * 3 + [1.0], [1.0] * 7, "no verdict", FLOOR.format(7).replace("of 0,", "of 1,")),
        ("exact_match", [0.0] * 4 + [1.0] * 3, [0.0] * 7, "no verdict", FLOOR.format(4)),
        ("exact_match", [0.0] * 3 + [1.0] * 4, [0.0] * 7, "undecided", ABOVE.format("0.125")),
        ("exact_match", [0.9, 0.8, 0.9, 1.0, 0.9, 0.8, 0.9], [0.0] * 7, "opposite shown", ""),
        ("exact_match", [0.5, 0.501] * 3 + [0.5], [0.5, 0.5, 0.501] * 2 + [0.5], "equivalent", ""),
        ("own", [0.0, 0.002] * 3 + [0.0], [0.002, 0.0, 0.0] * 2 + [0.0], "equivalent", ""),  # its limits are not known
    ],
)
def test_seeds_that_cannot_differ_give_no_verdict(metric, first, second, verdict, reason):
    which = Comparison("a", "lower", "b", "tasks", metric, "", 8, 0.05)
    (found,) = analysis.outcomes({which: pairs(first, second)}, 0.05, 7)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.verdict != "no verdict" or (found.p, found.equivalent_p) == (1, 1)
    assert (found.interval is None) == (reason == SAME)


@pytest.mark.parametrize(
    "differences, comparisons, reason",
    [
        ([-1.0, -1.1, -0.9, -1.0], 2, "p = 0.125 of the sign-flip test .* 4 seeds can give no smaller p than 0.125"),
        ([-1.0, -1.1, -0.9] * 2, 2, "p = 0.0312 becomes 0.0625 after the adjustment for 2 comparisons"),
        ([-1.0, 1.1, 0.9] * 2, 1, "^$"),  # the interval has 0
    ],
)
def test_an_undecided_row_says_why_its_interval_excludes_0(differences, comparisons, reason):
    which = [Comparison(first, "lower", "z", "perplexity", "nll", "", 8, 0) for first in "ab"[:comparisons]]
    first = [10.0 + difference for difference in differences]
    found = analysis.outcomes(dict.fromkeys(which, pairs(first, [10.0] * len(first))), 0.05, len(differences))
    assert {one.verdict for one in found} == {"undecided"} and re.search(reason, found[0].reason)
    assert (found[0].interval[0] > 0 or found[0].interval[1] < 0) == bool(found[0].reason)


def test_many_seeds_show_a_difference_beside_a_ceiling():
    """Eleven of twenty pairs are solved in both conditions; in the other nine, one condition fails."""
    which = Comparison("a", "higher", "b", "tasks", "exact_match", "", 8, 0.05)
    (found,) = analysis.outcomes({which: pairs([1.0] * 20, [1.0] * 11 + [0.1] * 9)}, 0.05, 20)
    assert (found.verdict, found.reason) == ("shown", "")


def test_items_without_weight_are_left_out(study, tmp_path):
    results = results_of(study, tmp_path, MEANS)
    for found in results.by_run.values():
        row = found["perplexity"]
        sums_P, weights_P = items.unpacked(row["items"]["nll"])
        kept = np.arange(PARTS) == 0  # almost every draw of the bootstrap would have no weight
        row["items"] = items.packed({"nll": Items(sums_P * kept, weights_P * kept)})
    assert all(one.num_items == 1 and np.isfinite(one.interval).all() for one in outcomes(results))


def test_an_undefined_value_has_a_reason(study, tmp_path):
    found = outcomes(results_of(study, tmp_path, MEANS, b1={"nll": None}))
    assert found[0].verdict == "no verdict" and found[0].reason == "b, seed 1: has no nll"
    assert found[2].verdict == "equivalent"


def test_losses_of_different_tokens_are_not_compared(study, tmp_path):
    results = results_of(study, tmp_path, MEANS, b1={"tokens_scored": 159})
    assert outcomes(results)[0].reason == "the runs score different tokens; compare bits_per_byte"


def test_without_equal_items_only_seeds_are_resampled(study, tmp_path):
    other = items.packed({"nll": Items(np.ones(PARTS), np.full(PARTS, 7.0))})
    for changed in ({}, other):
        one = outcomes(results_of(study, tmp_path, MEANS, b1={"items": changed}))[0]
        assert one.num_items == 0 and one.interval is not None
        expected = statistics.interval(statistics.draw_means(one.differences_S), 0.05)
        assert one.interval == expected


def test_runs_that_have_not_learned_are_named_and_kept(study, tmp_path):
    results = results_of(dataclasses.replace(study, fit="nll<=2.15"), tmp_path, MEANS, b1={"nll": 9.0})
    text = report.Report(results)._learned()
    failed = [name for name, found in results.by_run.items() if found["perplexity"]["nll"] > 2.15]
    assert "b,seed=1" in failed and f"Not learned, but included in all numbers: {', '.join(failed)}." in text
    (row,) = [row for row in report.Report(results).tables["perplexity"] if row["condition"] == "b"]
    assert row["seeds"] == SEEDS and row["nll_highest"] == 9.0
    assert [row["learned"] for row in results.run_rows() if (row["condition"], row["seed"]) == ("b", 1)] == [False]


@pytest.mark.slow
def test_a_paper_gets_figures_without_titles_and_latex(study, tmp_path):
    found = report.Report(results_of(study, tmp_path, MEANS))
    (tmp_path / "a,seed=0").mkdir()
    (tmp_path / "a,seed=0" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    written = {path.name: path.read_bytes() for path in paper.write(found)}
    stems = ["perplexity", "differences-nll", "training"]
    for name in stems:
        assert written[f"{name}.pdf"].startswith(b"%PDF") and b"/Type3" not in written[f"{name}.pdf"]
        assert b"<svg" in written[f"{name}.svg"] and b"length (tokens)" in written["perplexity.svg"]
        assert not re.search(rb"<!-- (Paired|Training:|Mean|perplexity )", written[f"{name}.svg"])
    (row,) = [row for row in found.tables["perplexity"] if row["condition"] == "a"]
    cells = f"a & {SEEDS} & {row['nll_mean']:.4f} $\\pm$ {row['nll_standard_deviation']:.4f} \\\\"
    assert cells in written["perplexity.tex"].decode().splitlines()
    cells = f"a lower than b & nll & 32 & {found.outcomes[0].difference:+.4f}".replace("-", "$-$", 1)
    assert cells in written["comparisons.tex"].decode()
    assert paper.latex([{"a_b": "50% < 1 & {x}"}]).splitlines()[2:5:2] == [r"a\_b \\", r"50\% $<$ 1 \& \{x\} \\"]


def test_the_page_needs_no_other_file_and_escapes_its_texts(study, tmp_path):
    odd = dataclasses.replace(study, question="Is a < b | c *really*? <script>alert(1)</script>")
    results = results_of(odd, tmp_path, MEANS)
    results.by_run["b,seed=1"] = {}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "b,seed=1.log").write_text("error: <img src=x onerror=alert(1)>")
    paths = report.Report(results).write()
    page = (tmp_path / "report.html").read_text()
    assert "&lt;img src=x onerror" in page
    assert all(path.exists() for path in paths) and page.count("data:image/png;base64,") == 2
    assert "<script" not in page and "<img src=x" not in page and 'src="http' not in page
    assert "Is a &lt; b | c *really*?" in page and "<strong>equivalent</strong>" in page
    assert (tmp_path / "report.md").read_text().startswith("# Is a &lt; b \\| c \\*really\\*? &lt;script")

"""Outcomes of comparisons, their tables and figures: pairs of seeds and items, missing runs, and what is refused."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import corpora
from mini_gpt.evaluation import items
from mini_gpt.evaluation.items import Items
from mini_gpt.insight import curves
from mini_gpt.insight.curves import Curve
from mini_gpt.runtime import files
from mini_gpt.study import analysis, figures, paper, report, statistics, tables
from mini_gpt.study.definition import Comparison, Plan, Study
from mini_gpt.study.results import Results
from mini_gpt.suites import SUITES
from mini_gpt.suites import results as result_files

# Outcomes of comparisons: pairs of seeds and items, missing runs, and what is refused.

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


def test_a_metric_that_is_newer_than_the_results_is_missing_from_the_report(study, tmp_path, monkeypatch):
    monkeypatch.setattr(type(SUITES["perplexity"]), "values", ("nll", "new"))
    newer = dataclasses.replace(study, contrasts=["a<b@new", "a<b"])
    found = report.Report(results_of(newer, tmp_path, MEANS))
    assert found.outcomes[0].reason == "a, seed 0: has no new" and found.outcomes[1].verdict == "shown"
    rows = [{"nll": 1.0, "reason": None}, {"nll": 2.0, "reason": None}]
    spreads, reasons = tables._spreads(SUITES["perplexity"], rows)
    assert spreads["nll_mean"] == 1.5 and spreads["new_mean"] is None and reasons == {"new": "these runs have no new"}


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


# Results of runs on disk: damaged ones are not taken into the tables of a study.


def write_run(folder, run, suite, content=""):
    """Write the files of a trained run; content: of its result. Return the path of the result."""
    path = folder / run.name / "eval" / f"{suite}.json"
    path.parent.mkdir(parents=True)
    corpus = corpora.open_corpus(run.config.data)
    files.write_json(folder / run.name / "config.json", loading.to_dict(run.config))
    files.write_json(folder / run.name / "corpus.json", {"name": corpus.name, "fingerprint": corpus.fingerprint})
    path.write_text(content)
    return path


def test_only_whole_results_of_the_same_request_are_taken(overrides, tmp_path, caplog):
    study = Study("", "configs/default.py", {"rope": {}}, [0], {"extrapolation": {}}, overrides=overrides)
    plan = Plan("sweep", study)
    (run,) = plan.runs
    path = write_run(tmp_path, run, "extrapolation")
    right = {"checkpoint_step": 4, "request": {"lengths": None, "strides": None}, "train_length": 32, "rows": []}
    files.write_json(path, right)
    assert Results(plan, tmp_path).by_run[run.name] == {"extrapolation": right} and not caplog.text
    for other in ({"checkpoint_step": 3}, {"request": {}}):
        files.write_json(path, right | other)
        assert Results(plan, tmp_path).missing(run) and not caplog.text
    for content in ("{", "[]", json.dumps(right), result_files.json_text(right).replace("32", "33")):
        caplog.clear()
        path.write_text(content)
        assert Results(plan, tmp_path).missing(run) == ["extrapolation"]
        assert "extrapolation.json counts as missing (" in caplog.text


def test_a_varied_field_keeps_its_value_in_the_tables(overrides, tmp_path):
    """The result has a context length too: that of the model that was measured."""
    conditions = {"short": {"context_length": 16}, "long": {"context_length": 64}}
    shared = {name: value for name, value in overrides.items() if name != "context_length"}
    study = Study("", "configs/default.py", conditions, [0], {"perplexity": {}}, overrides=shared)
    plan = Plan("sweep", study)
    for run in plan.runs:
        result = {"checkpoint_step": 4, "context_length": 32, "nll": 1.0, "bits_per_byte": 2.0}
        write_run(tmp_path, run, "perplexity", result_files.json_text(result))
    rows = Results(plan, tmp_path).rows("perplexity")
    table = tables.gather(SUITES["perplexity"], rows, conditions)
    assert [(row["condition"], row["context_length"], row["length"]) for row in table] == [
        ("short", "16", 32),
        ("long", "64", 32),
    ]
    figures.by_length(SUITES["perplexity"], table, None)


def test_a_value_that_is_undefined_for_a_seed_has_no_mean():
    suite = SUITES["extrapolation"]
    row = {"length": 64, "protocol": "blocks", "reason": None} | dict.fromkeys(suite.values, 1.0)
    rows = {"rope": [row, row | {"nll": None, "reason": "too long"}], "t5": [row | {"nll": 2.0}, row]}
    table = tables.gather(suite, rows, {"rope": {}, "t5": {}})
    assert table[0]["nll_mean"] is None and table[0]["reasons"] == {"nll": "too long"}
    assert table[1]["nll_mean"] == 1.5 and table[1]["nll_standard_deviation"] == 0.5**0.5
    text = tables.markdown(table, ["nll"])
    for said in ("| rope | 0 | undefined |", "| t5 | 2 | 1.5000 ± 0.7071 |", "undefined: too long"):
        assert said in text


# Figures of a study: the labels of paired differences, and lines that can be told apart.


def labels(*where):
    row = {"first": "a", "second": "b", "metric": "nll", "differences": [0.1, 0.2], "difference": 0.15, "seeds": 2}
    row |= {"interval_low": None, "interval_high": None, "smallest_effect": 0.0, "verdict": "undecided"}
    rows = [row | {"suite": suite, "label": label, "length": length} for suite, label, length in where]
    (axes,) = figures.differences(rows, 0.05)["nll"].axes
    return [tick.get_text() for tick in axes.get_yticklabels()]


def test_differences_name_the_suite_and_the_windows_only_if_there_are_several():
    assert labels(("text", "blocks", 64), ("text", "blocks", 128)) == ["a − b, 64", "a − b, 128"]
    several = labels(("text", "blocks", 64), ("text", "sliding", 64), ("loss", "", 64))
    assert several == ["a − b, text, blocks, 64", "a − b, text, sliding, 64", "a − b, loss, 64"]


def test_curves_differ_without_colour_and_one_of_one_length_is_seen():
    drawn = [Curve("short", [64], [2.0], [1.9], [2.1]), *(Curve(str(n), [64, 128], [2.0, 3.0]) for n in range(11))]
    (axes,) = curves.panels_figure({"blocks": drawn}, x="length", y="loss", trained=None).axes
    lines = [line for line in axes.lines if line.get_label()[0] != "_"]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(drawn)
    assert lines[0].get_zorder() > max(line.get_zorder() for line in lines[1:])
    assert lines[0].get_markersize() > 2 * lines[1].get_markersize()

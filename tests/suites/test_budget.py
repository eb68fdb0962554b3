"""A budget measures a beginning of the work, says what it left out, and nothing depends on the clock without one."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.insight import budget, uncertainty
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in

EVERY = list(range(64))


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that only the test moves."""
    moved = SimpleNamespace(now=0.0)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: moved.now))
    return moved


def within(clock, minutes, seconds=10.0, earlier=None):
    """Return the batches of two texts that fit if each takes some seconds, and the first 30 s more; and the budget."""
    found, clock.now = [], 0.0
    with budget.limited(minutes, earlier or {}) as limit:
        for _, batch in budget.within("texts", [(2, number) for number in EVERY]):
            clock.now += seconds if found else seconds + 30
            found.append(batch)
    return found, limit


def test_the_batches_that_fit_are_spread_evenly(clock):
    found, limit = within(clock, 5)
    assert len(found) == 22 and clock.now == 40 + 21 * 10 <= 300 * (1 - budget.RESERVE)
    assert limit.left_out == "44 of 128 texts, --minutes=5" and limit.chosen == {"texts": (44, 128)}
    assert max(np.diff(sorted([*found, 64]))) <= 4
    assert len(within(clock, 5, seconds=1000)[0]) == 1, "at least one"


def test_one_slow_batch_does_not_decide(clock):
    found = []
    with budget.limited(5, {}):
        for _, batch in budget.within("texts", [(2, number) for number in EVERY]):
            clock.now += (30.0, 10.0, 1.0)[min(2, len(found))]
            found.append(batch)
    assert sorted(found) == EVERY


def test_more_time_adds_batches_and_changes_none(clock):
    found = {minutes: within(clock, minutes)[0] for minutes in (1, 2, 5, 10, 60)}
    for less, more in itertools.pairwise(found.values()):
        assert len(less) < len(more) and more[: len(less)] == less
    assert sorted(found[60]) == EVERY and within(clock, 60)[1].left_out is None


def test_the_work_of_an_earlier_result_does_not_depend_on_the_clock(clock):
    assert {len(within(clock, 5, seconds, {"texts": 20})[0]) for seconds in (0.0, 10.0, 9999.0)} == {10}


def test_without_a_budget_nothing_depends_on_the_clock(clock):
    assert within(clock, None) == (EVERY, None)
    assert budget.fit("texts", [1, 2, 3], lambda: pytest.fail("the time was measured")) == 3


def test_items_are_chosen_by_their_cost(clock):
    found = {}
    for share in (0.1, 0.5, 0.9, 1.0):
        with budget.limited(1, {}) as limit:  # of 60 s, 51 are for the work
            found[share] = budget.fit("lengths", [10, 20, 20], lambda: 1.0, share)
    assert found == {0.1: 1, 0.5: 1, 0.9: 2, 1.0: 3} and limit.left_out is None


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=16)
    expected = values.std(ddof=1) / 4
    assert uncertainty.of_ratio(values, np.ones(16)) == pytest.approx(expected)
    assert uncertainty.of_ratio(np.repeat(values, 4), np.ones(64)) == pytest.approx(expected), "groups of neighbours"
    assert uncertainty.jackknife([1.0]) is uncertainty.jackknife([1.0, None]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, options, error",
    [
        ("heads", {}, lambda result: result["heads"][0]["kinds"]["previous token"]["error"]),
        ("lens", {}, lambda result: result["rows"][0]["nll_error"]),
        ("diagnose", {}, lambda result: {row["check"]: row for row in result["rows"]}["loss"]["error"]),
        ("extrapolation", {"lengths": "1x,2x"}, lambda result: result["rows"][-1]["nll_error"]),
        ("perplexity", {}, lambda result: result["nll_error"]),
        ("patching", {"text": "def f(x): return x  # a b c d e", "other": "def g(x): return x  # a b c d e"}, None),
        ("circuits", {}, None),
        ("pruning", {}, None),
    ],
)
def test_each_suite_says_what_it_left_out_and_repeats_it(trained, monkeypatch, capsys, suite, options, error):
    run, options = Run(trained(model__num_layers=2, model__position="alibi")), SuiteOptions(**options)
    path = run.workdir / "eval" / f"{suites.file_stem(suite, options)}.json"
    found = []
    for seconds in (1.0, 0.0):  # from each look at the clock to the next
        looks = itertools.count(0.0, seconds)
        monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda looks=looks: next(looks)))
        found.append(suites.evaluate(run, suite, options, minutes=0.2))
        assert f"Measured: {found[-1]['left_out']}." in capsys.readouterr().out
        assert json.loads(path.read_text()).pop("sha256")
    assert found[0]["left_out"].endswith("--minutes=0.2") and found[0] == found[1]
    assert found[0]["request"] | {"work": 0} == suites.requested(suite, options) | {"minutes": 0.2, "work": 0}
    assert error is None or 0 < error(found[0]) < math.inf
    every = suites.evaluate(run, suite, options)
    assert "left_out" not in every and every.get("request", {}) == suites.requested(suite, options)


@pytest.mark.slow
def test_a_budget_that_leaves_nothing_out_measures_the_same(trained):
    run = Run(trained(model__num_layers=2, model__position="alibi"))
    for suite, value in {
        "heads": lambda result: [head["kinds"]["previous token"]["strength"] for head in result["heads"]],
        "lens": lambda result: [row["nll"] for row in result["rows"]],
        "pruning": lambda result: result["ablation"],
        "perplexity": lambda result: result["nll"],
    }.items():
        found = [value(suites.evaluate(run, suite, SuiteOptions(), minutes)) for minutes in (1000.0, None)]
        np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)
        limited = suites.evaluate(run, suite, SuiteOptions(), 1000.0)
        assert limited["left_out"] is None and limited["request"] != suites.requested(suite, SuiteOptions())
        if suite == "heads":
            every = suites.evaluate(run, suite, SuiteOptions())
            texts = [
                [head["pair"][end] for head in each["heads"] for end in ("query", "key")] for each in (limited, every)
            ]
            assert texts[0] == texts[1]


def test_large_models_have_a_budget_by_default(trained, monkeypatch):
    workdir = trained(model__position="rope")
    asked, found = ("eval.py", f"--workdir={workdir}"), []
    for large, flags in ((10**9, []), (0, []), (0, ["--minutes=inf"]), (10**9, ["--minutes=7"])):
        monkeypatch.setattr(suites, "LARGE", large)
        assert type_in(monkeypatch, *asked, *flags) is None
        result = json.loads((workdir / "eval" / "perplexity.json").read_text())
        found.append(result.get("request", {}).get("minutes"))
    assert found == [None, 5.0, None, 7.0]
    assert type_in(monkeypatch, *asked, "--minutes=0") == "error: --minutes: found 0.0; must be above 0"

"""Studies at several sizes: which runs and comparisons there are, and differences against the number of parameters."""

import csv

import jax
import numpy as np
import pytest
from scipy import stats

from mini_gpt.study import figures
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.report import Report
from mini_gpt.study.results import Results
from mini_gpt.training.run import Run

LAYERS = {"shallow": 1, "deep": 3}
SIZES = {name: {"model.num_layers": layers} for name, layers in LAYERS.items()}
WIDTHS = {"wide": {"model.d_ff": 96}, "narrow": {"model.d_ff": 64}}
COUNTS = {"shallow,wide": 1100, "shallow,narrow": 1000, "deep,wide": 3300, "deep,narrow": 3000}


@pytest.fixture
def plan(overrides):
    overrides = {name: value for name, value in overrides.items() if name != "model.num_layers"}
    return Plan(
        "s",
        Study(
            "?",
            "configs/default.py",
            WIDTHS,
            range(4),
            {"perplexity": {}},
            ["wide < narrow", "narrow > wide @ bits_per_byte"],
            overrides,
            sizes=SIZES,
        ),
    )


@pytest.fixture
def report(monkeypatch, plan, tmp_path):
    """Return a report of made-up losses."""
    rng, results = np.random.default_rng(0), Results.__new__(Results)
    results.plan, results.workdir, results.by_run = plan, tmp_path, {}
    for run in plan.runs:
        nll = 2.0 + run.seed / 10 + COUNTS[run.condition] / 1e4 + float(rng.normal(0, 0.01))
        row = {"context_length": 32, "nll": nll, "bits_per_byte": nll * 1.5, "tokens_scored": 9, "reason": None}
        results.by_run[run.name] = {"perplexity": row}
    monkeypatch.setattr(results, "parameters", COUNTS.__getitem__, raising=False)
    return Report(results)


def test_all_conditions_and_contrasts_are_repeated_at_each_size(plan):
    assert list(plan.conditions) == list(COUNTS)
    for run in plan.runs:
        size, width = run.condition.split(",")
        assert run.config.model.num_layers == LAYERS[size] and run.config.model.d_ff == WIDTHS[width]["model.d_ff"]
    assert len(plan.runs) == 2 * 2 * 4
    pairs = [(one.first, one.second, one.metric) for one in plan.comparisons]
    assert pairs == [
        ("shallow,wide", "shallow,narrow", "nll"),
        ("deep,wide", "deep,narrow", "nll"),
        ("shallow,narrow", "shallow,wide", "bits_per_byte"),
        ("deep,narrow", "deep,wide", "bits_per_byte"),
    ]


def test_each_condition_is_tuned_at_each_size(plan):
    study = plan.study
    tuned = Plan("s", Study(**vars(study) | {"tune": {"optimizer.learning_rate": (0.1, 0.2)}, "tuning_seeds": (9,)}))
    assert len(tuned.tuning.runs) == 4 * 2 and tuned.tuned["deep,wide,learning_rate=0.2"] == ("deep,wide", 0.2)


def test_the_differences_are_paired_by_seed_at_each_size(report, tmp_path):
    """Independent: differences and Student's intervals from the losses. The figure has the same numbers."""
    report.write()
    with (tmp_path / "comparisons.csv").open() as file:
        rows = {(row["size"], row["metric"]): row for row in csv.DictReader(file)}
    text = (tmp_path / "report.md").read_text()
    drawn, found = figures.by_size(report.rows, 0.05), {}
    for size in SIZES:
        loss = {
            width: np.array(
                [report.results.by_run[f"{size},{width},seed={seed}"]["perplexity"]["nll"] for seed in range(4)]
            )
            for width in WIDTHS
        }
        differences_S = loss["wide"] - loss["narrow"]
        low, high = stats.t.interval(0.95, 3, differences_S.mean(), stats.sem(differences_S))
        row = rows[size, "nll"]
        assert (row["pair"], row["parameters_first"], row["parameters_second"]) == (
            "wide − narrow",
            str(COUNTS[f"{size},wide"]),
            str(COUNTS[f"{size},narrow"]),
        )
        assert [float(row[name]) for name in ("difference", "interval_low", "interval_high")] == pytest.approx(
            [differences_S.mean(), low, high], abs=1e-3 * (high - low)
        )
        assert f"| {COUNTS[f'{size},wide']:,} and {COUNTS[f'{size},narrow']:,} |" in text
        found[COUNTS[f"{size},narrow"]] = (differences_S.mean(), low, high)
    assert list(drawn) == ["nll", "bits_per_byte"]
    (axes,) = drawn["nll"].axes
    ((line, _, (bars,)),) = axes.containers
    assert axes.get_legend().get_texts()[0].get_text() == "wide − narrow, perplexity, 32"
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(
        {count: values[0] for count, values in found.items()}
    )
    for (bottom, top), (_, low, high) in zip(bars.get_segments(), found.values(), strict=True):
        assert [bottom[1], top[1]] == pytest.approx([low, high], abs=1e-3 * (high - low))
    assert "No curve is fitted: nothing is claimed about other sizes." in text and "](sizes-nll.png)" in text
    assert (tmp_path / "sizes-nll.png").exists()


def test_without_an_interval_there_is_no_point(plan, report):
    rows = [row | {"interval_low": None, "interval_high": None} for row in report.rows if row["size"] == "deep"]
    uneven = report.rows[0] | {"difference": 1.0, "interval_low": 0.5, "interval_high": 3.0}
    (axes,) = figures.by_size([*rows, uneven], 0.05)["nll"].axes
    ((line, _, (bars,)),) = axes.containers
    assert list(line.get_xdata()) == [1000] and bars.get_segments()[0].tolist() == [[1000, 0.5], [1000, 3.0]]
    assert figures.by_size(rows, 0.05) == {}


def test_parameters_are_those_of_the_trained_model(trained, tmp_path):
    """Independent: the entries of the arrays in the checkpoint."""
    run = Run(trained())
    results = Results.__new__(Results)
    study = Study("", "configs/default.py", {"a": {}, "b": {"model.d_ff": 40}}, [0], {"perplexity": {}})
    results.plan, results.workdir = Plan("s", study), tmp_path
    (planned, _) = results.plan.runs
    results.plan.runs[0] = planned._replace(config=run.config)
    run.workdir.rename(tmp_path / planned.name)
    assert results.parameters("a") == sum(array.size for array in jax.tree.leaves(run.model.parameters))
    assert results.parameters("b") is None

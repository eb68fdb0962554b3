"""Studies that tune each condition: the choice, what is frozen when, and runs that diverge or fail."""

import csv
import json
import math
import os
import shutil

import numpy as np
import pytest
from scipy import stats

from mini_gpt.data import corpora
from mini_gpt.insight import curves
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import estimate, ledger, local, runner, slurm, tuning
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.results import Results
from tests.commands.test_command_line import type_in
from tests.study import fake_worker
from tests.study.fake_worker import DIVERGES, FAILS

FIELD, RATES, TUNING_SEEDS = "optimizer.learning_rate", (0.001, 0.002, 0.004), (10, 11, 12)
FILE = """
def get_study():
    return {{
        "question": "Which?",
        "config": "configs/default.py",
        "conditions": {conditions},
        "seeds": {seeds},
        "suites": {{"perplexity": {{}}}},
        "contrasts": ["wide < narrow"],
        "overrides": {overrides},
        "tune": {{"optimizer.learning_rate": {rates}}},
        "tuning_seeds": {tuning_seeds},
    }}
"""
WIDTHS = {"wide": {"model.d_ff": 96}, "narrow": {"model.d_ff": 64}}


class InProcess:
    """An engine that does each job at once, in this process."""

    count = 1

    def __init__(self, results, slots):
        self.results = results

    def start(self, job, running):
        STARTED.append(job.run.name)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.handle = 0
        try:
            fake_worker.do(self.results.worker_job(job.run))
        except UserError as error:
            job.log.write_text(f"error: {error}\n")
            job.handle = 1
        return not running

    def poll(self, running):
        return [(job, job.handle, runner.last_error(job.log)) for job in running]

    def stop(self, running, *, at_once):
        assert not running


STARTED = []


class Killed(BaseException):
    pass


@pytest.fixture
def fake(monkeypatch, small, caplog):
    """Let runs be done by tests/study/fake_worker.py in this process. Return the list of the started runs."""
    caplog.set_level("INFO", "mini_gpt")
    monkeypatch.setenv("FINGERPRINT", corpora.open_corpus(small().data).fingerprint)
    monkeypatch.setattr(local, "Local", InProcess)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0)
    monkeypatch.setattr(curves, "save", lambda figure, path: path.touch())  # these two take most of the time
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(ledger, "commit", lambda: "a" * 40)
    STARTED.clear()
    return STARTED


@pytest.fixture
def type_study(monkeypatch, fake, overrides, tmp_path):
    """Return a function that runs `study ACTION` for a study file with some fields; it returns None or the error."""

    def typed(action, *more, **fields):
        path = tmp_path / "widths.py"
        fields = {"conditions": WIDTHS, "seeds": [0, 1], "rates": RATES, "tuning_seeds": TUNING_SEEDS} | fields
        path.write_text(FILE.format(overrides=overrides, **fields))
        return type_in(
            monkeypatch, "mini_gpt.commands.study", action, str(path), f"--workdir={tmp_path / 'study'}", *more
        )

    return typed


def losses(folder, condition, rate):
    names = [f"{condition},learning_rate={rate},seed={seed}" for seed in TUNING_SEEDS]
    return [json.loads((folder / "tuning" / name / "eval" / "perplexity.json").read_text())["nll"] for name in names]


def rates_of_runs(folder):
    configs = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/config.json")}
    return {name: config["optimizer"]["learning_rate"] for name, config in configs.items()}


def test_each_condition_is_compared_with_its_best_value(type_study, fake, tmp_path, capsys):
    """Independent: the choice and Student's interval are computed from the files of the runs."""
    assert type_study("run") is None
    folder = tmp_path / "study"
    best = {}
    for condition in WIDTHS:
        means = {rate: np.mean(losses(folder, condition, rate)) for rate in RATES}
        best[condition] = min(means, key=means.get)
    assert best == {"wide": 0.004, "narrow": 0.002}
    tuned, compared = fake[: -2 * 2], fake[-2 * 2 :]
    assert len(tuned) == 2 * 3 * 3 and all("learning_rate=" in name for name in tuned)
    assert rates_of_runs(folder) == {f"{name},seed={seed}": best[name] for name in WIDTHS for seed in (0, 1)}
    assert set(compared) == set(rates_of_runs(folder))
    assert not {name.rpartition("=")[2] for name in tuned} & {name.rpartition("=")[2] for name in compared}
    entries = ledger.entries(folder)
    assert [entry["event"] for entry in entries] == ["run", "tuned"] and entries[1]["chosen"] == best

    with (folder / "tuning.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["condition"], float(row["value"])) for row in rows] == [(c, rate) for c in WIDTHS for rate in RATES]
    text = (folder / "report.md").read_text()
    for row in rows:
        values = losses(folder, row["condition"], row["value"])
        low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        found = [float(row[name]) for name in ("nll_mean", "interval_low", "interval_high")]
        assert found == pytest.approx([np.mean(values), low, high], abs=1e-3 * (high - low))
        assert (row["chosen"] == "True") == (best[row["condition"]] == float(row["value"]))
        shown = f"{found[0]:.4f} ({found[1]:.4f} to {found[2]:.4f})"
        assert (f"| **{shown}** |" if row["chosen"] == "True" else f"| {shown} |") in text
    assert "so a better one may be beyond: wide (0.004, the largest)." in text and "narrow (" not in text
    assert "Tuning: 18 of 18 runs are complete\n4 of 4 runs are complete, 0 failed\n" in capsys.readouterr().out
    fake.clear()
    assert type_study("run") is None and fake == []


def plan_of(overrides, **fields):
    given = {"tune": {FIELD: RATES}, "tuning_seeds": TUNING_SEEDS, "overrides": overrides} | fields
    return Plan("s", Study("?", "configs/default.py", WIDTHS, range(2), {"perplexity": {}}, **given))


def made_up(plan, tmp_path, nll):
    """Return Results of the tuning with the losses nll(condition, value, seed); None: the run is missing."""
    found = Results.__new__(Results)
    found.plan, found.workdir, found.by_run = plan.tuning, tmp_path, {}
    for run in plan.tuning.runs:
        value = nll(*plan.tuned[run.condition], run.seed)
        row = {"context_length": 32, "nll": value, "reason": None}
        found.by_run[run.name] = {} if value is None else {"perplexity": row}
    return found


def test_of_a_tie_the_smaller_value_is_taken(overrides, tmp_path):
    plan = plan_of(overrides)
    tie = made_up(plan, tmp_path, lambda condition, rate, seed: 2.0 if rate > 0.001 else 3.0)
    assert tuning.choose(plan, tie) == {"wide": 0.002, "narrow": 0.002}
    # The mean decides, not the best seed.
    uneven = made_up(
        plan, tmp_path, lambda _, rate, seed: {0.001: 2.0, 0.002: 2.1, 0.004: (1.0, 1.0, 4.5)[seed - 10]}[rate]
    )
    assert tuning.choose(plan, uneven) == {"wide": 0.001, "narrow": 0.001}


def test_a_value_with_a_missing_or_diverged_seed_is_not_taken(overrides, tmp_path):
    plan = plan_of(overrides)
    for gone in (None, math.inf):
        at_11 = {0.001: 2.0, 0.002: 1.9, 0.004: gone}
        found = made_up(plan, tmp_path, lambda _, rate, seed, at=at_11: at[rate] if seed == 11 else 2.0 - rate)
        assert tuning.choose(plan, found) == {"wide": 0.002, "narrow": 0.002}
        row = tuning.rows(plan, found)[2]
        assert (row["seeds"], row["diverged"], row["nll_mean"]) == (2, int(gone is not None), None)


def test_runs_that_diverge_are_not_tried_again(type_study, fake, tmp_path, capsys):
    assert type_study("run", rates=(*RATES, DIVERGES)) is None
    assert "Tuning: 24 of 24 runs are complete\n" in capsys.readouterr().out
    text = (tmp_path / "study" / "report.md").read_text()
    assert text.count("| 3 diverged |") == 2 and "At the edge" not in text, "a larger value was tried"
    fake.clear()
    assert type_study("run", rates=(*RATES, DIVERGES)) is None and fake == []


def test_without_a_value_for_a_condition_nothing_is_compared(type_study, fake, tmp_path, capsys):
    said = "error: tune: each value has runs of wide that diverged; give smaller values"
    for _ in range(2):
        assert type_study("run", rates=(DIVERGES, 2.0)) == said
        assert len(fake) == 12, "the second time, no run is tried again"
    shutil.rmtree(tmp_path / "study" / "tuning" / "wide,learning_rate=2.0,seed=10")
    assert type_study("run", rates=(DIVERGES, 2.0)) == said and len(fake) == 13, "the log of a deleted run says nothing"
    assert "No value is chosen yet." in (tmp_path / "study" / "report.md").read_text()
    assert [entry["event"] for entry in ledger.entries(tmp_path / "study")] == ["run"] * 3


def test_a_failure_that_is_no_divergence_is_tried_again(type_study, fake, tmp_path, caplog):
    conditions = WIDTHS | {"wide": {"model.d_ff": FAILS}}
    for _ in range(2):
        fake.clear()
        assert type_study("run", conditions=conditions).startswith("error: 9 of 18 runs failed; the same command tries")
        assert sum(name.startswith("wide") for name in fake) == 9
    assert len(fake) == 9 and "wide,learning_rate=0.001,seed=10: model.d_ff: found 48" in caplog.text
    assert not rates_of_runs(tmp_path / "study")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_study_that_is_killed_between_tuning_and_comparison_goes_on(monkeypatch, type_study, fake, tmp_path, when):
    freeze, folder = tuning.freeze, tmp_path / "study"

    def killed(*arguments):
        if when == "after":
            freeze(*arguments)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tuning, "freeze", killed)
        type_study("run")
    assert len(fake) == 18 and not rates_of_runs(folder)
    fake.clear()
    assert type_study("report") is None
    assert (when == "after") == ("Bold: the value of the comparison" in (folder / "report.md").read_text())
    if when == "after":  # the choice is frozen, whatever becomes of the runs
        path = folder / "tuning" / "narrow,learning_rate=0.002,seed=10" / "eval" / "perplexity.json"
        path.write_text(path.read_text().replace('"nll": 1', '"nll": 9'))
    assert type_study("run") is None
    assert len(fake) == 4 and set(rates_of_runs(folder).values()) == {0.002, 0.004}
    assert [entry["event"] for entry in ledger.entries(folder)].count("tuned") == 1


def test_a_plan_that_changed_after_the_tuning_is_refused(monkeypatch, type_study, fake, tmp_path):
    folder = tmp_path / "study"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tuning, "freeze", lambda *_: (_ for _ in ()).throw(Killed))
        type_study("run")
    fake.clear()
    for fields in ({"rates": (*RATES, 0.008)}, {"tuning_seeds": (10, 11)}, {"conditions": WIDTHS | {"third": {}}}):
        said = type_study("run", **fields)
        assert (
            said.startswith(f"error: study: the plan of {folder} was changed after 18 runs were measured (")
            and not fake
        )
    # With consent, before the comparison: only the runs of the new value are trained.
    assert type_study("run", "--changed", rates=(*RATES, 0.008)) is None
    assert len(fake) == 6 + 4 and ledger.entries(folder)[-1]["chosen"] == {"wide": 0.004, "narrow": 0.002}
    # After it, runs whose value is chosen again are kept, and a new condition is tuned and compared.
    fake.clear()
    assert type_study("run", "--changed") is None and not fake
    assert type_study("run", "--changed", conditions=WIDTHS | {"third": {"model.d_ff": 48 * 2 + 8}}) is None
    assert len(fake) == 9 + 2 and all(name.startswith("third") for name in fake)
    # Those with another value are refused.
    assert "learning_rate" in type_study("run", "--changed", rates=(0.001, 0.0015))


def test_the_tuning_belongs_to_the_frozen_plan(type_study, fake, tmp_path):
    seeds = range(6)
    assert type_study("freeze", seeds=seeds) is None
    assert type_study("run", seeds=seeds) is None
    text = (tmp_path / "study" / "report.md").read_text()
    assert "\nConfirmatory: the plan was frozen" in text
    frozen, _, tuned = ledger.entries(tmp_path / "study")
    assert frozen["content"]["tune"] == {FIELD: list(RATES)} and tuned["plan"] == frozen["plan"]
    assert FIELD not in frozen["content"]["configs"]["wide"]


def test_a_field_that_others_follow_can_be_tuned(overrides):
    fields = {"tune": {"model.dropout": (0.0, 0.1)}, "tuning_seeds": TUNING_SEEDS, "overrides": overrides}
    study = Study("?", "configs/default.py", WIDTHS, range(2), {"perplexity": {}}, **fields)
    before, after = Plan("s", study), Plan("s", study, chosen={"wide": 0.1, "narrow": 0.0})
    assert after.configs["wide"].model.embedding_dropout == 0.1 != before.configs["wide"].model.embedding_dropout
    assert after.to_dict() == before.to_dict() and after.changes_since(before.to_dict()) == []


def test_a_plan_is_not_frozen_after_runs_of_the_tuning(type_study, tmp_path):
    run = tmp_path / "study" / "tuning" / "wide,learning_rate=0.001,seed=10"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    assert "has the losses of wide,learning_rate=0.001,seed=10; a plan is frozen before" in type_study("freeze")


def test_shards_tune_first_and_compare_when_all_have_ended(type_study, fake, tmp_path, caplog):
    assert type_study("run", "--shard=0/2") is None
    assert len(fake) == 9 and "other shards still tune" in caplog.text
    assert type_study("run", "--shard=1/2") is None
    assert len(fake) == 18 + 2, "the last shard goes on with its part of the comparison"
    assert type_study("run", "--shard=0/2") is None
    assert len(fake) == 18 + 4 and set(rates_of_runs(tmp_path / "study").values()) == {0.002, 0.004}


def test_a_script_for_slurm_is_submitted_twice(type_study, capsys):
    assert type_study("run", "--engine=slurm") is None
    text = capsys.readouterr().out
    assert (
        "--array=0-17 " in text
        and f"# 22 runs of the study widths, in 18 tasks. Submit: sbatch THIS_FILE{slurm.AGAIN}\n" in text
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tuning_seeds": None}, r"tuning_seeds: found \(\); must be distinct whole numbers"),
        ({"tuning_seeds": [1, 2]}, r"tuning_seeds: found \[1, 2\]; must not be among seeds"),
        ({"tune": None}, r"tuning_seeds: found \(10, 11, 12\); is only for a study with tune"),
        ({"tune": {}}, r"tune: found \{\}; must be \{field: values\} with one field"),
        ({"tune": {FIELD: (0.1,)}}, rf"tune: {FIELD}: found \(0\.1,\); must be at least two numbers"),
        ({"tune": {FIELD: (0.2, 0.1)}}, rf"tune: {FIELD}: found \(0\.2, 0\.1\)"),
        ({"tune": {FIELD: (0.1, 0.1)}}, rf"tune: {FIELD}: found"),
        ({"tune": {FIELD: (0.1, math.nan)}}, rf"tune: {FIELD}: found"),
        ({"tune": {"optimizer.rate": (0.1, 0.2)}}, r"optimizer\.rate: no such config field"),
        ({"tune": {"model.d_ff": (32, 64)}}, r"conditions: wide: found 'model\.d_ff'; is given for all"),
        ({"tune": {"train.steps": (4, 8)}}, r"tune: found 'train\.steps'; is given by overrides"),
        ({"tune": {"data.vocab_size": (300, 400)}}, r"tune: found 'data\.vocab_size'; must be a field of model"),
        ({"tune": {"seed": (4, 8)}}, r"tune: found 'seed'; is given by overrides or seeds"),
        ({"sizes": {"s": {"model.d_ff": 32}}}, r"sizes: s: found \{'model\.d_ff': 32\}; wide has one of these"),
        ({"sizes": {"s": {FIELD: 0.1}}}, rf"conditions: s,wide: found '{FIELD}'; is given for all"),
        ({"sizes": {"s": {"train.steps": 9}}}, r"conditions: s,wide: found 'train\.steps'"),
        ({"sizes": {" s": {}}}, r"conditions: found ' s,wide'"),
        ({"sizes": {"s": {}, "t": {}}}, r"conditions: s,wide and t,wide have the same config"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_one_line(overrides, fields, message):
    with pytest.raises(UserError, match=f"^{message}"):
        plan_of(overrides, **fields)


def test_the_plan_counts_the_runs_that_tune(overrides, tmp_path):
    plan = plan_of(overrides)
    cost = estimate.Cost(1.0, 0.5, 2.0, 2**20)  # of 1 + 4 · 0.5 + 2 = 5 seconds
    text = estimate.text(Results(plan, tmp_path), dict.fromkeys(WIDTHS, cost), 2)
    runs = {
        line.split()[0]: int(line.split()[1]) for line in text.splitlines() if line.strip().startswith(("wide", "narr"))
    }
    assert runs == {"wide": 3 * 3 + 2, "narrow": 3 * 3 + 2}
    assert "22 of 22 runs are missing; 2 at a time: about 0:00:55.\nOf these, 18 tune.\n" in text

"""`study run --json`: one JSON object with the verdicts, and an exit status that tells them."""

import csv
import json
import sys

import numpy as np
import pytest

from mini_gpt.commands import study as command
from mini_gpt.study import definition, report, statistics
from mini_gpt.study.results import Results
from tests.study import fake_worker
from tests.study.test_ledger import FILE


@pytest.fixture
def judge(monkeypatch, fake, overrides, tmp_path, capsys, request):
    """Return a function that runs a command on a study file, and returns the exit status and the JSON object."""
    monkeypatch.setattr("mini_gpt.commands.command_line.set_up", lambda *_: None)
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(report.Report, "write", lambda _: [])  # figures take a second

    def judge(action, contrasts, seeds, *more, done=0, widths=("128", "64"), name="study"):
        """done: the number of runs that are complete before the command."""
        text = FILE.format(seeds=seeds, overrides=overrides).replace('["wide < narrow"]', repr(contrasts))
        path, workdir = tmp_path / "sizes.py", tmp_path / name
        path.write_text(text.replace('"model.d_ff": 128', f'"model.d_ff": {widths[0]}').replace("64", widths[1]))
        results = Results(definition.load(str(path), {}), workdir)
        for run in [run for run in results.plan.runs if results.missing(run)][:done]:
            fake_worker.do(results.worker_job(run))
        monkeypatch.setattr(sys, "argv", ["study", action, str(path), f"--workdir={workdir}", *more])
        status, _ = 0, capsys.readouterr()
        try:
            command.main()
        except SystemExit as stop:
            status = stop.code
        out = capsys.readouterr().out
        return status, json.loads(out) if out else None

    return judge


def test_verdicts_and_their_numbers_are_one_object(judge, tmp_path):
    status, found = judge("run", ["narrow < wide"], 6, "--json", done=12)
    assert status == found["status"] == 0
    (one,) = found["contrasts"]
    assert (one["verdict"], one["first"], one["claim"], one["second"]) == ("shown", "narrow", "lower", "wide")
    read = lambda name, seed: (tmp_path / "study" / f"{name},seed={seed}" / "eval" / "perplexity.json").read_text()
    nll = lambda name, seed: json.loads(read(name, seed))["nll"]
    differences = [nll("narrow", seed) - nll("wide", seed) for seed in range(6)]
    assert one["differences"] == pytest.approx(differences) and one["difference"] == pytest.approx(np.mean(differences))
    assert one["p"] == one["p_holm"] == 2 / 2**6 == statistics.smallest_p(6)
    assert one["interval_low"] < one["difference"] < one["interval_high"] < 0
    assert found["seeds"] == list(range(6)) and found["standing"].startswith("Exploratory: no plan was frozen")
    assert len(found["complete"]) == 12 and found["missing"] == [] and found["failed"] == {}


@pytest.mark.slow
def test_contrasts_are_the_rows_of_the_csv_file(judge, tmp_path):
    _, found = judge("report", ["narrow < wide"], 6, "--json", done=12)
    (row,) = csv.DictReader((tmp_path / "study" / "comparisons.csv").open())
    assert set(row) == set(found["contrasts"][0]) and float(row["p_holm"]) == found["contrasts"][0]["p_holm"]


def test_the_status_tells_verdicts_and_missing_runs(judge):
    assert judge("report", ["narrow < wide"], 6, "--json")[0] == 4  # nothing has run
    assert judge("report", ["narrow < wide"], 6, "--json", done=11)[0] == 4
    assert judge("report", ["narrow < wide"], 6, "--json", done=1)[0] == 0
    assert judge("report", ["wide < narrow"], 6, "--json")[0] == 3  # the opposite is shown
    assert judge("report", ["narrow < wide", "wide < narrow"], 7, "--json", done=2)[0] == 3
    assert judge("report", ["narrow < wide"], 3, "--json", name="few", done=6)[0] == 3  # undecided
    assert judge("report", [], 6, "--json")[0] == 4


def test_more_seeds_after_a_look_never_have_status_0(judge):
    assert judge("run", ["narrow < wide"], 3, "--json", done=6)[0] == 3
    status, found = judge("report", ["narrow < wide"], 6, "--json", done=6)
    assert status == 5 and found["contrasts"][0]["verdict"] == "shown"
    status, _ = judge("run", ["narrow < wide"], 6, "--json")
    assert (
        status.startswith("error: study: the plan of ") and "was changed after 12 runs were measured (seeds)" in status
    )
    for words in (("run", "--changed"), ("report",)):  # also when the new plan is saved
        status, found = judge(words[0], ["narrow < wide"], 6, "--json", *words[1:])
        assert status == found["status"] == 5


def test_a_failed_run_is_named_in_the_object_and_has_status_1(judge):
    status, found = judge("run", ["narrow < wide"], 1, "--json", done=1, widths=("128", "48"))
    assert status == "error: 1 of 2 runs failed; the same command tries them again" and found["status"] == 4
    assert found["failed"] == {"narrow,seed=0": "model.d_ff: found 48; use another"} and found["missing"] == []


def test_json_needs_a_command_that_reports(judge):
    for words in (("plan",), ("freeze",), ("run", "--shard=0/2"), ("run", "--engine=slurm")):
        status, found = judge(words[0], ["narrow < wide"], 2, "--json", *words[1:])
        assert found is None and status.startswith("error: --json: found a command that writes no report; give it to")

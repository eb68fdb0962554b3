"""The progress of a study: states, steps, losses and the time left."""

import time

import pytest

from mini_gpt.study import progress
from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.progress import Job


def test_the_progress_of_a_run_is_read_from_its_metrics(tmp_path, small):
    job = Job(PlannedRun("a", 0, small(train__steps=100)), tmp_path, began=time.monotonic() - 20)
    assert progress.cells(job) == ["a,seed=0", "waiting", "0 of 100", "–", "–"] and job.last_row() == {}
    job.state, job.first_step = "running", 10
    (tmp_path / "metrics.jsonl").write_text('{"step": 30, "train/loss": 2.5}\n{"step": 50, "train/lo')
    assert progress.cells(job)[1:4] == ["running", "30 of 100", "2.5000"]
    assert progress.seconds_left(job, 30) == pytest.approx(70, rel=0.01)
    (tmp_path / "metrics.jsonl").write_text('{"step": 100, "train/loss": 2.0}\n')
    assert progress.cells(job)[1:] == ["measuring", "100 of 100", "2.0000", "–"]
    job.state, job.reason = "failed", "out of memory"
    assert progress.cells(job)[1] == "failed" and progress.cells(job)[-1] == "out of memory"


def test_a_message_with_brackets_is_shown_as_it_is(tmp_path, small):
    job = Job(PlannedRun("a", 0, small()), tmp_path, state="failed", reason="can't open [/usr/x] [a,b]")
    display = progress.Display(1, 1)
    display.console = progress.Console(record=True, width=200)
    display.console.print(display._table([job]))
    assert "can't open [/usr/x] [a,b]" in display.console.export_text()


def test_a_pipe_gets_plain_lines_even_if_colours_are_forced(tmp_path, small, monkeypatch, capsys, caplog):
    """Notebooks set FORCE_COLOR for the commands that they start."""
    caplog.set_level("INFO", "mini_gpt")
    monkeypatch.setenv("FORCE_COLOR", "1")
    job = Job(PlannedRun("a", 0, small()), tmp_path, state="failed", reason="no space")
    with progress.Display(1, 1) as display:
        display.show([job])
    assert capsys.readouterr().out == "" and caplog.messages == ["[0 of 1 complete] a,seed=0: failed, no space"]


def test_the_time_left_follows_from_complete_runs(tmp_path, small):
    def job(state, seconds=0.0, age=0.0):
        run = PlannedRun("a", 0, small())
        return Job(run, tmp_path, state=state, seconds=seconds, began=time.monotonic() - age)

    assert progress.total_left([job("waiting")], 2) is None
    jobs = [job("complete", 10), job("complete", 30), job("running", age=5), job("waiting"), job("waiting")]
    assert progress.total_left(jobs, 2) == pytest.approx((15 + 40) / 2, abs=0.1)
    assert progress.clock(125.4) == "0:02:05" and progress.clock(None) == "–"

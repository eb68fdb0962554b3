"""Runs of a study in processes of their own: several at a time, each once; failures, signals, locks and kills."""

import csv
import fcntl
import json
import os
import select
import signal
import statistics as standard
import subprocess
import sys
import threading
import time

import pytest

from mini_gpt.commands import study
from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import processes, runner
from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.results import Results
from mini_gpt.study.runner import Job
from tests.conftest import REPOSITORY, slow
from tests.study.conftest import sweep
from tests.study.fake_worker import DIES, FAILS, WAITS

# Runs of a study in processes of their own: several at a time, each once; failures, signals and locks.


def test_each_run_is_done_once_and_the_report_has_their_statistics(monkeypatch, flags, fake, tmp_path, capsys, caplog):
    more = ["--seeds=3", "--contrast=64<96", "--contrast=96>64@bits_per_byte"]
    assert sweep(monkeypatch, flags, "64,96", *more) is None
    names = [f"d_ff={width},seed={seed}" for seed in (3, 4, 5) for width in (64, 96)]
    assert fake == names
    folder, printed = tmp_path / "sweep", capsys.readouterr().out
    text, tables = (folder / "report.md").read_text(), (folder / "perplexity.md").read_text()
    assert "6 of 6 runs are complete, 0 failed\nVerdicts: 2 undecided\n" in printed
    assert f"Report: {folder}/report.html" in printed
    (said,) = [message for message in caplog.messages if "smallest possible p" in message]
    assert "at least 7 seeds are needed" in said and "with 3 seeds, no difference can be shown" in said
    results = {name: json.loads((folder / name / "eval" / "perplexity.json").read_text()) for name in names}
    with (folder / "perplexity.csv").open() as file:
        rows = {row["condition"]: row for row in csv.DictReader(file)}
    for width in ("64", "96"):
        nll = [results[f"d_ff={width},seed={seed}"]["nll"] for seed in (3, 4, 5)]
        row = rows[f"d_ff={width}"]
        assert (row["model.d_ff"], row["seeds"], row["reason"]) == (width, "3", "")
        assert float(row["nll_mean"]) == pytest.approx(standard.mean(nll))
        assert float(row["nll_standard_deviation"]) == pytest.approx(standard.stdev(nll))
        assert [float(row[f"nll_{end}"]) for end in ("lowest", "highest")] == [min(nll), max(nll)]
        assert f"| d_ff={width} | 3 | {standard.mean(nll):.4f} ± {standard.stdev(nll):.4f} |" in tables
    with (folder / "comparisons.csv").open() as file:
        compared = list(csv.DictReader(file))
    assert [row["claim"] for row in compared] == ["lower", "higher"]
    pairs = [results[f"d_ff=64,seed={s}"]["nll"] - results[f"d_ff=96,seed={s}"]["nll"] for s in (3, 4, 5)]
    assert float(compared[0]["difference"]) == pytest.approx(standard.mean(pairs))
    assert float(compared[0]["p"]) == 0.25 and float(compared[0]["p_holm"]) == 0.5
    assert {row["verdict"] for row in compared} == {"undecided"}
    assert "6 of 6 runs are complete" in text and "Exploratory: no plan was frozen" in text
    for name in ("perplexity.png", "differences-nll.png", "training.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name

    # One more seed starts only that seed.
    fake.clear()
    assert sweep(monkeypatch, flags, "64,96", "--seeds=4") is None
    assert fake == ["d_ff=64,seed=6", "d_ff=96,seed=6"]


def test_failed_runs_cost_no_other_and_are_named(monkeypatch, flags, fake, tmp_path, caplog, capsys):
    assert sweep(monkeypatch, flags, f"{FAILS},64,{DIES}").startswith("error: 2 of 3 runs failed")
    reason = "model.d_ff: found 48; use another"
    assert f"d_ff=48,seed=3: {reason} (see {tmp_path}" in caplog.text
    assert "d_ff=50,seed=3: killed by signal 9" in caplog.text
    folder = tmp_path / "sweep"
    assert capsys.readouterr().out.startswith("1 of 3 runs are complete, 2 failed")
    assert "| d_ff=64 | 1 | 1.6" in (folder / "perplexity.md").read_text()
    assert f"| d_ff=48,seed=3 | at step 2 of 4 | {reason} |" in (folder / "report.md").read_text().replace("\\", "")


def test_failed_runs_are_tried_again(run, fake):
    jobs = run(FAILS, 64)
    assert [job.state for job in jobs.values()] == ["failed", "complete"]
    fake.clear()
    assert list(run(FAILS, 64)) == fake == ["d_ff=48,seed=3"]


def when_waiting(tmp_path, then):
    """Start a thread that calls a function when the first run of WAITS waits; return the directory of this run."""
    waiting = tmp_path / "sweep" / f"d_ff={WAITS},seed=3"

    def watch():
        while not (waiting / "metrics.jsonl").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        then()

    threading.Thread(target=watch, daemon=True).start()
    return waiting


@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGTERM)])
def test_a_signal_stops_all_runs_and_they_go_on_later(run, fake, tmp_path, number):
    waiting = when_waiting(tmp_path, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as left:
        run(WAITS, 64)
    assert left.value.code == 128 + number
    assert (waiting / "stopped").read_text() == "saved" and not (waiting / "eval" / "perplexity.json").exists()
    assert run(WAITS, 64)[waiting.name].state == "complete"


@pytest.mark.slow
def test_an_error_of_the_study_itself_stops_and_saves_all_runs(monkeypatch, run, tmp_path):
    def show(*_):
        if gone:
            raise OSError("the terminal is gone")

    gone = []
    waiting = when_waiting(tmp_path, lambda: gone.append(True))
    monkeypatch.setattr(runner.Display, "show", show)
    with pytest.raises(OSError, match="the terminal is gone"):
        run(WAITS)
    assert (waiting / "stopped").read_text() == "saved"


@pytest.mark.slow
def test_runs_can_be_hung_up_under_nohup(run, tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(64)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert json.loads((tmp_path / "sweep" / "d_ff=64,seed=3" / "eval" / "perplexity.json").read_text())["hang_up"]


@pytest.mark.slow
def test_a_run_of_another_process_is_left_alone(run, fake, tmp_path):
    log = tmp_path / "sweep" / "logs" / "d_ff=64,seed=3.log"
    log.parent.mkdir(parents=True)
    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        jobs = run(64, 96)
    assert [job.state for job in jobs.values()] == ["elsewhere", "complete"] and fake == ["d_ff=96,seed=3"]
    with pytest.raises(UserError, match=r"1 of 2 runs are trained by another process \(d_ff=64,seed=3\)"):
        runner.check_all_complete([*jobs.values()], 2)


def test_a_run_that_another_process_has_completed_is_not_done_again(monkeypatch, run, fake):
    """The results are read again under the lock."""
    monkeypatch.setattr(Results, "missing_now", lambda self, run: [])
    assert run(64)["d_ff=64,seed=3"].state == "complete" and fake == []


def test_a_result_that_cannot_be_read_is_a_failure(monkeypatch, run, tmp_path):
    """Otherwise each command would measure the run again and call it complete."""
    start = processes.start

    def damage(*arguments, **streams):
        process = start(*arguments, **streams)
        process.wait()
        (tmp_path / "sweep" / "d_ff=64,seed=3" / "eval" / "perplexity.json").write_text("{")
        return process

    monkeypatch.setattr(processes, "start", damage)
    assert run(64)["d_ff=64,seed=3"].state == "failed"


def test_shards_are_disjoint_and_complete():
    runs = list(range(7))
    assert sorted(runs[study._shard("0/2", 7)] + runs[study._shard("1/2", 7)]) == runs
    for shard in ("2/2", "1", "a/b", "-1/2", "0/0"):
        with pytest.raises(UserError, match="--shard: found"):
            study._shard(shard, 7)


@pytest.mark.slow
def test_a_killed_study_goes_on_with_the_same_bits(tmp_path, corpus_files):
    """Kill the study with SIGKILL: its runs stop with it, and the same command ends with equal results."""
    fields = {"data.corpus": "text", "data.path": corpus_files, "train.steps": 300, "checkpoint.every": 20}
    fields |= {"model.d_model": 32, "model.num_layers": 2, "context_length": 32, "eval.every": 100}
    typed = [f"--config.{name}={value}" for name, value in fields.items()]
    alone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

    def start(directory):
        line = [sys.executable, "-m", "mini_gpt.study", "run", "--config=configs/default.py", *typed]
        line += ["--vary=model.position=rope,alibi", f"--workdir={tmp_path / directory}"]
        return subprocess.Popen(
            line, cwd=REPOSITORY, env=alone, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    whole = start("whole")
    assert whole.wait(300) == 0, whole.stderr.read()
    killed = start("killed")
    metrics = tmp_path / "killed" / "rope,seed=0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or '"step": 50' not in metrics.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    deadline = time.monotonic() + 60
    log = tmp_path / "killed" / "logs" / "rope,seed=0.log"
    while "stopped and saved at step" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    again = start("killed")
    assert again.wait(300) == 0, again.stderr.read()
    for position in ("rope", "alibi"):
        one, other = (
            json.loads((tmp_path / name / f"{position},seed=0" / "eval" / "perplexity.json").read_text())
            for name in ("whole", "killed")
        )
        assert one == other


def test_the_progress_of_a_run_is_read_from_its_metrics(tmp_path, small):
    job = Job(PlannedRun("a", 0, small(train__steps=100)), tmp_path, began=time.monotonic() - 20)
    assert runner.details(job, True) == ["waiting"] and job.last_row() == {}
    job.state, job.first_step = "running", 10
    (tmp_path / "metrics.jsonl").write_text('{"step": 30, "train/loss": 2.5}\n{"step": 50, "train/lo')
    assert runner.details(job, False)[:3] == ["running", "30 of 100", "loss 2.5000"]
    assert runner.seconds_left(job, 30) == pytest.approx(70, rel=0.01)
    (tmp_path / "metrics.jsonl").write_text('{"step": 100, "train/loss": 2.0}\n')
    assert runner.details(job, False) == ["measuring", "loss 2.0000"]
    assert runner.clock(125.4) == "0:02:05" and runner.clock(None) == "–"


def test_each_change_is_a_line(tmp_path, small, caplog):
    caplog.set_level("INFO", "mini_gpt")
    job, display = Job(PlannedRun("a", 0, small()), tmp_path, state="failed", reason="no space"), runner.Display(1)
    for _ in range(2):
        display.show([job])
    assert caplog.messages == ["[0 of 1 complete] a,seed=0: failed, no space"]


# The processes of a study end when the process that started them dies, and send back why they failed.

STARTS = """
import json, os, sys, time
from mini_gpt.study import processes
from mini_gpt.study.machine import Slot
processes.start(sys.argv[1], json.loads(sys.argv[2]), Slot(None, {}))
print("started", flush=True)
time.sleep(600)
"""
CALLS = """
import time
from mini_gpt.study.machine import Slot, call_in
from tests.study.test_runner import say_and_wait
if __name__ == "__main__":
    call_in(Slot(None, {}, accelerators=1), say_and_wait)
"""


def say_and_wait():
    print("started", flush=True)
    time.sleep(600)


def killed_after_start(*command):
    """Start a Python process, kill it after it has printed a line, and return what its children print until they end.

    Children inherit the pipe, so that it has an end when all have ended.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        process.kill()
        process.wait()
        printed, deadline = b"", time.monotonic() + 120
        while select.select([process.stdout], [], [], deadline - time.monotonic())[0]:
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                return printed.decode()
            printed += part
        raise AssertionError("a process lives on")


def test_a_run_ends_when_the_study_is_killed(monkeypatch, overrides, tmp_path):
    config = loading.to_dict(loading.load("configs/default.py", overrides | {"model.d_ff": WAITS}))
    content = {"workdir": str(tmp_path / "run"), "config": config, "suites": {}}
    monkeypatch.setenv("FINGERPRINT", "")
    killed_after_start("-c", STARTS, "tests.study.fake_worker", json.dumps(content))


@pytest.mark.slow
def test_a_measurement_ends_when_its_command_is_killed(overrides):
    config = loading.to_dict(loading.load("configs/default.py", overrides))
    content = {"configs": [config], "suites": {"perplexity": {}}}
    assert killed_after_start("-c", STARTS, "mini_gpt.study.worker", json.dumps(content)) == ""


@pytest.mark.slow
def test_a_process_of_call_in_ends_when_its_command_is_killed(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    killed_after_start(str(tmp_path / "calls.py"))

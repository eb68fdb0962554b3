"""Runs of a study in processes of their own: several at a time, each once; failures, signals, locks and memory."""

import csv
import errno
import fcntl
import json
import os
import re
import signal
import statistics as standard
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mini_gpt.commands import study
from mini_gpt.runtime import errors, program
from mini_gpt.study import processes, progress
from mini_gpt.study.report import Report
from mini_gpt.study.results import Results
from mini_gpt.training import workdir as workdirs
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY, slow
from tests.study.conftest import sweep
from tests.study.fake_worker import DIES, FAILS, LOCKS, WAITS


def test_each_run_is_done_once_and_the_report_has_their_statistics(monkeypatch, flags, fake, tmp_path, capsys):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    programs = f"{os.path.relpath(Path(sys.executable).parent)}/"
    more = ["--seeds=3", "--contrast=64<96", "--contrast=96>64@bits_per_byte"]
    assert sweep(monkeypatch, flags, "64,96", *more) is None
    names = [f"d_ff={width},seed={seed}" for seed in (3, 4, 5) for width in (64, 96)]
    assert fake == names
    folder, printed = tmp_path / "sweep", capsys.readouterr().out
    text, tables = (folder / "report.md").read_text(), (folder / "perplexity.md").read_text()
    assert printed.splitlines() == [
        "6 of 6 runs are complete, 0 failed",
        "Verdicts: 2 undecided",
        "With 3 seeds, no difference can be shown; at least 7 are needed",
        f"Report: {folder}/report.html (tables: report.md)",
        f"Curves: {programs}tensorboard --logdir={folder}",
    ]
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

    # The same command starts nothing. One more seed starts only that seed.
    fake.clear()
    assert sweep(monkeypatch, flags, "64,96", *more) is None
    assert fake == [] and (folder / "report.md").read_text().startswith(text.partition("## How it was made")[0])
    assert sweep(monkeypatch, flags, "64,96", "--seeds=4") is None
    assert fake == ["d_ff=64,seed=6", "d_ff=96,seed=6"]


@pytest.mark.parametrize("seeds, smallest, level", [(2, 0.5, "WARNING"), *slow((6, 0.03125, "INFO"))])
def test_run_says_first_what_its_seeds_can_show(monkeypatch, flags, fake, caplog, seeds, smallest, level):
    assert sweep(monkeypatch, flags, "64,96", f"--seeds={seeds}", "--contrast=64<96") is None
    messages = [record.getMessage() for record in caplog.records]
    (place,) = [index for index, message in enumerate(messages) if "smallest possible p" in message]
    assert f"p of one comparison is {smallest:.3g}; at least 6 seeds are needed" in messages[place]
    assert caplog.records[place].levelname == level
    assert (f"with {seeds} seeds, no difference can be shown" in messages[place]) == (level == "WARNING")
    assert all("complete, 0:" not in message for message in messages[:place])
    # It is not said again if there is nothing to train, nor without contrasts.
    caplog.clear()
    assert sweep(monkeypatch, flags, "64,96", f"--seeds={seeds}", "--contrast=64<96") is None
    assert sweep(monkeypatch, flags, "64,96", f"--seeds={seeds + 1}") is None
    assert "smallest possible p" not in caplog.text and "No contrasts" not in caplog.text


def test_failed_runs_cost_no_other_and_are_named(monkeypatch, flags, fake, tmp_path, caplog, capsys):
    assert sweep(monkeypatch, flags, f"{FAILS},64,{DIES}") == (
        "error: 2 of 3 runs failed; the same command tries them again"
    )
    assert re.search(r"\bd_ff=48,seed=3: model\.d_ff: found 48; use another \(see \S+seed=3\.log\)", caplog.text)
    assert "d_ff=50,seed=3: killed by signal 9 (Killed); was the memory full?" in caplog.text
    folder = tmp_path / "sweep"
    assert capsys.readouterr().out.startswith("1 of 3 runs are complete, 2 failed\nVerdicts: none, since there are no")
    assert "| d_ff=64 | 1 | 1.6" in (folder / "perplexity.md").read_text()
    assert (
        "| d\\_ff=48,seed=3 | at step 2 of 4 | model.d\\_ff: found 48; use another |"
        in (folder / "report.md").read_text()
    )
    fake.clear()
    assert sweep(monkeypatch, flags, f"{FAILS},64,{DIES}").startswith("error: 2 of 3 runs failed")
    assert fake == ["d_ff=48,seed=3", "d_ff=50,seed=3"]


def test_reasons_are_kept_if_the_disk_is_full(monkeypatch, flags, fake, tmp_path, caplog):
    """The log of a run is on the same disk: it can't be made, or not be written, or the report can't be."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")

    def locked(path):
        if path.name == "d_ff=64,seed=3.log":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return open("/dev/full", "a")

    monkeypatch.setattr(processes, "locked_log", locked)
    failed = {f"d_ff={FAILS},seed=3": "model.d_ff: found 48; use another", "d_ff=64,seed=3": "No space left on device"}
    assert sweep(monkeypatch, flags, f"{FAILS},64,96").startswith("error: 2 of 3 runs failed")
    text = (tmp_path / "sweep" / "report.md").read_text().replace("\\", "")
    for name, reason in failed.items():
        assert re.search(rf"\b{name}: .*{reason} \(see ", caplog.text)
        assert re.search(rf"\| {name} \| .* \| .*{reason} \|", text)
    caplog.clear()
    monkeypatch.setattr(Report, "write", lambda _: (_ for _ in ()).throw(errors.UserError("report.md: disk full")))
    assert sweep(monkeypatch, flags, f"{FAILS},64,96") == "error: report.md: disk full"
    for name, reason in failed.items():
        assert re.search(rf"\b{name}: .*{reason} \(see ", caplog.text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_runs_and_the_same_command_goes_on(monkeypatch, flags, fake, tmp_path, number, caplog):
    arguments = ["mini_gpt.sweep", *flags, f"--vary=model.d_ff={WAITS},64"]
    waiting = tmp_path / "sweep" / f"d_ff={WAITS},seed=3" / "metrics.jsonl"

    def stop():
        while not waiting.exists():
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("mini_gpt.commands.command_line.set_up", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        program.run(study.sweep)
    thread.join()
    assert left.value.code == 128 + number and "stopped; the same command resumes the study" in caplog.text
    assert (waiting.parent / "stopped").read_text() == "saved" and not (
        waiting.parent / "eval" / "perplexity.json"
    ).exists()
    fake.clear()
    assert type_in(monkeypatch, *arguments) is None
    assert f"d_ff={WAITS},seed=3" in fake


def test_an_error_of_the_study_itself_stops_and_saves_all_runs(monkeypatch, flags, fake, tmp_path):
    waiting = tmp_path / "sweep" / f"d_ff={WAITS},seed=3"

    def show(*_):
        if (waiting / "metrics.jsonl").exists():
            time.sleep(0.3)
            raise OSError("the terminal is gone")

    monkeypatch.setattr(progress.Display, "show", show)
    assert "the terminal is gone" in sweep(monkeypatch, flags, WAITS)
    assert (waiting / "stopped").read_text() == "saved"


def test_runs_can_be_hung_up_under_nohup(monkeypatch, flags, fake, tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert sweep(monkeypatch, flags, "64") is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
    result = json.loads((tmp_path / "sweep" / "d_ff=64,seed=3" / "eval" / "perplexity.json").read_text())
    assert result["hang_up"]


def test_a_run_of_another_process_is_left_alone(monkeypatch, flags, fake, tmp_path):
    log = tmp_path / "sweep" / "logs" / "d_ff=64,seed=3.log"
    log.parent.mkdir(parents=True)
    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = sweep(monkeypatch, flags, "64,96")
    assert said.startswith("error: 1 of 2 runs are trained by another process (d_ff=64,seed=3); run the same")
    assert fake == ["d_ff=96,seed=3"]
    assert sweep(monkeypatch, flags, "64,96") is None


@pytest.mark.slow
def test_a_run_that_trains_on_another_machine_has_not_failed(monkeypatch, flags, fake, tmp_path):
    """The worker finds the lock or the lease of a run, as in a bucket."""
    with workdirs.locked(tmp_path / "sweep" / f"d_ff={LOCKS},seed=3", new=False):
        said = sweep(monkeypatch, flags, f"{LOCKS},96")
    assert said.startswith(f"error: 1 of 2 runs are trained by another process (d_ff={LOCKS},seed=3); run the same")
    assert sweep(monkeypatch, flags, f"{LOCKS},96") is None


def test_shards_are_disjoint_and_complete(monkeypatch, flags, fake, tmp_path):
    for shard, count in (("0/2", 2), ("1/2", 4)):
        assert sweep(monkeypatch, flags, "64,96", "--seeds=2", f"--shard={shard}") is None
        assert len(set(fake)) == len(fake) == count
    assert not (tmp_path / "sweep" / "report.md").exists()
    for shard in ("2/2", "1", "a/b", "-1/2", "0/0"):
        assert re.match(r"error: --shard: found '", sweep(monkeypatch, flags, "64,96", f"--shard={shard}")), shard


@pytest.mark.slow
def test_a_killed_study_goes_on_with_the_same_bits(tmp_path, corpus_files):
    """Kill the study with SIGKILL: its runs stop with it, and the same command ends with equal results."""
    fields = {
        "data.corpus": "text",
        "data.path": corpus_files,
        "train.steps": 300,
    }
    fields |= {
        "model.d_model": 32,
        "model.num_layers": 2,
        "context_length": 32,
        "eval.every": 100,
        "checkpoint.every": 20,
    }
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


def test_a_result_that_cannot_be_read_is_a_failure(monkeypatch, flags, fake, tmp_path):
    """Otherwise each command would measure the run again and call it complete."""
    written = processes.start

    def start(module, content, slot, **streams):
        process = written(module, content, slot, **streams)
        process.wait()
        (tmp_path / "sweep" / "d_ff=64,seed=3" / "eval" / "perplexity.json").write_text("{")
        return process

    monkeypatch.setattr(processes, "start", start)
    assert sweep(monkeypatch, flags, "64") == "error: 1 of 1 runs failed; the same command tries them again"


def test_a_run_that_another_process_has_completed_is_not_done_again(monkeypatch, flags, fake, tmp_path):
    """The results are read again under the lock."""
    assert sweep(monkeypatch, flags, "64,96") is None
    fake.clear()
    monkeypatch.setattr(Results, "missing", lambda self, run: ["perplexity"])
    monkeypatch.setattr(Results, "missing_now", lambda self, run: [])
    sweep(monkeypatch, flags, "64,96")
    assert fake == []

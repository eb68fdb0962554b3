"""Runs of a study in processes of their own: several at a time, each once; failures, signals, locks and memory."""

import csv
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

import psutil
import pytest

from mini_gpt.runtime import errors
from mini_gpt.study import command, machine, progress, runner
from mini_gpt.study.definition import PlannedRun
from mini_gpt.study.progress import Job
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY
from tests.study.fake_worker import DIES, FAILS, WAITS


def sweep(monkeypatch, flags, widths, *more):
    return type_in(monkeypatch, "mini_gpt.sweep", *flags, f"--vary=model.d_ff={widths}", *more)


def test_each_run_is_done_once_and_the_report_has_their_statistics(monkeypatch, flags, fake, tmp_path, capsys):
    more = ["--seeds=3", "--contrast=64<96", "--contrast=96>64@bits_per_byte"]
    assert sweep(monkeypatch, flags, "64,96", *more) is None
    names = [f"model.d_ff={width},seed={seed}" for seed in (3, 4, 5) for width in (64, 96)]
    assert fake == names
    folder, printed = tmp_path / "sweep", capsys.readouterr().out
    results = {name: json.loads((folder / name / "eval" / "perplexity.json").read_text()) for name in names}
    with (folder / "perplexity.csv").open() as file:
        rows = {row["condition"]: row for row in csv.DictReader(file)}
    for width in ("64", "96"):
        nll = [results[f"model.d_ff={width},seed={seed}"]["nll"] for seed in (3, 4, 5)]
        row = rows[f"model.d_ff={width}"]
        assert (row["model.d_ff"], row["seeds"], row["reason"]) == (width, "3", "")
        assert float(row["nll_mean"]) == pytest.approx(standard.mean(nll))
        assert float(row["nll_standard_deviation"]) == pytest.approx(standard.stdev(nll))
        assert [float(row[f"nll_{end}"]) for end in ("lowest", "highest")] == [min(nll), max(nll)]
        assert f"| model.d_ff={width} | 3 | {standard.mean(nll):.4f} ± {standard.stdev(nll):.4f} |" in printed
    with (folder / "comparisons.csv").open() as file:
        compared = list(csv.DictReader(file))
    assert [row["claim"] for row in compared] == ["lower", "higher"]
    pairs = [results[f"model.d_ff=64,seed={s}"]["nll"] - results[f"model.d_ff=96,seed={s}"]["nll"] for s in (3, 4, 5)]
    assert float(compared[0]["difference"]) == pytest.approx(standard.mean(pairs))
    assert float(compared[0]["p"]) == 0.25 and float(compared[0]["p_holm"]) == 0.5
    assert {row["verdict"] for row in compared} == {"undecided"}
    text = (folder / "report.md").read_text()
    assert "6 of 6 runs are complete" in text and "Exploratory: no plan was frozen" in text
    for name in ("perplexity.png", "differences-nll.png", "training.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name

    # The same command starts nothing. One more seed starts only that seed.
    fake.clear()
    assert sweep(monkeypatch, flags, "64,96", *more) is None
    assert fake == [] and (folder / "report.md").read_text().startswith(text.partition("## How it was made")[0])
    assert sweep(monkeypatch, flags, "64,96", "--seeds=4") is None
    assert fake == ["model.d_ff=64,seed=6", "model.d_ff=96,seed=6"]


def test_each_process_has_its_own_cores(monkeypatch, flags, fake, tmp_path):
    """One of two jobs waits, so all others run in the second slot."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    half = len(cores) // 2
    assert [slot.cores for slot in machine.slots(2)] == [cores[:half], cores[half : 2 * half]]
    assert [slot.environment["OMP_NUM_THREADS"] for slot in machine.slots()] == ["1"] * len(cores)
    assert machine.slots(1)[0].cores is None
    assert sweep(monkeypatch, flags, "64,96", "--seeds=2", "--jobs=2") is None
    seen = [json.loads(path.read_text())["cores"] for path in (tmp_path / "sweep").glob("*/eval/perplexity.json")]
    assert len(seen) == 4 and all(found in (cores[:half], cores[half : 2 * half]) for found in seen)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    for quota, jobs in [("max 100000", len(cores)), ("100000 100000", 1), ("20000 100000", 1)]:
        (tmp_path / "cpu.max").write_text(quota)
        assert len(machine.slots()) == jobs
    assert [slot.cores for slot in machine.slots(2)] == [None, None]  # other containers may use the same cores


def test_a_machine_without_affinity_runs_several_at_a_time(monkeypatch, flags, fake):
    """Such as macOS, where all slots are equal."""
    monkeypatch.setattr(machine, "slots", lambda _: [machine.Slot(None, {"N": "1"}), machine.Slot(None, {"N": "1"})])
    most, finish = [], runner.Runner._finish
    monkeypatch.setattr(runner.Runner, "_finish", lambda self: (most.append(len(self.running)), finish(self))[1])
    assert sweep(monkeypatch, flags, "64,96", "--seeds=2") is None
    assert len(fake) == 4 and max(most) == 2


def test_gpus_and_tpus_are_shared_by_the_jobs(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    visible = lambda jobs: [slot.environment.get("CUDA_VISIBLE_DEVICES") for slot in machine.slots(jobs)]
    monkeypatch.setattr(machine, "_accelerators", lambda: ("cuda", 4))
    assert visible(None) == ["0", "1", "2", "3"] and visible(2) == ["0,1", "2,3"] and visible(1) == [None]
    assert [slot.accelerators for slot in machine.slots(2)] == [2, 2]
    monkeypatch.setattr(machine, "_accelerators", lambda: ("tpu", 8))
    assert len(machine.slots()) == 1
    with pytest.raises(errors.UserError, match=r"^--jobs: found 2; must be in 1..1, since all chips"):
        machine.slots(2)


def test_new_runs_on_accelerators_are_checked_in_a_process(monkeypatch, flags, fake):
    slot = machine.Slot(None, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, accelerators=1)
    monkeypatch.setattr(machine, "slots", lambda _: [slot])
    assert sweep(monkeypatch, flags, "64").startswith(
        "error: mesh: found data × fsdp × tensor = 1 × 1 × 1, and this job has 3 devices"
    )
    assert not fake


def test_a_device_that_cannot_start_is_one_line(monkeypatch):
    monkeypatch.setattr(machine.devices, "PLUGINS", {"jax": "GPU"})
    monkeypatch.setattr(machine, "ASK", "raise RuntimeError('the GPU is busy')")
    with pytest.raises(errors.UserError, match=r"^JAX can't start on the devices .*the GPU is busy\); JAX_PLAT"):
        machine.slots()


def test_failed_runs_cost_no_other_and_are_named(monkeypatch, flags, fake, tmp_path, caplog):
    assert sweep(monkeypatch, flags, f"{FAILS},64,{DIES}") == (
        "error: 2 of 3 runs failed; the same command tries them again"
    )
    assert re.search(r"model\.d_ff=48,seed=3: model\.d_ff: found 48; use another \(see \S+seed=3\.log\)", caplog.text)
    assert "model.d_ff=50,seed=3: killed by signal 9 (Killed); was the memory full?" in caplog.text
    folder = tmp_path / "sweep"
    assert "| model.d_ff=64 | 1 | 1.6" in (folder / "perplexity.md").read_text()
    assert (
        "| model.d\\_ff=48,seed=3 | at step 2 of 4 | model.d\\_ff: found 48; use another |"
        in (folder / "report.md").read_text()
    )
    fake.clear()
    assert sweep(monkeypatch, flags, f"{FAILS},64,{DIES}").startswith("error: 2 of 3 runs failed")
    assert fake == ["model.d_ff=48,seed=3", "model.d_ff=50,seed=3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_runs_and_the_same_command_goes_on(monkeypatch, flags, fake, tmp_path, number, caplog):
    arguments = ["mini_gpt.sweep", *flags, f"--vary=model.d_ff={WAITS},64"]
    waiting = tmp_path / "sweep" / f"model.d_ff={WAITS},seed=3" / "metrics.jsonl"

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
        errors.run(command.sweep)
    thread.join()
    assert left.value.code == 128 + number and "stopped; the same command resumes the study" in caplog.text
    assert (waiting.parent / "stopped").read_text() == "saved" and not (
        waiting.parent / "eval" / "perplexity.json"
    ).exists()
    fake.clear()
    assert type_in(monkeypatch, *arguments) is None
    assert f"model.d_ff={WAITS},seed=3" in fake


def test_an_error_of_the_study_itself_stops_and_saves_all_runs(monkeypatch, flags, fake, tmp_path):
    waiting = tmp_path / "sweep" / f"model.d_ff={WAITS},seed=3"

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
    result = json.loads((tmp_path / "sweep" / "model.d_ff=64,seed=3" / "eval" / "perplexity.json").read_text())
    assert result["hang_up"]


def test_a_run_of_another_process_is_left_alone(monkeypatch, flags, fake, tmp_path):
    log = tmp_path / "sweep" / "logs" / "model.d_ff=64,seed=3.log"
    log.parent.mkdir(parents=True)
    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = sweep(monkeypatch, flags, "64,96")
    assert said.startswith("error: 1 of 2 runs are trained by another process (model.d_ff=64,seed=3); run the same")
    assert fake == ["model.d_ff=96,seed=3"]
    assert sweep(monkeypatch, flags, "64,96") is None


def test_shards_are_disjoint_and_complete(monkeypatch, flags, fake, tmp_path):
    for shard, count in (("0/2", 2), ("1/2", 4)):
        assert sweep(monkeypatch, flags, "64,96", "--seeds=2", f"--shard={shard}") is None
        assert len(set(fake)) == len(fake) == count
    assert not (tmp_path / "sweep" / "report.md").exists()
    for shard in ("2/2", "1", "a/b", "-1/2", "0/0"):
        assert re.match(r"error: --shard: found '", sweep(monkeypatch, flags, "64,96", f"--shard={shard}")), shard


def test_too_many_jobs_are_refused(monkeypatch, flags, fake, tmp_path):
    for jobs in (0, 10_000):
        assert sweep(monkeypatch, flags, "64", f"--jobs={jobs}").startswith(
            f"error: --jobs: found {jobs}; must be in 1.."
        )
    assert not (tmp_path / "sweep").exists()


def test_the_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    total = psutil.virtual_memory().total
    for limit, expected in (("max", total), (str(2 * total), total), ("5000", 5000)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.memory_total() == expected
    assert machine.memory_left() > 5000, "without the used bytes, the limit says nothing"
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1500\ninactive_file 1100\nactive_file 400\n")
    assert machine.memory_left() == 5000 - 3000 + 1100
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_left() > 5000


def test_runs_wait_for_memory(monkeypatch, flags, fake):
    """With little memory, one run at a time is started, but one always is."""
    monkeypatch.setattr(machine, "memory_left", lambda: 2**20)
    most = []
    finish = command.runner.Runner._finish
    monkeypatch.setattr(
        command.runner.Runner, "_finish", lambda self: (most.append(len(self.running)), finish(self))[1]
    )
    assert sweep(monkeypatch, flags, "64,96", "--seeds=2") is None
    assert len(fake) == 4 and max(most) == 1


def test_runs_that_have_just_started_are_expected_to_grow(monkeypatch, flags, fake):
    """3 GiB are left: enough for two runs of 1 GiB, the first guess, although the first one is still small."""
    monkeypatch.setattr(machine, "memory_left", lambda: 3 * 2**30)
    monkeypatch.setattr(machine, "slots", lambda _: [machine.Slot(None, {}) for _ in range(4)])
    before, finish = [], runner.Runner._finish

    def count(self):
        if not self.is_measured:
            before.append(len(self.running))
        finish(self)

    monkeypatch.setattr(runner.Runner, "_finish", count)
    assert sweep(monkeypatch, flags, "64,96", "--seeds=3") is None
    assert len(fake) == 6 and max(before) == 2


def test_the_newest_run_is_stopped_if_memory_is_short(monkeypatch, flags, fake, tmp_path, caplog):
    """It is saved, waits until another run has ended, and is trained again."""
    left = [2**40]
    monkeypatch.setattr(machine, "memory_left", lambda: left[0])
    monkeypatch.setattr(machine, "slots", lambda _: [machine.Slot(None, {"N": "1"}), machine.Slot(None, {"N": "2"})])
    first, second = (tmp_path / "sweep" / f"model.d_ff={WAITS},seed={seed}" for seed in (3, 4))

    def shorten():
        while not (second / "metrics.jsonl").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        left[0] = 0
        while not (second / "stopped").exists():
            time.sleep(0.02)
        left[0] = 2**40
        (first / "go").touch()

    thread = threading.Thread(target=shorten, daemon=True)
    thread.start()
    assert sweep(monkeypatch, flags, WAITS, "--seeds=2") is None
    thread.join()
    assert f"memory is short: model.d_ff={WAITS},seed=4 is stopped" in caplog.text
    assert fake == [first.name, second.name, second.name] and not (first / "stopped").exists()


def test_the_progress_of_a_run_is_read_from_its_metrics(tmp_path, small):
    job = Job(PlannedRun("a", 0, small(train__steps=100)), ["perplexity"], tmp_path, began=time.monotonic() - 20)
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
    job = Job(PlannedRun("a", 0, small()), [], tmp_path, state="failed", reason="can't open [/usr/x] [a,b]")
    display = progress.Display(1, 1)
    display.console = progress.Console(record=True, width=200)
    display.console.print(display._table([job]))
    assert "can't open [/usr/x] [a,b]" in display.console.export_text()


def test_the_time_left_follows_from_complete_runs(tmp_path, small):
    def job(state, seconds=0.0, age=0.0):
        run = PlannedRun("a", 0, small())
        return Job(run, [], tmp_path, state=state, seconds=seconds, began=time.monotonic() - age)

    assert progress.total_left([job("waiting")], 2) is None
    jobs = [job("complete", 10), job("complete", 30), job("running", age=5), job("waiting"), job("waiting")]
    assert progress.total_left(jobs, 2) == pytest.approx((15 + 40) / 2, abs=0.1)
    assert progress.clock(125.4) == "0:02:05" and progress.clock(None) == "–"


@pytest.mark.slow
def test_a_killed_study_goes_on_with_the_same_bits(tmp_path, corpus_files):
    """Kill the study with SIGKILL: its runs stop with it, and the same command ends with equal results."""
    fields = {
        "data.corpus": "text",
        "data.path": corpus_files,
        "data.cache_dir": tmp_path / "cache",
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
    metrics = tmp_path / "killed" / "model.position=rope,seed=0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or '"step": 50' not in metrics.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    deadline = time.monotonic() + 60
    log = tmp_path / "killed" / "logs" / "model.position=rope,seed=0.log"
    while "stopped and saved at step" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    again = start("killed")
    assert again.wait(300) == 0, again.stderr.read()
    for position in ("rope", "alibi"):
        one, other = (
            json.loads((tmp_path / name / f"model.position={position},seed=0" / "eval" / "perplexity.json").read_text())
            for name in ("whole", "killed")
        )
        assert one == other


def test_a_result_that_cannot_be_read_is_a_failure(monkeypatch, flags, fake, tmp_path):
    """Otherwise each command would measure the run again and call it complete."""
    written = runner.processes.start

    def start(module, content, slot, **streams):
        process = written(module, content, slot, **streams)
        process.wait()
        (tmp_path / "sweep" / "model.d_ff=64,seed=3" / "eval" / "perplexity.json").write_text("{")
        return process

    monkeypatch.setattr(runner.processes, "start", start)
    assert sweep(monkeypatch, flags, "64") == "error: 1 of 1 runs failed; the same command tries them again"


def test_a_run_that_another_process_has_completed_is_not_done_again(monkeypatch, flags, fake, tmp_path):
    """The results are read again under the lock."""
    assert sweep(monkeypatch, flags, "64,96") is None
    fake.clear()
    monkeypatch.setattr(command.Results, "missing", lambda self, run: ["perplexity"])
    monkeypatch.setattr(command.Results, "missing_now", lambda self, run: [])
    sweep(monkeypatch, flags, "64,96")
    assert fake == []

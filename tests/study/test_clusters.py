"""Studies on clusters: Ray and Slurm."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types

import psutil
import pytest

from mini_gpt.commands import study
from mini_gpt.runtime import errors, program
from mini_gpt.study import ray as engine
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY, SMALL, slow
from tests.runtime.test_processes import free_port
from tests.study import slurm_cluster
from tests.study.conftest import sweep
from tests.study.fake_worker import DIES, DIVERGES, FAILS, WAITS
from tests.study.slurm_cluster import wait

# Studies on a real Ray cluster of two nodes: a node that dies, failures, a stop, and how a run gets its share.

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
LONG = {"train.steps": 240, "train.log_every": 10, "eval.every": 120, "checkpoint.every": 20, "model.num_layers": 2}


@pytest.fixture
def cluster(monkeypatch):
    """Start a cluster of two nodes with one core each, on this machine; yield it and its second node."""
    ray = pytest.importorskip("ray", reason="ray is not installed: see requirements-ray.txt")
    from ray.cluster_utils import Cluster

    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_memory_monitor_refresh_ms"):
        monkeypatch.setenv(name, "0")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a short path: it has sockets
    os.makedirs("/tmp/ray", exist_ok=True)  # Cluster writes its address there, also with another temp_dir
    head = NODE | {"include_dashboard": False, "temp_dir": folder}
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    found = Cluster(initialize_head=True, head_node_args=head)
    second = found.add_node(**NODE)
    signal.signal(signal.SIGINT, previous)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found, second
    ray.shutdown()
    found.shutdown()
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_dead_node_changes_no_bit_of_a_study(cluster, corpus_files, tmp_path, capfd):
    """The processes of a node are killed while it trains. Its run is resumed on the other one."""
    fields = SMALL | LONG | {"data.path": corpus_files}
    alone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

    def start(kind):
        line = [sys.executable, "-m", "mini_gpt.sweep", "--config=configs/default.py", f"--engine={kind}", "--seeds=2"]
        line += [f"--config.{name}={value}" for name, value in fields.items()]
        line += ["--vary=model.position=rope,alibi", f"--workdir={tmp_path / kind}", f"--jobs={jobs[kind]}"]
        return subprocess.Popen(line, cwd=REPOSITORY, env=alone, stderr=subprocess.PIPE, text=True)

    jobs = {"local": len(os.sched_getaffinity(0)), "ray": 1}  # a core for each run
    (nodes, second), on_ray = cluster, start("ray")
    (raylet,) = (info.process.pid for info in second.all_processes["raylet"])
    deadline, lost = time.monotonic() + 300, []
    while not lost:
        assert time.monotonic() < deadline and on_ray.poll() is None
        for process in psutil.Process(raylet).children(recursive=True):
            if "mini_gpt.study.worker" in process.cmdline():
                (name,) = {os.path.basename(file.path)[:-4] for file in process.open_files() if "/logs/" in file.path}
                metrics = tmp_path / "ray" / name / "metrics.jsonl"
                lost = [name] if metrics.exists() and '"step": 60' in metrics.read_text() else []
        time.sleep(0.1)
    trains = psutil.Process(raylet).children(recursive=True)
    nodes.remove_node(second, allow_graceful=False)
    for process in trains:
        if process.is_running():
            process.kill()
    said = on_ray.communicate(timeout=600)[1]
    assert on_ray.returncode == 0, said
    assert "(raylet)" not in capfd.readouterr().out + said
    assert re.findall(r"(\S+): its node or its process died; resumed on node", said) == lost
    text = (tmp_path / "ray" / "logs" / f"{lost[0]}.log").read_text()
    (step,) = map(int, re.findall(r"is at step (\d+): resuming", text))
    assert text.count(engine.STARTED) == 2 and 0 < step < LONG["train.steps"]
    on_this_machine = start("local")
    assert on_this_machine.wait(600) == 0, on_this_machine.stderr.read()
    names = [f"{position},seed={seed}/eval/perplexity.json" for position in ("rope", "alibi") for seed in (0, 1)]
    for name in (*names, "perplexity.csv", "perplexity.md", "runs.csv"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name


@pytest.mark.slow
def test_failures_and_a_stop_are_those_of_the_local_engine(monkeypatch, fake, cluster, flags, tmp_path, caplog):
    """The nodes are started with the variables of `fake`."""
    assert sweep(monkeypatch, flags, f"{FAILS},64,{DIES}", "--engine=ray").startswith("error: 2 of 3 runs failed")
    assert re.search(r"\bd_ff=48,seed=3: model\.d_ff: found 48; use another \(see \S+seed=3\.log\)", caplog.text)
    assert "d_ff=50,seed=3: killed by signal 9 (Killed); was the memory full?" in caplog.text
    assert "[1 of 3 complete] d_ff=64,seed=3: complete, 0:00:0" in caplog.text
    result = json.loads((tmp_path / "sweep" / "d_ff=64,seed=3" / "eval" / "perplexity.json").read_text())
    assert len(result["cores"]) == 1
    waiting = tmp_path / "sweep" / f"d_ff={WAITS},seed=3"

    def stop():
        while not (waiting / "metrics.jsonl").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    monkeypatch.setattr(sys, "argv", ["mini_gpt.sweep", *flags, f"--vary=model.d_ff={WAITS},64", "--engine=ray"])
    with pytest.raises(SystemExit) as left:
        program.run(study.sweep)
    thread.join()
    assert left.value.code == 130 and "stopped; the same command resumes the study" in caplog.text
    assert (waiting / "stopped").read_text() == "saved" and not (waiting / "eval" / "perplexity.json").exists()
    assert sweep(monkeypatch, flags, f"{WAITS},64", "--engine=ray") is None


@pytest.mark.slow
def test_a_study_is_tuned_on_the_cluster_and_then_compared(monkeypatch, fake, cluster, overrides, tmp_path):
    """Training diverges at the largest rate: only the log on the node says so."""
    widths, rates = {"wide": {"model.d_ff": 96}, "narrow": {"model.d_ff": 64}}, (0.002, 0.004, DIVERGES)
    fields = {"question": "?", "config": "configs/default.py", "conditions": widths, "overrides": overrides}
    fields |= {"tune": {"optimizer.learning_rate": rates}, "tuning_seeds": [9], "seeds": [0]}
    path = tmp_path / "widths.py"
    path.write_text(f"def get_study(): return {fields | {'suites': {'perplexity': {}}}}")
    workdir = f"--workdir={tmp_path / 'study'}"
    assert type_in(monkeypatch, "mini_gpt.commands.study", "run", str(path), workdir, "--engine=ray") is None
    found = {condition: tmp_path / "study" / f"{condition},seed=0" / "config.json" for condition in widths}
    chosen = {name: json.loads(path.read_text())["optimizer"]["learning_rate"] for name, path in found.items()}
    assert chosen == {"wide": 0.004, "narrow": 0.002}


def test_a_node_that_does_not_see_the_directory_says_so(tmp_path):
    interrupt = signal.getsignal(signal.SIGINT)
    status, said = engine.train("no_module", {}, tmp_path / "elsewhere" / "a.log", {})
    signal.signal(signal.SIGINT, interrupt)
    assert status == 1 and re.match(rf"--workdir: node \S+ does not see {tmp_path}/elsewhere/a\.log; name a", said)


def test_without_ray_one_line_says_what_to_install(monkeypatch, flags, fake, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = "error: --engine=ray: the package ray is missing; pip install -r requirements-ray.txt"
    assert sweep(monkeypatch, flags, "64", "--engine=ray") == said and not (tmp_path / "sweep" / "study.json").exists()


@pytest.mark.parametrize("scheme", ["ray://", *slow("")])
def test_a_cluster_that_is_gone_is_one_line(monkeypatch, flags, fake, scheme):
    if scheme:  # without Ray
        init = lambda **_: pytest.fail("Ray tries for minutes")
        monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    else:
        pytest.importorskip("ray", reason="ray is not installed: see requirements-ray.txt")
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{free_port()}")
    said = sweep(monkeypatch, flags, "64", "--engine=ray")
    expected = (
        r"error: --engine=ray: can't connect \(\S+:\d+: Connection refused\); set RAY_ADDRESS to a running cluster"
    )
    assert re.match(expected, said)


@pytest.mark.parametrize(
    ("nodes", "jobs", "expected"),
    [
        ([{"CPU": 8.0}, {"CPU": 4.0}, {}], None, (1, 0, 12)),
        ([{"CPU": 8.0}, {"CPU": 4.0}], 2, (2, 0, 6)),
        ([{"CPU": 32.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0}], None, (4, 1, 12)),
        ([{"CPU": 32.0, "GPU": 8.0}], 4, (8, 2, 4)),
        ([{}], None, (1, 0, 0)),
    ],
)
def test_a_run_gets_its_share_of_the_smallest_node(nodes, jobs, expected):
    assert engine.share(nodes, jobs) == expected


def test_too_many_runs_for_a_node_are_refused():
    with pytest.raises(errors.UserError, match=r"^--jobs: found 5; must be in 1..4, the GPUs of the smallest node"):
        engine.share([{"CPU": 16.0, "GPU": 4.0}], 5)


# The Slurm script of a study: its text, its signals, and a pre-emption on a real cluster of one node.

STUDY = """
def get_study():
    return {{
        "question": "",
        "config": "configs/default.py",
        "conditions": ["model.position=rope,alibi"],
        "seeds": range(2),
        "suites": {{"perplexity": {{}}}},
        "overrides": {fields},
    }}
"""
LONGER = {"train.steps": 1000, "train.log_every": 10, "eval.every": 500, "checkpoint.every": 20, "model.num_layers": 2}
SUBMITTED = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}


@pytest.fixture
def write_study(tmp_path):
    """Return a function that writes a study of two conditions and two seeds to a file."""

    def write(name, **fields):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(STUDY.format(fields={name: fields[name] for name in fields}))
        return path

    return write


@pytest.fixture
def study_flags(corpus_files, tmp_path):
    return [f"--config.data.path={corpus_files}", f"--cache_dir={tmp_path / 'the cache'}"]


@pytest.fixture
def script(monkeypatch, write_study, study_flags, tmp_path, capsys):
    """Return a function that writes the script of a study to a file. In the script, a shell script is the Python."""

    def make(python, *arguments):
        program = tmp_path / "it's python"
        program.write_text(f"#!/bin/bash\n{textwrap.dedent(python)}")
        program.chmod(0o755)
        study = write_study("a 'quoted' folder/tiny.py", **SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(program))
            typed = ["run", str(study), *study_flags, "--engine=slurm", *arguments]
            assert type_in(patch, "mini_gpt.commands.study", *typed) is None
        path = tmp_path / "job.sh"
        path.write_text(capsys.readouterr().out)
        return path

    return make


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """Put a program `scontrol` on the path that writes its arguments to a file; return the file."""
    program, said = tmp_path / "bin" / "scontrol", tmp_path / "scontrol.txt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" >> {shlex.quote(str(said))}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return said


def test_the_script_passes_its_arguments_on(script, study_flags, tmp_path):
    path = script('printf "%s\\n" "$@"; exit 5', "--workdir=my $HOME/runs", "--shards=2", "--jobs", "3")
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    assert re.findall(r"^#SBATCH --job-name=tiny --array=(\S+) --cpus-per-task=(\d+)$", text, re.M) == [("0-1", "3")]
    assert "# 4 runs of the study tiny, in 2 tasks." in text
    result = subprocess.run(["bash", path], env=os.environ | SUBMITTED, capture_output=True, text=True)
    study = str(tmp_path / "a 'quoted' folder" / "tiny.py")
    expected = ["-m", "mini_gpt.study", "run", study, *study_flags, "--workdir=my $HOME/runs", "--jobs=3"]
    assert result.stdout.splitlines() == [*expected, "--shard=1/2"]
    assert result.returncode == 5 and result.stderr == ""


def test_the_action_may_follow_flags_and_each_run_has_a_task(monkeypatch, write_study, study_flags, tmp_path, capsys):
    flags = ["--workdir", str(tmp_path / "runs")]
    typed = [*flags, "run", str(write_study("tiny.py", **SMALL)), *study_flags, "--engine=slurm"]
    assert type_in(monkeypatch, "mini_gpt.commands.study", *typed) is None
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if "-m mini_gpt.study" in line]
    assert shlex.split(line)[4:-3] == [*flags, *typed[3:-1]] and "--array=0-3 --cpus-per-task=1\n" in text
    assert type_in(monkeypatch, "mini_gpt.commands.study", *typed, "--shards=5").startswith("error: --shards: found 5")


STOPS = "trap 'sleep 0.5; exit 143' TERM; echo begun; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("python", "number", "status", "requeued"),
    [
        (STOPS, signal.SIGUSR1, 143, "requeue 7_1\n"),  # near the time limit: the study is stopped, and goes on later
        ("trap 'exit 0' TERM; echo begun; while :; do sleep 0.05; done", signal.SIGUSR1, 0, ""),  # complete in time
        ("echo begun; sleep 1; exit 143", signal.SIGTERM, 143, ""),  # Slurm requeues a job that it has pre-empted
    ],
)
def test_the_script_waits_for_the_study_and_requeues(script, scontrol, python, number, status, requeued):
    path = script(python, "--shards=2")
    process = subprocess.Popen(["bash", path], env=os.environ | SUBMITTED, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.wait(30) == status
    assert (scontrol.read_text() if scontrol.exists() else "") == requeued


@pytest.mark.slow
@pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing()))
def test_a_preempted_study_ends_with_the_same_bits(write_study, study_flags, tmp_path):
    """A job of a higher partition takes the node. Later, one task is told that its time limit is near."""
    study = str(write_study("positions.py", **(SMALL | LONGER)))
    alone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

    def run(*command, env=alone):
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def type_study(action, workdir, *more):
        line = [sys.executable, "-m", "mini_gpt.study", action, study, *study_flags]
        return run(*line, f"--workdir={tmp_path / workdir}", "--jobs=1", *more)

    def passed(name, step=50):
        path = tmp_path / "shared" / name / "metrics.jsonl"
        return path.exists() and any(int(found) >= step for found in re.findall(r'"step": (\d+)', path.read_text()))

    names = [f"{position},seed={seed}" for seed in (0, 1) for position in ("rope", "alibi")]
    type_study("run", "whole")
    (tmp_path / "job.sh").write_text(type_study("run", "shared", "--engine=slurm", "--shards=2"))
    (tmp_path / "cluster").mkdir()
    with slurm_cluster.cluster(tmp_path / "cluster") as environment:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

        def slurm(*command):
            return run(*command, env=environment)

        def tasks():
            """Return {task: its fields} of the array."""
            jobs = [
                dict(re.findall(r"(\w+)=(\S*)", line)) for line in slurm("scontrol", "-o", "show", "job").splitlines()
            ]
            return {job["ArrayTaskId"]: job for job in jobs if job.get("ArrayJobId") == array}

        def restarts():
            return {task: int(fields["Restarts"]) for task, fields in tasks().items()}

        array = slurm("sbatch", "--parsable", f"--output={tmp_path}/%a.out", str(tmp_path / "job.sh")).strip()
        wait(lambda: any(map(passed, names)), "a first run", 600)
        running = [task for task, fields in tasks().items() if fields["JobState"] == "RUNNING"]
        slurm("sbatch", "--wait", "--partition=high", "--exclusive", f"--output={tmp_path}/high.out", "--wrap=sleep 3")
        assert running and restarts() == {task: int(task in running) for task in ("0", "1")}
        wait(lambda: passed("rope,seed=1"), "the second run of task 0", 600)
        slurm("scancel", "--batch", "--signal=USR1", f"{array}_0")
        wait(lambda: restarts()["0"] == 2, "task 0 to be requeued", 60)
        wait(lambda: not slurm("squeue", "--noheader"), "the end of all jobs", 600)
        assert {fields["JobState"] for fields in tasks().values()} == {"COMPLETED"}

    stops = []
    for name in names:
        text = (tmp_path / "shared" / "logs" / f"{name}.log").read_text()
        saved = re.findall(r"stopped and saved at step (\d+)", text)
        assert len(saved) == text.count("stopping: saving after this step"), text
        assert re.findall(r"is at step (\d+): resuming", text) == saved, text
        stops += map(int, saved)
        whole, shared = (
            (tmp_path / workdir / name / "eval" / "perplexity.json").read_bytes() for workdir in ("whole", "shared")
        )
        assert whole == shared, name
    assert len(stops) >= 2 and all(0 < step < LONGER["train.steps"] for step in stops)

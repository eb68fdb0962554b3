"""The Slurm script of a study: its text, its signals, and a pre-emption on a real cluster of one node."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY, SMALL
from tests.study import slurm_cluster
from tests.study.slurm_cluster import wait

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
LONG = {"train.steps": 1000, "train.log_every": 10, "eval.every": 500, "checkpoint.every": 20, "model.num_layers": 2}
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
    study = str(write_study("positions.py", **(SMALL | LONG)))
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
    assert len(stops) >= 2 and all(0 < step < LONG["train.steps"] for step in stops)

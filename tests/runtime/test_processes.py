"""Several processes on one machine: connection, errors about missing processes, and joint training."""

import base64
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mini_gpt.insight import training_curves
from mini_gpt.runtime import processes, program
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, run_directory
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY, SMALL
from tests.training import interruption
from tests.training.interruption import without_rates

ONE_DEVICE = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_two(command, extra=()):
    """Start the two processes of a job. `extra` holds additional arguments for each process."""
    job = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--start_timeout=60"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    calls = [[*command, *job, f"--process_id={number}", *(extra[number] if extra else ())] for number in range(2)]
    environment = os.environ | ONE_DEVICE
    return [subprocess.Popen([sys.executable, *call], cwd=REPOSITORY, env=environment, **pipes) for call in calls]


def rows(workdir):
    return list(map(without_rates, interruption.rows(workdir)))


def assert_close(a, b):
    """Compare within rounding. Adam can turn the last bits of a gradient near zero into a full step."""
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
def test_two_processes_train_as_one(small, tmp_path):
    one, two = tmp_path / "one", tmp_path / "[two] \\ processes"
    sharded = {"mesh.data": 1, "mesh.fsdp": 2}
    paths = {"data.path": small().data.path, "data.tokenizer": "bpe", "data.vocab_size": 300, "eval.sample_tokens": 4}
    bpe = {name.replace(".", "__"): value for name, value in paths.items()}
    probe = training_curves.attention_metrics  # as train.py
    loop.train(small(train__steps=4, **bpe), one, probe=probe)
    apart = (
        os.environ | ONE_DEVICE | {"MINI_GPT_CACHE": str(tmp_path / "apart")}
    )  # empty, so both processes prepare the data

    fields = SMALL | paths | sharded
    train = ["train.py", "--config=configs/default.py", *(f"--config.{name}={value}" for name, value in fields.items())]
    job = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--start_timeout=60"]
    commands = [[*train, f"--workdir={two}", "--config.train.steps=4"], [*train, f"--workdir={one}"]]
    commands.append(["eval.py", f"--workdir={one}"])
    both = []
    for number in range(2):
        numbered = [[*command, *job, f"--process_id={number}"] for command in commands]
        (tmp_path / f"{number}.json").write_text(json.dumps(numbered))
        call = [sys.executable, "-m", "tests.two_processes", str(tmp_path / f"{number}.json")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both.append(subprocess.Popen(call, cwd=REPOSITORY, env=apart, **pipes))
    said = [process.communicate(timeout=150) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "Validation loss" in said[0][0] and "continued by the model" in said[0][0]
    assert "alidation" not in said[1][0] and said[1][1] == "", "only process 0 writes output"

    # Runs of one and of two processes have the same numbers, also after a resume with the other number.
    assert [row["step"] for row in rows(two)] == [1, 2, 3, 4]
    assert_close(rows(two), rows(one)[:4])
    assert_close(Run(two).model.parameters, Run(one, checkpoint="4").model.parameters)
    again = loop.train(small(**bpe), two, probe=probe)
    assert_close(rows(two), rows(one))
    assert_close(again.parameters, Run(one).model.parameters)
    for written in (two / "checkpoints" / "4", one / "checkpoints" / "8"):
        recorded = json.loads((written / "parameters" / "_sharding").read_text())
        place = json.loads(recorded[base64.b64encode(b"blocks.0.mlp.up.kernel").decode()])
        assert (place["shape"], place["partition_spec"]) == ([1, 2, 1], ["fsdp", "tensor"])
        assert {path.name for path in (written / "parameters").glob("ocdbt.process_*/d/*")}, "both wrote"
    result = json.loads((one / "eval" / "perplexity.json").read_text())
    assert result["nll"] == pytest.approx(rows(one)[-1]["validation/loss"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("signaled, number", [(1, signal.SIGTERM), (0, signal.SIGINT)])
def test_a_signal_to_one_process_stops_both_at_one_step(small, tmp_path, signaled, number):
    fields = SMALL | {"data.path": small().data.path, "mesh.data": 1}
    fields |= {"mesh.fsdp": 2, "train.steps": 1000, "eval.every": 1000, "checkpoint.every": 4, "model.dropout": 0.2}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    workdir = tmp_path / "run"
    both = start_two(["train.py", "--config=configs/default.py", *arguments, f"--workdir={workdir}"])
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") >= 8):
        assert time.monotonic() < deadline and all(process.poll() is None for process in both)
        time.sleep(0.02)
    both[signaled].send_signal(number)
    said = [process.communicate(timeout=100) for process in both]
    assert both[signaled].returncode == 128 + number and both[1 - signaled].returncode == 143, said
    stopped = int(re.search(r"stopped and saved at step (\d+)", said[0][1])[1])
    assert Run(workdir).step == stopped == len(rows(workdir)) < 1000, said
    fields = {"train__steps": stopped + 4, "eval__every": 1000, "model__dropout": 0.2, "data__path": small().data.path}
    loop.train(small(**fields), tmp_path / "alone", conclude=False)
    loop.train(small(**fields), workdir, conclude=False)  # one process resumes
    assert_close(losses_of(workdir), losses_of(tmp_path / "alone"))


@pytest.mark.slow
def test_both_processes_reject_damage_that_one_finds(small, tmp_path):
    fields = SMALL | {"data.path": small().data.path, "mesh.data": 1, "mesh.fsdp": 2, "train.steps": 4}
    fields |= {"checkpoint.every": 2, "checkpoint.keep": 2, "model.dropout": 0.2}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    workdir = tmp_path / "run"
    command = ["train.py", "--config=configs/default.py", *arguments, f"--workdir={workdir}"]
    caches = [[f"--cache_dir={tmp_path}/cache{number}"] for number in range(2)]

    def train():
        both = start_two(command, caches)
        said = [process.communicate(timeout=100) for process in both]
        return said, [process.returncode for process in both]

    assert train()[1] == [0, 0]
    before = Run(workdir).model.parameters, rows(workdir)
    for part in (workdir / "checkpoints/4/parameters/ocdbt.process_1/d").iterdir():  # only process 1 reads it
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 4])
    said, statuses = train()
    assert statuses == [0, 0], said
    assert "is damaged (found by another process): moved to" in said[0][1] and "at step 2: resuming" in said[0][1]
    assert (workdir / "damaged/checkpoints-4/parameters").is_dir()
    again = Run(workdir).model.parameters, rows(workdir)
    assert again[1] == before[1]
    with run_directory.locked(workdir, new=False):
        said, statuses = train()
    # Process 0 is refused. Process 1 does not wait for it and ends with an error, its own or one of JAX.
    assert statuses[0] == 1 and statuses[1] != 0 and "another run trains in" in said[0][1], said
    for left, right in zip(*map(jax.tree.leaves, (again[0], before[0])), strict=True):
        np.testing.assert_array_equal(left, right)


def losses_of(workdir):
    return [{"loss": row["train/loss"]} for row in rows(workdir)]


@pytest.fixture
def joined(monkeypatch):
    """Record the arguments of jax.distributed.initialize instead of calling it."""
    calls = []
    monkeypatch.setattr(program, "waits_for_others", False)  # processes.start changes it; restored after the test
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: calls.append((arguments, options)))
    return calls


def test_a_process_0_that_does_not_answer_is_named(joined):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"^--coordinator: found '{address}'; process 0 does not answer"):
        processes.start(address, 4, 2, 0.3)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        processes.start(f"localhost:{port}", 2, 1, 1)
    assert [arguments for arguments, _ in joined] == [(f"localhost:{port}", 2, 1)]


@pytest.mark.parametrize(
    "job, message",
    [
        (("node1:1234", 2, None), "found only some; give all three, or none"),
        (("node1", 2, 0), "--coordinator: found 'node1'; must be HOST:PORT"),
        (("node1:" + "9" * 5000, 2, 0), "must be HOST:PORT"),
        (("node1:1", 0, 0), "--num_processes: found 0; must be at least 1"),
        (("node1:1", 2, 2), r"--process_id: found 2; must be in 0\.\.1"),
        (("localhost:1", 2, 1, math.nan), "--start_timeout: found nan; must be above 0"),
    ],
)
def test_invalid_flags_are_refused(joined, job, message):
    with pytest.raises(UserError, match=message):
        processes.start(*job)
    assert not joined


def test_the_job_is_that_of_slurm(joined, monkeypatch):
    assert [processes.start(*job) for job in ((None, None, None), (None, 1, None), ("localhost:1", 1, 0))] == [0, 0, 0]
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node[03-04],x", "NTASKS": "1", "PROCID": "9", "LOCALID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert processes.start(None, None, None) == 0 and not joined
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert processes.start(None, None, None) == 9 and joined[0][1]["cluster_detection_method"] == "slurm"
    assert processes.start(None, 1, None) == 0 and len(joined) == 1, "the flag overrides Slurm"

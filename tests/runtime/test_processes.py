"""Several processes on one machine: connection, errors about missing processes, and joint training."""

import base64
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from mini_gpt.insight import training_curves
from mini_gpt.runtime import processes, program
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training import workdir as workdirs
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY, SMALL
from tests.training import interruption
from tests.training.interruption import without_rates

ONE_DEVICE = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_two(command, extra=()):
    """Start the two processes of a job. `extra` holds additional arguments for each process."""
    job = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--start_timeout=60"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    calls = [[*command, *job, f"--process_id={number}", *(extra[number] if extra else ())] for number in range(2)]
    return [subprocess.Popen([sys.executable, *call], cwd=REPOSITORY, env=ONE_DEVICE, **pipes) for call in calls]


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
    paths = {"data.path": small().data.path, "data.cache_dir": str(tmp_path / "cache"), "data.tokenizer": "bpe"}
    paths |= {"data.vocab_size": 300, "eval.sample_tokens": 4}
    bpe = {name.replace(".", "__"): value for name, value in paths.items()}
    probe = training_curves.attention_metrics  # as train.py
    loop.train(small(train__steps=4, **bpe), one, probe=probe)
    (tmp_path / "apart").mkdir()  # an empty cache, so both processes prepare the data
    paths["data.cache_dir"] = str(tmp_path / "apart")

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
        both.append(subprocess.Popen(call, cwd=REPOSITORY, env=ONE_DEVICE, **pipes))
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
    fields = SMALL | {"data.path": small().data.path, "data.cache_dir": str(tmp_path / "cache"), "mesh.data": 1}
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
    caches = [[f"--config.data.cache_dir={tmp_path}/cache{number}"] for number in range(2)]

    def train():
        both = start_two(command, caches)
        said = [process.communicate(timeout=100) for process in both]
        return said, [process.returncode for process in both]

    assert train()[1] == [0, 0]
    before = Run(workdir).model.parameters, rows(workdir)
    for part in (workdir / "checkpoints/4/parameters/ocdbt.process_1/d").iterdir():  # only process 1 reads it
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 4])
    (store,) = (tmp_path / "cache1" / "tokens").glob("*/train.tokens")
    store.write_bytes(store.read_bytes()[::-1])
    said, statuses = train()
    assert statuses == [0, 0], said
    assert "is damaged (found by another process): moved to" in said[0][1] and "at step 2: resuming" in said[0][1]
    assert (workdir / "damaged/checkpoints-4/parameters").is_dir()
    again = Run(workdir).model.parameters, rows(workdir)
    assert again[1] == before[1]
    with workdirs.locked(workdir, new=False):
        said, statuses = train()
    # Process 0 is refused. Process 1 does not wait for it and ends with an error, its own or one of JAX.
    assert statuses[0] == 1 and statuses[1] != 0 and "another run trains in" in said[0][1], said
    for left, right in zip(*map(jax.tree.leaves, (again[0], before[0])), strict=True):
        np.testing.assert_array_equal(left, right)


def losses_of(workdir):
    return [{"loss": row["train/loss"]} for row in rows(workdir)]


def start_all(jobs, timeout):
    """Connect the processes of a job, as threads, and return {index: error message}."""
    raised = {}

    def connect(index, job):
        try:
            processes.start(*job, timeout)
        except UserError as error:
            raised[index] = str(error)

    threads = [threading.Thread(target=connect, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.fixture
def joined(monkeypatch):
    """Record the arguments of jax.distributed.initialize instead of calling it."""
    calls = []
    monkeypatch.setattr(program, "waits_for_others", False)  # processes.start changes it; restored after the test
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **_: calls.append(arguments))
    return calls


def test_processes_connect_before_jax_is_started(joined):
    address = f"localhost:{free_port()}"
    assert start_all([(address, 3, number) for number in (2, 0, 1)], timeout=20) == {}
    assert sorted(joined) == [(address, 3, number, None) for number in range(3)]


def test_missing_processes_are_named_by_the_others(joined):
    address = f"127.0.0.1:{free_port()}"
    raised = start_all([(address, 4, 0), (address, 4, 2)], timeout=1)
    expected = f"--coordinator={address}: process 1, 3 of 4 did not connect within 1 s; start every process, or"
    waits = "still waits for other processes"
    assert raised[0].startswith(expected) and (raised[1].startswith(expected) or waits in raised[1])
    absent = start_all([(address, 4, 2)], timeout=0.5)[0]
    assert absent.startswith(f"--coordinator: process 0 at {address} does not answer after 0.5 s (this is process 2 of")
    assert not joined


def test_other_clients_are_ignored_and_conflicts_refused(joined):
    port = free_port()
    first = threading.Thread(target=start_all, args=([(f"localhost:{port}", 2, 0)], 20))
    first.start()
    for _ in range(100):
        try:
            with socket.create_connection(("localhost", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        except OSError:
            first.join(0.05)
    assert start_all([(f"localhost:{port}", 2, 1)], 20) == {}
    first.join()
    assert len(joined) == 2
    address = f"localhost:{free_port()}"
    raised = start_all([(address, 3, 0), (address, 3, 1), (address, 3, 1)], timeout=5)
    assert set(raised) == {0, 1, 2} and set(raised.values()) == {
        "--process_id: found 1 twice; each process needs its own"
    }
    address = f"localhost:{free_port()}"
    raised = start_all([(address, 3, 0), (address, 2, 1)], timeout=5)
    assert set(raised.values()) == {"--num_processes: process 1 has 2, process 0 has 3"}


@pytest.mark.slow
def test_a_process_that_ends_before_the_start_is_named(joined):
    port, raised = free_port(), {}
    first = threading.Thread(target=lambda: raised.update(start_all([(f"localhost:{port}", 3, 0)], 20)))
    first.start()
    for _ in range(100):
        try:
            with socket.create_connection(("localhost", port)) as ended:
                ended.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset when it closes
                ended.sendall(b"1 3\n")
                time.sleep(0.2)
            break
        except OSError:
            first.join(0.05)
    start_all([(f"localhost:{port}", 3, 2)], 2)
    first.join()
    assert raised == {0: "--process_id: process 1 ended before the start; start all again"}


def test_a_port_that_is_taken_is_named(joined):
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=rf"--coordinator: process 0 can't listen on port {port} \(Address already"):
            processes.start(f"localhost:{port}", 2, 0, 1)


@pytest.mark.parametrize(
    "job, message",
    [
        (("node1:1234", 2, None), "found only some; give all three, or none"),
        ((None, 2, 0), "found only some"),
        (("node1", 2, 0), "--coordinator: found node1; must be HOST:PORT"),
        (("node1:x", 2, 0), "must be HOST:PORT"),
        (("node1:" + "9" * 5000, 2, 0), "must be HOST:PORT"),
        (("node1:1", 0, 0), "--num_processes: found 0; must be at least 1"),
        (("node1:1", 2, 2), r"--process_id: found 2; must be in 0\.\.1"),
    ],
)
def test_invalid_flags_are_refused(joined, job, message):
    with pytest.raises(UserError, match=message):
        processes.start(*job, 1)
    assert not joined


def test_a_single_process_does_not_start_jax_distributed(joined, monkeypatch):
    assert [processes.start(*job) for job in ((None, None, None), (None, 1, None), ("localhost:1", 1, 0))] == [0, 0, 0]
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert processes.start(None, None, None) == 0 and not joined


def test_slurm_sets_the_coordinator_and_the_process_id(joined, monkeypatch):
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node[03-04],x", "NTASKS": "16", "PROCID": "9", "LOCALID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(processes, "_report_to_first", lambda *_: None)
    assert processes.start(None, None, None) == 9
    ((address, *rest),) = joined
    assert re.fullmatch(r"node03:\d+", address) and rest == [16, 9, [1]]
    assert processes.start(None, 1, None) == 0 and len(joined) == 1, "the flag overrides Slurm"
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    processes.start(None, None, None)
    assert joined[1][-1] == [2, 3]
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,a")
    with pytest.raises(UserError, match=r"^JAX_LOCAL_DEVICE_IDS: found '2,a'; must be numbers such as 0,1$"):
        processes.start(None, None, None)


@pytest.mark.slow
def test_a_missing_host_ends_the_command_in_one_line(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "train.py", "--config=configs/tiny.py", f"--workdir={tmp_path}/run"]
    command += [f"--coordinator={address}", "--num_processes=2", "--process_id=0", "--start_timeout=1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and not (tmp_path / "run").exists()
    assert re.fullmatch(rf"error: --coordinator={address}: process 1 of 2 did not connect .*\n", done.stderr)


@pytest.mark.parametrize("timeout", [math.inf, -math.inf, math.nan, 1e10, 0.0, -1.0])
def test_an_impossible_start_timeout_is_refused(timeout):
    with pytest.raises(UserError, match=r"--start_timeout: found .*; must be above 0 and at most 86400 seconds"):
        processes.start("localhost:1", 2, 1, timeout)

"""Runs in a bucket: killed in an upload and resumed, and evaluated elsewhere."""

import gzip
import json
import signal
import subprocess
import sys

import pytest

from mini_gpt.runtime.buckets import Place
from tests.conftest import make_text
from tests.places.s3_server import CLOSE
from tests.training.interruption import without_rates

FIELDS = {
    "context_length": 32,
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.dtype": "float32",
    "model.dropout": 0.1,
    "data.corpus": "text",
    "data.tokenizer": "bytes",
    "train.batch_size": 8,
    "train.steps": 600,
    "optimizer.warmup_steps": 4,
    "eval.every": 50,
    "eval.tokens": 512,
    "checkpoint.every": 25,
}
TEXTS = "s3://bucket/texts/*.jsonl.gz"


def start(server, cache, *arguments, fields=(), **options):
    """Start a command on a machine with its own cache."""
    command = [sys.executable, *arguments, *(f"--config.{name}={value}" for name, value in dict(fields).items())]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=server.environment(cache), **streams, **options)


def finish(process, status=0):
    """Wait for a command; return what it printed."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == status, err
    assert "Traceback" not in err and "SECRET-KEY" not in out + err
    return out + err


def steps_of(place):
    """Return the steps of the checkpoints in the bucket that are whole."""
    return {int(name.removeprefix("complete/")[:-5]) for name in place.files("complete") if name.endswith(".json")}


def last_checksums(read, steps):
    """Return the checksums of all arrays of the last checkpoint."""
    return json.loads(read(f"checkpoints/{max(steps)}/format/metadata"))["checksums"]


def metrics(content):
    return [without_rates(json.loads(line)) for line in content.splitlines()]


@pytest.fixture
def texts(server):
    for number in range(4):
        lines = [json.dumps({"text": make_text(number * 40 + line, 60)}) for line in range(40)]
        Place("s3://bucket/texts").write(f"{number}.jsonl.gz", gzip.compress("\n".join(lines).encode()))
    return FIELDS | {"data.path": TEXTS}


@pytest.mark.slow
def test_a_run_that_is_killed_in_an_upload_resumes_to_the_same_bits_on_another_machine(server, texts, tmp_path):
    whole = tmp_path / "whole"
    finish(start(server, tmp_path / "a", "train.py", "--config=configs/tiny.py", f"--workdir={whole}", fields=texts))
    place = Place("s3://bucket/runs/killed")
    train = ("train.py", f"--workdir={place}")
    killed = start(server, tmp_path / "b", *train, "--config=configs/tiny.py", fields=texts)

    cut_off, begun = [], []

    def kill(method, path):
        is_second = any("/complete/" in path and ".json" in path for method, path in server.log if method == "PUT")
        if method == "PUT" and "/checkpoints/" in path and is_second and (begun.append(path) or len(begun) > 5):
            cut_off.append(int(path.split("/")[5]))
            killed.kill()
            return CLOSE
        return None

    server.fault = kill
    finish(killed, -signal.SIGKILL)
    server.fault = lambda method, path: None
    steps = steps_of(place)
    assert 0 < max(steps) < 600 and cut_off[0] not in steps
    said = finish(start(server, tmp_path / "c", *train, "--config.data.path", TEXTS))
    assert f"copied to {tmp_path}/c" in said and "process" not in said
    assert f"is at step {max(steps)}: resuming" in said
    steps = steps_of(place)
    expected = last_checksums(lambda name: (whole / name).read_bytes(), steps)
    assert max(steps) == 600 and last_checksums(place.read, steps) == expected
    assert metrics(place.read("metrics.jsonl")) == metrics((whole / "metrics.jsonl").read_bytes())
    assert {int(name.split("/")[1]) for name in place.files("checkpoints")} == steps  # nothing else is left
    finish(start(server, tmp_path / "d", "eval.py", f"--workdir={place}", "--config.data.path", TEXTS))
    results = [json.loads(place.read(name)) for name in place.files("eval")]
    assert len(results) == 2 and len({result["nll"] for result in results}) == 1  # at the end of training, and here
    assert all(b"SECRET-KEY" not in Place("s3://bucket").read(name) for name in Place("s3://bucket").files())


@pytest.mark.slow
def test_faults_of_the_start_are_one_line(server, tmp_path):
    evaluate = ("eval.py", "--workdir=s3://bucket/runs/none")
    assert finish(start(server, tmp_path, *evaluate), 1).count("\n") == 1
    server.fault = lambda method, path: 403
    for command in (evaluate, ("train.py", "--workdir=s3://bucket/runs/none", "--config=configs/tiny.py")):
        said = finish(start(server, tmp_path, *command), 1)
        assert said.splitlines()[-1].startswith("error: s3://bucket/runs/none: can't be read or written (")
        assert len([line for line in said.splitlines() if not line.startswith(("E1", "E0"))]) == 1

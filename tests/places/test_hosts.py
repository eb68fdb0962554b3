"""Processes without a common disk train in a bucket. Each has its own cache; only process 0 writes the run."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_gpt.runtime.buckets import Place
from tests.places.s3_server import no_fault
from tests.places.test_runs_in_buckets import TEXTS, finish, folders_by_step, last_checksums, metrics, start, texts
from tests.runtime.test_processes import free_port

__all__ = ["texts"]  # a fixture
CONFIG = "--config=configs/tiny.py"


@pytest.fixture(autouse=True)
def one_device_each(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")


def start_two(server, caches, *arguments, fields=(), then=()):
    """Start a job of two processes, each with its own cache. then: another command after the training."""
    job = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--start_timeout=60"]
    train = ["train.py", *arguments, *(f"--config.{name}={value}" for name, value in dict(fields).items())]
    both = []
    for rank, cache in enumerate(caches):
        cache.mkdir(exist_ok=True)
        commands = [[*command, *job, f"--process_id={rank}"] for command in (train, then) if command]
        (cache / f"{rank}.json").write_text(json.dumps(commands))
        both.append(start(server, cache, "-m", "tests.two_processes", str(cache / f"{rank}.json")))
    return both


def finish_both(both, status=0):
    """Wait for both processes at the same time; return what each logged."""
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda process: process.communicate(timeout=240), both))
    assert [process.returncode for process in both] == [status, status], said
    return [log for _, log in said]


@pytest.mark.slow
def test_two_hosts_that_are_killed_resume_to_the_bits_of_hosts_with_a_common_disk(server, texts, tmp_path):
    fields = texts | {"mesh.data": 1, "mesh.fsdp": 2, "train.steps": 40, "eval.every": 20, "eval.sample_tokens": 4}
    fields |= {"checkpoint.every": 10, "checkpoint.keep": 9}
    whole, place = tmp_path / "whole", Place("s3://bucket/runs/hosts")
    finish_both(start_two(server, [tmp_path / "a"] * 2, CONFIG, f"--workdir={whole}", fields=fields))
    both = start_two(server, [tmp_path / "b", tmp_path / "c"], CONFIG, f"--workdir={place}", fields=fields)

    def kill(method, path):
        if any("/complete/" in path for method, path in server.log[:-1] if method == "PUT"):  # one marker is written
            for process in both:
                process.kill()

    server.fault = kill
    finish_both(both, -signal.SIGKILL)
    server.fault = no_fault
    assert list(folders_by_step(place, tmp_path)) == [10]
    run = (f"--workdir={place}", "--config.data.path", TEXTS)
    said = finish_both(start_two(server, [tmp_path / "d", tmp_path / "e"], *run, then=["eval.py", *run]))
    assert "is at step 10: resuming" in said[0] and said[1].count("\n") == said[1].count("[Gloo]")
    assert not list((tmp_path / "e" / "mini_gpt" / "buckets").glob("*/train"))  # process 1 has no copy
    steps = folders_by_step(place, tmp_path)
    expected = last_checksums(lambda name: (whole / name).read_bytes(), {step: step for step in steps})
    assert list(steps) == [10, 20, 30, 40] and last_checksums(place.read, steps) == expected
    assert metrics(place.read("metrics.jsonl")) == metrics((whole / "metrics.jsonl").read_bytes())
    written = [name for name in place.files("eval") if name != "eval/perplexity.json"]  # which the training wrote
    assert len(written) == 1
    losses = [json.loads(place.read(name))["nll"] for name in ("eval/perplexity.json", *written)]
    place.delete(*written)
    finish(start(server, tmp_path / "f", "eval.py", *run))
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(json.loads(place.read(*written))["nll"])


@pytest.mark.slow
def test_an_error_of_one_host_ends_both_with_one_line(server, texts, tmp_path):
    caches, place = [tmp_path / "a", tmp_path / "b"], Place("s3://bucket/runs/denied")
    server.fault = lambda method, path: 403 if "lease" in path else None  # only process 0 asks for it
    for said in finish_both(start_two(server, caches, CONFIG, f"--workdir={place}", fields=texts), 1):
        lines = [line for line in said.splitlines() if not line.startswith(("[Gloo]", "E1", "E0"))]
        assert len(lines) == 1 and lines[0].startswith(f"error: {place}: access denied (403); check AWS_")


@pytest.mark.slow
def test_a_signal_to_one_host_stops_both_after_the_last_step_is_copied(server, texts, tmp_path):
    place = Place("s3://bucket/runs/stopped")
    fields = texts | {"mesh.data": 2, "train.steps": 1_000_000, "eval.every": 1_000_000}
    both = start_two(server, [tmp_path / "a", tmp_path / "b"], CONFIG, f"--workdir={place}", fields=fields)
    until = time.monotonic() + 120
    while not place.files("complete") and time.monotonic() < until:
        time.sleep(0.5)
    both[1].send_signal(signal.SIGTERM)
    said = finish_both(both, 128 + signal.SIGTERM)
    saved = int(said[0].partition("stopped and saved at step ")[2].partition(";")[0])
    assert max(folders_by_step(place, tmp_path)) == saved
    assert json.loads(place.read("lease"))["state"] == "released"

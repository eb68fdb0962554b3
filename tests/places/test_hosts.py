"""Processes without a common disk train in a bucket. Each has its own cache; only process 0 writes the run."""

import json
import signal
import threading

import pytest

from mini_gpt.runtime.buckets import Place
from tests.places.test_runs_in_buckets import TEXTS, finish, folders_by_step, last_checksums, metrics, start, texts
from tests.runtime.test_processes import free_port

__all__ = ["texts"]  # a fixture


@pytest.fixture(autouse=True)
def two_devices_each(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0")


def start_two(server, caches, *arguments, fields=()):
    """Start a job of two processes, each with its own cache."""
    job = ["train.py", *arguments, f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--start_timeout=60"]
    return [start(server, cache, *job, f"--process_id={rank}", fields=fields) for rank, cache in enumerate(caches)]


def finish_all(both, status=0):
    """Wait for all processes at the same time; return what each printed."""
    said = {}
    waiting = [
        threading.Thread(target=lambda n=n, p=p: said.update({n: p.communicate(timeout=240)}))
        for n, p in enumerate(both)
    ]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert [process.returncode for process in both] == [status] * len(both), said
    return ["".join(said[number]) for number in range(len(both))]


@pytest.mark.slow
def test_two_hosts_that_are_killed_resume_to_the_bits_of_hosts_with_a_common_disk(server, texts, tmp_path):
    fields = texts | {"train.steps": 200, "mesh.fsdp": 2, "checkpoint.every": 20}
    config = "--config=configs/tiny.py"
    whole, place = tmp_path / "whole", Place("s3://bucket/runs/hosts")
    finish_all(start_two(server, [tmp_path / "a"] * 2, config, f"--workdir={whole}", fields=fields))
    both = start_two(server, [tmp_path / "b", tmp_path / "c"], config, f"--workdir={place}", fields=fields)

    def kill(method, path):
        if method == "PUT" and "/complete/" in path and len(folders_by_step(place, tmp_path / "reader")) > 0:
            for process in both:
                process.kill()
        return None

    server.fault = kill
    finish_all(both, -signal.SIGKILL)
    server.fault = lambda method, path: None
    saved = max(folders_by_step(place, tmp_path))
    assert 0 < saved < 200
    caches = [tmp_path / "d", tmp_path / "e"]
    said = finish_all(start_two(server, caches, f"--workdir={place}", "--config.data.path", TEXTS))
    print(said)
    steps = folders_by_step(place, tmp_path)
    expected = last_checksums(lambda name: (whole / name).read_bytes(), {step: step for step in steps})
    assert max(steps) == 200 and last_checksums(place.read, steps) == expected
    assert metrics(place.read("metrics.jsonl")) == metrics((whole / "metrics.jsonl").read_bytes())
    finish(start(server, tmp_path / "f", "eval.py", f"--workdir={place}", "--config.data.path", TEXTS))
    results = [json.loads(place.read(name)) for name in place.files("eval")]
    assert len({result["nll"] for result in results}) == 1

"""The cores, accelerators and memory that the runs of a study share."""

import json
import os
from types import SimpleNamespace

import pytest

from mini_gpt.runtime import errors
from mini_gpt.study import machine
from mini_gpt.study.local import Local
from tests.study.conftest import sweep


@pytest.mark.slow
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


def test_runs_of_other_processes_have_other_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.devices, "cores", lambda: [2, 3, 5])
    monkeypatch.setattr(machine.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    with machine.own_cores(1) as one, machine.own_cores(2) as two, machine.own_cores(2) as more:
        assert [one.cores, two.cores, more.cores] == [[2], [3, 5], [2, 3]]  # too many runs share cores
        assert two.environment["OMP_NUM_THREADS"] == "2"
    (tmp_path / "cpu.max").write_text("200000 100000")
    with machine.own_cores(1) as slot:
        assert slot.cores is None  # other containers may use the same cores


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


@pytest.mark.slow
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


def test_too_many_jobs_are_refused(monkeypatch, flags, fake, tmp_path):
    for jobs in (0, 10_000):
        assert sweep(monkeypatch, flags, "64", f"--jobs={jobs}").startswith(
            f"error: --jobs: found {jobs}; must be in 1.."
        )
    assert not (tmp_path / "sweep").exists()


def test_the_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.memory_left() > 5000, "without the used bytes, the limit says nothing"
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1500\ninactive_file 1100\nactive_file 400\n")
    assert machine.memory_left() == 5000 - 3000 + 1100
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_left() > 5000


def test_runs_start_while_there_is_memory(monkeypatch):
    """One run always starts. Until a run was measured, each is expected to grow to 1 GiB, with a fifth to spare."""
    engine, small = Local(None, []), SimpleNamespace(resident=0)
    monkeypatch.setattr(machine, "memory_left", lambda: 2**20)
    assert engine._has_memory([]) and not engine._has_memory([small])
    monkeypatch.setattr(machine, "memory_left", lambda: 3 * 2**30)
    assert engine._has_memory([small]) and not engine._has_memory([small, small])
    engine.is_measured, engine.largest = True, 2**28
    assert engine._has_memory([small] * 10) and not engine._has_memory([small] * 11)

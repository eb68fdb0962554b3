"""Full and read-only disks and missing permissions, on a small file system of their own."""

import contextlib
import os
import shutil
import subprocess

import pytest

from mini_gpt.training.run import Run
from tests.faults import kills
from tests.faults.kills import Marks, Trainer


@pytest.fixture
def disk(tmp_path):
    """Mounts 48 MB of memory as a disk; gives its path."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small file system here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path, leave):
    """Fills the disk up to so many bytes."""
    with (path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    left = os.statvfs(path)
    os.truncate(path / "filler", max(0, (path / "filler").stat().st_size - leave + left.f_bavail * left.f_frsize))


def start_and_fill(trainer, disk, phase, times, leave):
    """Fills the disk once a run has come so often into a phase; gives its exit status and what it said."""
    process, pipe = trainer.start()
    marks = Marks(pipe)
    while marks.entered[phase] < times:
        assert marks.read(None), process.communicate()[0]
    fill(disk, leave)
    said = process.communicate(timeout=120)[0]
    os.close(pipe)
    return process.returncode, said


@pytest.mark.slow
def test_a_disk_that_fills_up_while_a_run_trains(tmp_path, disk):
    twin, starved = Trainer(tmp_path, "twin"), Trainer(tmp_path, "disk/starved", cache="starved-cache")
    kills.run_to_the_end(twin)
    lost = 0
    for leave in (0, 20_000, 60_000):  # nothing fits; rows do, not a checkpoint; part of one does
        status, said = start_and_fill(starved, disk, "save", 3, leave)  # the first is whole when the third begins
        assert status == 1 and "Traceback" not in said, said
        last = said.strip().splitlines()[-1]
        assert last.startswith(f"error: {starved.workdir}") and "can't be written (No space left on device)" in last
        (disk / "filler").unlink()
        step = Run(starved.workdir).step
        assert step > lost, said
        lost = step
    kills.run_to_the_end(starved)
    kills.compare(twin.workdir, starved.workdir)


@pytest.mark.slow
def test_a_disk_that_is_full_before_a_run_or_its_data(tmp_path, disk):
    trainer = Trainer(tmp_path, "run", cache="disk/cache")
    fill(disk, 4096)
    said = kills.run_to_the_end(trainer, status=1)
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"error: {disk}/cache") and "No space left on device" in last and "Traceback" not in said
    assert not list(disk.rglob("*.draft"))
    (disk / "filler").unlink()
    kills.run_to_the_end(trainer)


@pytest.mark.slow
def test_a_read_only_disk(tmp_path, disk):
    trainer = Trainer(tmp_path, "disk/run", cache="cache")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    said = kills.run_to_the_end(trainer, status=1)
    assert said.strip().splitlines()[-1].startswith(f"error: {disk}/run")
    assert "Read-only file system" in said and "Traceback" not in said
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    kills.run_to_the_end(trainer)


@pytest.mark.slow
def test_a_missing_permission(tmp_path):
    trainer = Trainer(tmp_path, "run", cache="cache")
    if os.getuid() == 0:  # who may write everywhere, but for this
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and there is no setpriv to take that away")
        trainer.before = ["setpriv", "--bounding-set=-dac_override"]
    trainer.workdir.mkdir(mode=0o555)
    said = kills.run_to_the_end(trainer, status=1)
    assert (
        said.strip().splitlines()[-1] == f"error: {trainer.workdir}/lock: Permission denied" and "Traceback" not in said
    )
    trainer.workdir.chmod(0o755)
    kills.run_to_the_end(trainer)

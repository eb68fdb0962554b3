"""A full or read-only disk, a missing permission or a lost directory ends a run in one error line."""

import contextlib
import os
import re
import shutil
import subprocess

import pytest

from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.faults import kills
from tests.faults.kills import Marks, Trainer


@pytest.fixture
def disk(tmp_path):
    """Mount a tmpfs of 48 MB; yield its path."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path, leave):
    """Fill the disk until only `leave` bytes are free."""
    with (path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    left = os.statvfs(path)
    os.truncate(path / "filler", max(0, (path / "filler").stat().st_size - leave + left.f_bavail * left.f_frsize))


def start_and_fill(trainer, disk, phase, times, leave):
    """Fill the disk when a run enters a phase for the `times`th time; return its exit status and output."""
    process, pipe = trainer.start()
    marks = Marks(pipe)
    while marks.entered[phase] < times:
        assert marks.read(None), trainer.output(process)
    fill(disk, leave)
    output = trainer.output(process, 120)
    os.close(pipe)
    return process.returncode, output


@pytest.mark.slow
def test_a_removed_run_directory_ends_the_run_in_one_line(tmp_path):
    trainer = Trainer(tmp_path, "removed")
    process, pipe = trainer.start()
    marks = Marks(pipe)
    while marks.entered["save"] < 2:
        assert marks.read(None), trainer.output(process)
    shutil.rmtree(trainer.workdir.rename(tmp_path / "trash"), ignore_errors=True)  # at once, not file by file
    output = trainer.output(process, 120)
    os.close(pipe)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert output.splitlines()[-1].startswith(f"error: {trainer.workdir}: was moved or removed while it trained")


@pytest.mark.slow
def test_a_run_resumes_after_the_disk_was_full(tmp_path, disk):
    reference, starved = Trainer(tmp_path, "reference"), Trainer(tmp_path, "disk/starved", cache="starved-cache")
    kills.run_to_the_end(reference)
    previous = 0
    for leave in (0, 20_000, 60_000):  # room for: nothing; rows of metrics; part of a checkpoint
        status, output = start_and_fill(starved, disk, "save", 3, leave)  # the first save is complete by then
        assert status == 1 and "Traceback" not in output, output
        (error,) = (line for line in output.splitlines() if line.startswith("error: "))
        assert str(starved.workdir) in error and "can't be written (No space left on device)" in error, output
        (disk / "filler").unlink()
        step = Run(starved.workdir).step
        assert step > previous, output
        previous = step
    kills.run_to_the_end(starved)
    kills.compare(reference.workdir, starved.workdir)


@pytest.mark.slow
def test_a_full_token_cache_ends_in_one_line(tmp_path, disk):
    trainer = Trainer(tmp_path, "run", cache="disk/cache")
    fill(disk, 4096)
    output = kills.run_to_the_end(trainer, status=1)
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"error: {disk}/cache") and "No space left on device" in last and "Traceback" not in output
    assert not list(disk.rglob("*.draft"))
    (disk / "filler").unlink()
    kills.run_to_the_end(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("suite, shown", [("perplexity", "nll"), ("extrapolation", "blocks"), ("figures", "split")])
def test_a_measured_result_is_printed_if_the_disk_is_full(trained, disk, monkeypatch, capsys, suite, shown):
    run, flags = shutil.copytree(trained(train__steps=4), disk / "run"), ["--lengths=1x"] * (suite == "extrapolation")
    evaluate = lambda: type_in(monkeypatch, "eval.py", f"--workdir={run}", f"--suite={suite}", *flags)
    errors = []
    for leave in (0, 60_000, 300_000):
        fill(disk, leave)
        errors.append(evaluate())
        printed = capsys.readouterr().out
        assert shown in printed and not list(disk.rglob("*.draft"))
        assert ("Written to" in printed) == (errors[-1] is None) == (run / "eval" / f"{suite}.json").exists()
        (disk / "filler").unlink()
        if errors[-1] is None:
            break
        assert re.match(rf"error: {run}/(eval|tensorboard)\S*: .*No space left on device", errors[-1]), errors
    assert errors[0] is not None
    assert evaluate() is None


@pytest.mark.slow
def test_a_report_ends_in_one_line_if_the_disk_is_full(trained, corpus_files, disk, monkeypatch):
    run = shutil.copytree(trained(train__steps=4), disk / "sweep" / "rope,seed=0")
    assert type_in(monkeypatch, "eval.py", f"--workdir={run}") is None
    fields = SMALL | {"data.path": corpus_files, "train.steps": 4}
    flags = ["--config=configs/default.py", *(f"--config.{name}={value}" for name, value in fields.items())]
    study = ["mini_gpt.commands.study", "report", *flags, "--vary=model.position=rope", f"--workdir={disk}/sweep"]
    fill(disk, 0)
    said = type_in(monkeypatch, *study)
    assert re.match(rf"error: {disk}/sweep\S*: .*No space left on device", said), said
    assert not list(disk.rglob("*.draft"))
    (disk / "filler").unlink()
    assert type_in(monkeypatch, *study) is None


@pytest.mark.slow
def test_a_read_only_disk_ends_in_one_line(tmp_path, disk):
    trainer = Trainer(tmp_path, "disk/run", cache="cache")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    output = kills.run_to_the_end(trainer, status=1)
    assert output.strip().splitlines()[-1].startswith(f"error: {disk}/run")
    assert "Read-only file system" in output and "Traceback" not in output
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    kills.run_to_the_end(trainer)


@pytest.mark.slow
def test_a_missing_permission_ends_in_one_line(tmp_path):
    trainer = Trainer(tmp_path, "run", cache="cache")
    if os.getuid() == 0:  # root may write everywhere unless setpriv removes that right
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and setpriv is not installed")
        trainer.before = ["setpriv", "--bounding-set=-dac_override"]
    trainer.workdir.mkdir(mode=0o555)
    text = kills.run_to_the_end(trainer, status=1)
    assert (
        text.strip().splitlines()[-1] == f"error: {trainer.workdir}/lock: Permission denied" and "Traceback" not in text
    )
    trainer.workdir.chmod(0o755)
    kills.run_to_the_end(trainer)

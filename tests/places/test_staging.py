"""The copies of runs in buckets: which is newer, what is sent and deleted, and what a reader has."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import threading

import pytest

from mini_gpt.commands import staging
from mini_gpt.commands.staging import Staged
from mini_gpt.runtime import buckets, files, lease
from mini_gpt.runtime.buckets import BucketError, Place
from mini_gpt.runtime.errors import UserError
from tests.commands.test_command_line import type_in
from tests.conftest import slow


def make_run(folder, identity, steps, mark=""):
    """Write what staging reads of a run directory."""
    for name in ("config.json", "eval/result.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {mark}")
    files.write_json(folder / "run.json", {"identity": identity})
    for step in steps:
        record = folder / "checkpoints" / str(step) / "format" / "metadata"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"step {step} of {identity} {mark}")
        (record.parents[1] / "arrays").write_text(f"arrays of {step} {mark}")


def staged_on(machine, tmp_path, purpose="train"):
    return Staged(Place(f"file://{tmp_path}/bucket/run"), purpose, str(tmp_path / machine))


def raises(error):
    raise error


def test_the_newest_of_copy_and_bucket_is_trained_on(tmp_path):
    first = staged_on("a", tmp_path)
    make_run(first.local, "one", [1, 2])
    first.copy()
    second = staged_on("b", tmp_path)
    second.fetch_to_train()
    assert list(second.local_steps()) == [1, 2] and second.local_steps() == first.local_steps()
    make_run(second.local, "one", [3], "second")
    (second.local / "checkpoints/1/format/metadata").unlink()  # as if training had deleted it
    second.copy()
    assert list(second.read_markers()) == [2, 3]
    assert not any(name.startswith("checkpoints/1/") for name in second.place.files())
    again = staged_on("a", tmp_path)
    again.fetch_to_train()
    assert list(again.local_steps()) == [2, 3] and (again.local / "config.json").read_text() == "config.json second"
    make_run(again.local, "one", [4])  # copied by nobody
    again.place.write("eval/result.json", b"newer, from elsewhere")
    os.utime(again.local / "eval/result.json", (0, 0))
    third = staged_on("a", tmp_path)
    third.fetch_to_train()
    assert list(third.local_steps()) == [2, 3, 4]
    third.copy()
    assert third.place.read("eval/result.json") == b"newer, from elsewhere" and list(third.read_markers()) == [2, 3, 4]
    other = staged_on("c", tmp_path)
    make_run(other.local, "two", [9])
    with pytest.raises(UserError, match="holds another run than its copy"):
        other.fetch_to_train()


def test_a_reader_has_the_checkpoint_that_it_asks_for_and_drops_old_ones(tmp_path):
    trainer = staged_on("a", tmp_path)
    make_run(trainer.local, "one", [1, 2])
    trainer.copy()
    reader = staged_on("b", tmp_path, "read")
    for choice, steps in (("last", [2]), ("1", [1, 2]), ("best", [1, 2])):
        reader.fetch_to_read(choice)
        assert list(reader.local_steps()) == steps
    make_run(trainer.local, "one", [2], "other")  # written again after a rewind
    trainer.copy()
    reader.fetch_to_read("last")
    assert (reader.local / "checkpoints/2/arrays").read_text() == "arrays of 2 other"
    with pytest.raises(UserError, match=r"--checkpoint: found '7'; must be last, best or one of 1, 2"):
        reader.fetch_to_read("7")
    trainer.place.delete(f"checkpoints/{trainer.markers[1]['folder']}/arrays")
    with pytest.raises(staging.Vanished, match="step 1 lacks arrays"):
        staged_on("c", tmp_path, "read").fetch_to_read("1")


def test_a_checkpoint_that_is_not_whole_or_after_a_lost_lease_has_no_marker(tmp_path, monkeypatch):
    trainer = staged_on("a", tmp_path)
    make_run(trainer.local, "one", [1])
    ended = threading.Thread()
    ended.start()
    monkeypatch.setattr(buckets, "ATTEMPTS", 1)
    upload = Place.upload

    def fail(self, path, name):
        if name.endswith("metadata"):
            raise BucketError("no network")
        return upload(self, path, name)

    monkeypatch.setattr(Place, "upload", fail)
    with pytest.raises(UserError, match="no network; the last changes are not copied; nothing is lost"):
        trainer.finish(ended)
    monkeypatch.setattr(Place, "upload", upload)
    trainer.lease.store, trainer.lease.lost = object(), True
    monkeypatch.setattr(staging.os, "kill", lambda *sent: signals.append(sent[1]))
    monkeypatch.setattr(staging, "EVERY", 0)
    signals = []
    trainer.stopped.clear()
    failures = [OSError("disk error")]
    monkeypatch.setattr(trainer, "copy", lambda: Staged.copy(trainer) if not failures else raises(failures.pop()))
    trainer.keep_copying()
    assert signals == [signal.SIGTERM] and trainer.read_markers() == {}


@pytest.mark.parametrize("event", ["another run takes the lease", "training deletes the checkpoint", "nothing"])
def test_a_marker_is_written_only_with_the_lease_and_for_a_whole_checkpoint(tmp_path, monkeypatch, event):
    trainer = staged_on("a", tmp_path)
    make_run(trainer.local, "one", [1])
    trainer.lease.acquire()
    upload = Place.upload

    def meanwhile(self, path, name):
        if name.endswith("metadata") and event == "another run takes the lease":
            self.write("lease", b"{}")
        if name.endswith("metadata") and event == "training deletes the checkpoint":
            (trainer.local / "checkpoints/1/arrays").unlink()
        return upload(self, path, name)

    monkeypatch.setattr(Place, "upload", meanwhile)
    with pytest.raises(lease.Lost) if "lease" in event else contextlib.nullcontext():
        trainer.copy()
    trainer.lease.release()
    assert list(trainer.read_markers()) == ([1] if event == "nothing" else [])


@pytest.mark.parametrize("is_import", [False, True])
def test_a_run_that_another_program_put_there_is_refused_and_kept(tmp_path, is_import):
    trainer = staged_on("a", tmp_path)
    there = tmp_path / "bucket" / "run"
    make_run(there, "one", [0 if is_import else 1])
    if not is_import:
        (there / "metrics.jsonl").touch()
    (there / "complete").mkdir()
    (there / "complete" / "3.json").write_text('{"step": 3}')  # not a marker
    before = trainer.place.files()
    with pytest.raises(UserError, match=r"bucket/run: has checkpoints, but no complete/STEP\.json; copy it to a local"):
        trainer.fetch_to_train()
    assert trainer.place.files() == before


@pytest.mark.parametrize("lost", ["", "checkpoints"])
def test_a_copy_that_is_deleted_while_it_trains_deletes_nothing_in_the_bucket(tmp_path, lost):
    trainer = staged_on("a", tmp_path)
    make_run(trainer.local, "one", [1])
    trainer.copy()
    before = trainer.place.files()
    shutil.rmtree(trainer.local / lost)
    with contextlib.nullcontext() if lost else pytest.raises(UserError, match="was moved or removed while it trained"):
        trainer.copy()
    assert trainer.place.files() == before and list(trainer.markers) == [1]


@pytest.mark.parametrize("noticed", [False, True])
def test_a_run_that_lost_the_lease_changes_no_checkpoint_of_the_next_one(tmp_path, monkeypatch, noticed):
    stale, later = staged_on("a", tmp_path), staged_on("b", tmp_path)
    make_run(stale.local, "one", [1], "stale")
    make_run(later.local, "one", [1], "later")
    later.copy()
    begun, sent, upload = [], [], Place.upload

    def noted(self, path, name):
        begun.append(name)
        size = upload(self, path, name)
        sent.append(name)
        return size

    def check(*, now=False):
        last = "arrays" if noticed else "metadata"  # the first file of the checkpoint, or the last
        if now != noticed and any(last in name for name in begun):
            raise lease.Lost("lost")

    monkeypatch.setattr(Place, "upload", noted)
    monkeypatch.setattr(stale.lease, "check", check)
    with pytest.raises(lease.Lost):
        stale.copy()
    assert any("metadata" in name for name in sent) != noticed
    reader = staged_on("c", tmp_path, "read")
    reader.fetch_to_read("last")
    assert (reader.local / "checkpoints/1/arrays").read_text() == "arrays of 1 later"
    again = staged_on("b", tmp_path)
    again.fetch_to_train()
    assert {name.split("/")[1] for name in again.place.files("checkpoints")} == {again.markers[1]["folder"]}


@pytest.mark.parametrize(("scheme", "begun"), [("file", False), ("file", True), *slow(("s3", False), ("s3", True))])
def test_a_run_whose_lease_was_taken_over_writes_no_file_of_the_next_one(request, tmp_path, monkeypatch, scheme, begun):
    """Its last renewal is not old by its own clock, as after a pause. Or its upload had begun, and is tried again."""
    monkeypatch.setattr(lease, "LIFETIME", 0.1)
    monkeypatch.setattr(lease, "LOOKED", 0.02)
    monkeypatch.setattr(buckets, "FIRST_WAIT", 0)
    address, write, tries = f"file://{tmp_path}/bucket/run", Place._write, []
    if scheme == "s3":
        request.getfixturevalue("server")
        address = f"s3://bucket/{tmp_path.name}"
    old, new = (Staged(Place(address), "train", str(tmp_path / machine)) for machine in ("a", "b"))
    make_run(old.local, "one", [1])
    old.lease.thread = threading.Thread()  # no renewals
    old.lease.acquire()
    old.copy()

    def take_over():
        new.lease.acquire()
        new.fetch_to_train()
        make_run(new.local, "one", [2])
        (new.local / "metrics.jsonl").write_text("of the new run\n")
        new.copy()

    def cut_off(self, name, blocks):
        if self is old.place and name == "metrics.jsonl" and not tries:
            tries.append(name)
            take_over()
            old.lease.confirmed -= lease.RENEWED
            raise OSError("cut off")
        return write(self, name, blocks)

    if begun:
        monkeypatch.setattr(Place, "_write", cut_off)
    else:
        take_over()
    (old.local / "metrics.jsonl").write_text("of the old run\n")
    with pytest.raises(lease.Lost, match="another run has started to train here"):
        old.copy()
    assert new.place.read("metrics.jsonl") == b"of the new run\n" and len(tries) == begun
    new.lease.release()


def test_ctrl_c_while_the_last_upload_runs_keeps_the_lease(tmp_path, monkeypatch):
    """Otherwise another run could start while this one writes."""
    place, uploads, goes_on = Place(f"file://{tmp_path}/bucket/run"), threading.Event(), threading.Event()
    monkeypatch.setattr(staging, "EVERY", 0)
    monkeypatch.setattr(staging.command_line, "set_up", lambda *_: None)
    monkeypatch.setattr(Place, "upload", lambda *_: uploads.set() or goes_on.wait(60))
    join = threading.Thread.join
    with pytest.raises(KeyboardInterrupt), staging.training(place, argparse.Namespace(), str(tmp_path / "a")) as local:
        make_run(local, "one", [1])
        assert uploads.wait(60)

        def interrupt(thread):
            monkeypatch.setattr(threading.Thread, "join", join)
            raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "join", interrupt)
    assert json.loads(place.read("lease"))["state"] == "held"
    goes_on.set()


def test_a_reader_copies_files_that_change_or_vanish_after_they_are_listed(tmp_path, monkeypatch):
    trainer = staged_on("a", tmp_path)
    make_run(trainer.local, "one", [1])
    (trainer.local / "metrics.jsonl").write_text("1\n")
    for _ in range(2):  # metrics need a checkpoint
        trainer.copy()
    listed = Place.files

    def then_training_goes_on(self, *arguments, **options):
        found = listed(self, *arguments, **options)
        if not arguments:
            self.write("metrics.jsonl", b"1\n2\n")
            self.delete("eval/result.json")
        return found

    monkeypatch.setattr(Place, "files", then_training_goes_on)
    monkeypatch.setattr(buckets, "FIRST_WAIT", 0)
    reader = staged_on("b", tmp_path, "read")
    reader.fetch_to_read("last")
    assert (reader.local / "metrics.jsonl").read_text() == "1\n2\n" and list(reader.local_steps()) == [1]


def test_a_reader_sends_a_result_whose_upload_failed_and_keeps_nothing_of_another_run(tmp_path, monkeypatch):
    trainer = staged_on("a", tmp_path)
    make_run(trainer.local, "one", [1])
    trainer.copy()
    reading = lambda: staging.reading(trainer.place, cache_dir=str(tmp_path / "b"))
    with monkeypatch.context() as patch, pytest.raises(BucketError), reading() as workdir:
        (workdir / "eval/result.json").write_text("new")
        (workdir / "eval/other.json").write_text("other")
        patch.setattr(Place, "upload", lambda *_: raises(BucketError("no network")))
    with reading() as workdir:
        assert (workdir / "eval/result.json").read_text() == "new"
    assert trainer.place.read("eval/result.json") == b"new" and trainer.place.read("eval/other.json") == b"other"
    trainer.place.write("eval/result.json", b"newer, from elsewhere")
    with reading() as workdir:
        assert (workdir / "eval/result.json").read_text() == "newer, from elsewhere"
    assert trainer.place.read("eval/result.json") == b"newer, from elsewhere"
    shutil.rmtree(tmp_path / "bucket")
    second = staged_on("c", tmp_path)
    make_run(second.local, "two", [1])
    second.copy()
    with reading() as workdir:
        assert not (workdir / "eval/other.json").exists()
    assert "eval/other.json" not in second.place.files()


def test_an_import_is_refused_where_a_run_is_and_brings_no_deleted_run_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = staged_on("mini_gpt", tmp_path)
    make_run(first.local, "one", [1])
    first.copy()
    again = ("import", "--input=nowhere", f"--workdir={first.place}")
    said = type_in(monkeypatch, "mini_gpt.commands.hugging_face", *again)
    assert said == f"error: --workdir: {first.place} holds a run already; name a new folder"
    shutil.rmtree(tmp_path / "bucket")
    with staging.training(first.place, argparse.Namespace(), None, new=True) as local:
        assert local == first.local and not local.exists()


def test_a_lease_that_is_lost_before_the_last_copy_is_an_error(tmp_path, monkeypatch):
    trainer, ended = staged_on("a", tmp_path), threading.Thread()
    ended.start()
    make_run(trainer.local, "one", [1])
    trainer.lease.lost = True
    monkeypatch.setattr(trainer.lease, "check", lambda *, now=False: raises(lease.Lost("another run trains here")))
    with pytest.raises(UserError, match=r"^another run trains here; the last changes are not copied$"):
        trainer.finish(ended)

"""The copies of runs in buckets: which is newer, what is sent and deleted, and what a reader has."""

import argparse
import shutil

import pytest

from mini_gpt.commands import staging
from mini_gpt.commands.mirror import BEGUN, Mirror
from mini_gpt.runtime import files
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError


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


def mirror_on(machine, tmp_path, purpose="train"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINI_GPT_CACHE", str(tmp_path / machine))
        return Mirror(Place(f"file://{tmp_path}/bucket/run"), purpose)


def trainer_with(steps, tmp_path):
    """Return the copy of a run that was copied to the bucket."""
    trainer = mirror_on("a", tmp_path)
    make_run(trainer.local, "one", steps)
    trainer.place.write(BEGUN, b"")
    trainer.copy()
    return trainer


def test_the_newest_of_copy_and_bucket_is_trained_on(tmp_path):
    first, second = trainer_with([1, 2], tmp_path), mirror_on("b", tmp_path)
    second.fetch_to_train()
    assert [*second.local_steps()] == [1, 2] and second.local_steps() == first.local_steps()
    make_run(second.local, "one", [3], "second")
    (second.local / "checkpoints/1/format/metadata").unlink()  # as if training had deleted it
    second.copy()
    assert not any(name.startswith("checkpoints/1/") for name in second.place.files())
    again = mirror_on("a", tmp_path)
    again.fetch_to_train()
    assert [*again.local_steps()] == [*again.markers] == [2, 3]
    assert (again.local / "config.json").read_text() == "config.json second"
    make_run(again.local, "one", [4])  # copied by nobody
    third = mirror_on("a", tmp_path)
    third.fetch_to_train()
    assert [*third.local_steps()] == [2, 3, 4]
    other = mirror_on("c", tmp_path)
    make_run(other.local, "two", [9])
    with pytest.raises(UserError, match="holds another run than its copy"):
        other.fetch_to_train()


def test_a_reader_has_the_checkpoint_that_it_asks_for_and_sends_its_results(tmp_path, monkeypatch):
    trainer, reader = trainer_with([1, 2], tmp_path), mirror_on("b", tmp_path, "read")
    for choice, steps in (("last", [2]), ("1", [1]), ("best", [1, 2])):
        reader.fetch_to_read(choice)
        assert [*reader.local_steps()] == steps
    make_run(trainer.local, "one", [2], "other")  # written again after a rewind
    trainer.copy()
    with pytest.raises(UserError, match=r"--checkpoint: found '7'; must be last, best or one of 1, 2"):
        reader.fetch_to_read("7")
    with staging.reading(reader.place) as local:
        assert (local / "checkpoints/2/arrays").read_text() == "arrays of 2 other"
        (local / "eval" / "new.json").write_text("new")
        (local / "config.json").write_text("changed by nobody")
    assert trainer.place.read("eval/new.json") == b"new" and trainer.place.read("config.json") == b"config.json other"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="bucket/run: changed while it was copied"):
        patch.setattr(Place, "download", lambda self, name, _: trainer.place.read("missing"))
        reader.fetch_to_read("1")


def test_a_checkpoint_that_is_not_whole_has_no_marker_and_is_copied_at_the_end(tmp_path, monkeypatch):
    trainer = trainer_with([], tmp_path)
    monkeypatch.setenv("MINI_GPT_CACHE", str(tmp_path / "a"))
    make_run(trainer.local, "one", [1])
    upload = Place.upload

    def fail(self, path, name):
        upload(self, path, name)
        if name == "checkpoints/1":
            raise UserError("no network")

    monkeypatch.setattr(Place, "upload", fail)
    with pytest.raises(UserError, match="no network"):
        trainer.copy()
    trainer._look()
    assert trainer.markers == {} and any(name.startswith("checkpoints/1/") for name in trainer.place.files())
    with (
        pytest.raises(UserError, match="no network"),
        staging.training(trainer.place, argparse.Namespace()) as local,
    ):
        assert local == trainer.local
    monkeypatch.setattr(Place, "upload", upload)
    with staging.training(trainer.place, argparse.Namespace()):
        pass
    trainer._look()
    assert [*trainer.markers] == [1]


@pytest.mark.parametrize("is_import", [False, True])
def test_a_run_that_another_program_put_there_is_refused_and_kept(tmp_path, is_import):
    trainer, there = mirror_on("a", tmp_path), tmp_path / "bucket" / "run"
    make_run(there, "one", [0 if is_import else 1])
    before = trainer.place.files()
    with pytest.raises(UserError, match=r"bucket/run: another program has put this run there; copy it to a local"):
        trainer.fetch_to_train()
    new = pytest.raises(UserError, match="holds a run already; name a new folder")
    with new, staging.training(trainer.place, argparse.Namespace(), new=True):
        pass
    assert trainer.place.files() == before


@pytest.mark.parametrize("lost", ["", "checkpoints"])
def test_a_copy_that_is_deleted_while_it_trains_deletes_nothing_in_the_bucket(tmp_path, lost):
    trainer = trainer_with([1], tmp_path)
    before = trainer.place.files()
    shutil.rmtree(trainer.local / lost)
    trainer.copy()
    assert trainer.place.files() == before and [*trainer.markers] == [1]

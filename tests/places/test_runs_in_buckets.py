"""Files and runs in buckets: faults of the server, copies in the cache, and runs that are resumed elsewhere."""

import argparse
import collections
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from mini_gpt.commands import command_line, staging
from mini_gpt.commands.mirror import BEGUN, Mirror
from mini_gpt.runtime import buckets, files
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError
from tests.conftest import make_text
from tests.places.s3_server import CLOSE, LOSE
from tests.training.interruption import without_rates

# Files in places with an address: faults of the server, errors in one line, and copies in the cache.

LARGE = os.urandom(2**24 + 1)  # several blocks, and several parts of an upload


def count_faults(server, fault, times, part=""):
    """Answer the first `times` requests of each method and path with `part` by a fault. Return the counts."""
    counts = collections.Counter()

    def answer(method, path):
        key = method, path.partition("?")[0]
        counts[key] += part in path
        return fault if 0 < counts[key] <= times else None

    server.fault = answer
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "times"), [(503, 3), (CLOSE, 1), (LOSE, 1)])
def test_files_survive_faults_of_the_server(server, tmp_path, fault, times):
    place = Place(f"s3://bucket/faults-{fault}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "large").write_bytes(LARGE)
    counts = count_faults(server, fault, times)
    place.write("small", b"abc")
    place.upload(tmp_path / "folder", "a")
    assert {name: entry.size for name, entry in place.files().items()} == {"a/large": len(LARGE), "small": 3}
    place.download("a/large", tmp_path / "copy")
    assert (tmp_path / "copy" / "a" / "large").read_bytes() == LARGE and place.read("small") == b"abc"
    place.delete("a")
    place.delete("small")
    assert place.files() == {} and max(counts.values()) > times


def test_bad_addresses_are_refused_and_a_password_is_not_shown():
    with pytest.raises(UserError, match=r"nowhere://a/b: Protocol not known"):
        Place("nowhere://a/b").files()
    for password in ("PASSWORD", "PASS/WORD"):
        for scheme, make in itertools.product(("s3", "S3", "https"), (Place, command_line.path, files.expanded)):
            with pytest.raises(UserError) as refused:
                make(f"{scheme}://key:{password}@host/bucket")
            assert not any(part in str(refused.value) for part in ("key", "PASS", "WORD"))
    Place("file:///home/me@host/run")


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_glob_is_copied_and_only_changed_files_are_copied_again(tmp_path, scheme, monkeypatch):
    place = Place(f"{scheme}://{tmp_path}/texts")
    for name in ("a.txt", "b/c.txt", "b/d.gz"):
        place.write(name, name.encode())
    copied = []
    download = Place.download
    monkeypatch.setattr(Place, "download", lambda self, name, *rest: copied.append(name) or download(self, name, *rest))
    fetch = lambda rest: buckets.copied(f"{place.address}/{rest}")
    found = fetch("**/*.txt")
    content = lambda: {path.relative_to(found.parents[1]).as_posix() for path in found.parents[1].rglob("*.txt")}
    assert found.name == "*.txt" and content() == set(copied) == {"a.txt", "b/c.txt"}
    fetch("**/*.txt")
    assert copied == ["a.txt", "b/c.txt"]
    place.write("a.txt", b"other text")
    place.delete("b/c.txt")
    fetch("**/*.txt")
    assert copied[2:] == ["a.txt"] and content() == {"a.txt"}
    assert (found.parents[1] / "a.txt").read_bytes() == b"other text"
    assert fetch("b/d.gz").read_bytes() == b"b/d.gz"
    assert [path.name for path in fetch("b").iterdir()] == ["d.gz"]
    with pytest.raises(UserError, match="matches no file"):
        fetch("*.csv")


def test_a_name_of_an_object_that_leaves_the_folder_is_refused(tmp_path):
    place = Place(f"file://{tmp_path}/place")
    for name in ("../c", "/etc/x"):
        with pytest.raises(UserError, match="found a link to"):
            place.download(name, tmp_path / "copy")


# Runs in a bucket: killed in an upload and resumed, and evaluated elsewhere.

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


# The copies of runs in buckets: which is newer, what is sent and deleted, and what a reader has.


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

"""A run directory refuses runs of another config or text, and refused runs change nothing."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import corpora, token_store
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.hugging_face import origin
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, run_directory
from mini_gpt.training.checkpoint import Checkpoints, Damaged, Record
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.training.interruption import assert_same_bits, kill_after, rows, without_rates
from tests.training.test_checkpoint import small_state


@pytest.mark.slow
def test_more_steps_need_a_schedule_that_does_not_change(small, tmp_path):
    loop.train(small(train__steps=4), tmp_path / "run")
    longer = loop.train(small(train__steps=8), tmp_path / "run")
    assert_same_bits(longer.parameters, loop.train(small(train__steps=8), tmp_path / "uninterrupted").parameters)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))
    assert loading.read(tmp_path / "run" / "config.json") == small(train__steps=8)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["d_ff"] == 128, "resolved"
    cosine = {"optimizer__schedule": "cosine"}
    loop.train(small(train__steps=6, **cosine), tmp_path / "cosine")
    with pytest.raises(UserError, match=r"train\.steps was 6, is 8: .*; start a new run"):
        loop.train(small(train__steps=8, **cosine), tmp_path / "cosine")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_wsd_run_is_lengthened_before_its_decay(small, tmp_path, optimizer):
    """The decay is in steps 10 and 11 of 11, and in steps 13 to 15 of 15."""
    fields = {"optimizer__schedule": "wsd", "optimizer__name": optimizer, "checkpoint__keep": 9, "eval__every": 100}
    config = lambda steps: small(train__steps=steps, **fields)
    uninterrupted = loop.train(config(15), tmp_path / "uninterrupted", conclude=False)

    def assert_equals_uninterrupted(run):
        assert_same_bits(loop.train(config(15), run, conclude=False), uninterrupted)
        assert loading.read(run / "config.json") == config(15)
        assert list(map(without_rates, rows(run))) == list(map(without_rates, rows(tmp_path / "uninterrupted")))

    for steps, taken in ((11, 9), (15, 6)):  # the second lengthens the run; the third resumes it in its decay
        kill_after(taken, config(steps), tmp_path / "cut")
    assert_equals_uninterrupted(tmp_path / "cut")

    finished = tmp_path / "finished"
    loop.train(config(11), finished, conclude=False)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for steps, message in (
        (15, r"up to step 11, the last checkpoint; start a new run"),
        (9, "^train.steps: found 9, but .* already at step 11$"),
    ):
        with pytest.raises(UserError, match=message):
            loop.train(config(steps), finished)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    shutil.rmtree(finished / "checkpoints" / "11")
    assert_equals_uninterrupted(finished)


@pytest.mark.slow
def test_a_checkpoint_of_another_format_is_refused(small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mini_gpt.training.checkpoint.FORMAT", 2)
        loop.train(small(train__steps=2), tmp_path, conclude=False)
    for use in (lambda: Run(tmp_path), lambda: loop.train(small(train__steps=4), tmp_path)):
        with pytest.raises(
            UserError, match="checkpoints/2: found checkpoint format 2; must be 4: another version of mini_gpt wrote it"
        ):
            use()
    assert (tmp_path / "checkpoints" / "2").exists()


def test_a_process_that_read_another_text_does_not_train(small, tmp_path, monkeypatch):
    claim = run_directory.claim

    def claim_by_process_0(workdir, config, corpus, *rest):
        claim(workdir, config, dataclasses.replace(corpus, fingerprint="of process 0"), *rest)

    monkeypatch.setattr(run_directory, "claim", claim_by_process_0)
    with pytest.raises(UserError, match=r"^data\.corpus: found text .*trained on text \(fingerprint of process 0"):
        loop.train(small(), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_resumed_run_may_change_some_fields_but_not_its_text(small, tmp_path, corpus_files):
    loop.train(small(train__steps=2), tmp_path / "run")
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in sorted(Path(corpus_files).parent.glob("*.txt")):
        (moved / path.name).write_bytes(path.read_bytes())
    free = {"eval__every": 1, "checkpoint__keep": 1, "mesh__data": 2, "data__path": f"{moved}/*.txt"}
    loop.train(small(train__steps=3, **free), tmp_path / "run")
    (moved / "000.txt").write_text("something else")
    with pytest.raises(UserError, match=r"data\.corpus: .*fingerprint"):
        loop.train(small(train__steps=4, **free), tmp_path / "run")


def test_a_run_of_a_relative_path_opens_from_any_directory(small, tmp_path, monkeypatch, corpus_files):
    config, workdir = small(data__path="*.txt", train__steps=1), tmp_path / "run"
    monkeypatch.chdir(Path(corpus_files).parent)
    loop.train(config, workdir, conclude=False)
    monkeypatch.chdir(tmp_path)
    assert loading.read(workdir / "config.json").data.path == corpus_files
    assert Run(workdir).corpus.num_documents
    monkeypatch.chdir(Path(corpus_files).parent)
    assert int(loop.train(config, workdir, conclude=False).step) == 1


def test_a_run_that_cannot_start_writes_nothing(small, tmp_path):
    no_validation = {"data__split_fractions": (0.99, 0.0, 0.01)}
    short_validation = {"context_length": 9_000, "train__objective": "masked", "model__causal": False}
    for bad in ({"context_length": 100_000}, no_validation, short_validation, {"mesh__data": 3}):
        with pytest.raises(UserError):
            loop.train(small(**bad), tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "mesh, batch, message",
    [
        ({"mesh__data": 8}, 12, r"train\.batch_size: found 12; must be divisible by 8"),
        ({"mesh__data": 2, "mesh__fsdp": 2, "train__accumulation_steps": 3}, 6, "must be divisible by 12"),
        ({"mesh__data": -1, "mesh__fsdp": 4}, 6, r"train\.batch_size: found 6; must be divisible by 8: 8 devices"),
    ],
)
def test_an_indivisible_batch_size_is_refused(small, tmp_path, mesh, batch, message):
    with pytest.raises(UserError, match=message):
        loop.train(small(train__batch_size=batch, **mesh), tmp_path / "run")


@pytest.mark.slow
def test_a_run_with_a_kernel_of_other_devices_is_read_with_one_of_these(trained):
    workdir, tokens = trained(train__steps=4), np.arange(24).reshape(1, 24)
    expected = Run(workdir).model.logits(tokens)
    config = json.loads((workdir / "config.json").read_text())
    config["model"]["attention"] = "cudnn"
    del config["sha256"]  # an edited config has none
    (workdir / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(Run(workdir).model.logits(tokens), expected)
    np.testing.assert_array_equal(Run(workdir, overrides={"model.attention": "auto"}).model.logits(tokens), expected)


@pytest.mark.slow
def test_a_directory_that_has_lost_a_file_is_refused(small, tmp_path, trained):
    """Every set of files that may be left of a run is refused unchanged, or trained to the end with nothing lost."""
    whole = trained(train__steps=2)
    names = ["config.json", "checkpoints", "metrics.jsonl", "tokenizer", "corpus.json"]
    for number, kept in enumerate(itertools.product((True, False), repeat=len(names))):
        workdir = tmp_path / str(number)
        shutil.copytree(whole, workdir)
        for name in (name for name, keep in zip(names, kept, strict=True) if not keep):
            shutil.rmtree(workdir / name) if (workdir / name).is_dir() else (workdir / name).unlink()
        config, checkpoints, metrics, tokenizer, corpus = kept
        is_killed_at_the_start = not (checkpoints or metrics) and (not config or (tokenizer and corpus))
        before = contents(workdir)
        if (config and checkpoints and tokenizer and corpus) or is_killed_at_the_start:
            assert int(loop.train(small(train__steps=2), workdir, conclude=False).step) == 2
            after = contents(workdir)
            assert all(after[name] == text for name, text in before.items() if name.endswith((".json", ".jsonl")))
        else:
            with pytest.raises((UserError, FileNotFoundError)):
                loop.train(small(train__steps=2), workdir, conclude=False)
            assert contents(workdir) == before, kept


@pytest.mark.slow
@pytest.mark.parametrize("change", ["move", "remove"])
@pytest.mark.parametrize("at", [4, 5])  # a save begins, or is in progress
def test_a_run_directory_that_is_lost_while_it_trains_is_named(small, tmp_path, change, at):
    workdir, finish = tmp_path / "run", loop.Loop._finish

    def lose(self, step, *rest):
        if step == at:
            workdir.rename(tmp_path / "moved") if change == "move" else shutil.rmtree(workdir, ignore_errors=True)
        finish(self, step, *rest)

    config = small(checkpoint__every=2, train__log_every=1, train__steps=8)
    lost = r"run: was moved or removed while it trained; to resume it, give"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=lost):
        patch.setattr(loop.Loop, "_finish", lose)
        loop.train(config, workdir, conclude=False)
    assert not (workdir / "config.json").exists() and not list(workdir.glob("checkpoints/[0-9]"))
    if change == "move":
        assert int(loop.train(config, tmp_path / "moved", conclude=False).step) == 8


def contents(workdir):
    """Return {path: bytes} of all files, except those that grow without loss."""
    found = {str(path.relative_to(workdir)): path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if not name.startswith(("tensorboard", "lock"))}


@pytest.mark.parametrize("name", ["corpus.json", "tokenizer/tokenizer.json", "init_from.json", "imported_from.json"])
def test_a_new_run_overwrites_no_file_of_others(small, tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    with pytest.raises(UserError, match=f"{name}: found the file of another run|has {name}, but no config.json"):
        loop.train(small(), tmp_path / "run", conclude=False)
    assert path.read_text() == '{"mine": 1}'
    assert {found.name for found in path.parent.iterdir()} <= {"lock", path.name}


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_files_of_a_run_killed_at_its_start_are_accepted(small, tmp_path, kind):
    config = small(data__tokenizer=kind, data__vocab_size=300)
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    arguments = (tmp_path / "run", config, corpus, tokenizer, run_directory.Origin("/a", 5))
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    run_directory.claim(*arguments)
    before = contents(tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    run_directory.claim(*arguments)
    assert contents(tmp_path / "run") == before


BAD = [None, [], {}, 5, -1, 1.5, "x", True, 10**400, -(10**400), "\0", [[]]]


def damaged(path):
    """Yield after each damage of a JSON file: another value in place of the whole, or of one field, or a field less."""
    original = path.read_text()
    body = {name: value for name, value in json.loads(original).items() if name != "sha256"}
    fields = [body | {name: value} for name in body for value in BAD]
    fewer = [{other: body[other] for other in body if other != name} for name in body]
    for content in (*BAD, *fields, *fewer):
        path.write_text(json.dumps(content))
        yield content
    for text in ("", "{", original[:-9], "[" * 100_000, '{"a": NaN}', original.replace("5", "6")):
        path.write_text(text)
        yield text
    path.write_bytes(b"\xff")
    yield b"\xff"
    path.write_text(original)


@pytest.mark.parametrize("name", ["corpus.json", "metadata", *slow("init_from.json", "imported_from.json")])
def test_a_damaged_record_never_ends_in_a_traceback(small, tmp_path, name):
    config, workdir = small(), tmp_path / "run"
    corpus = corpora.open_corpus(config.data)
    workdir.mkdir()
    run_directory.claim(workdir, config, corpus, ByteTokenizer(), run_directory.Origin("/a", 5))
    origin.record_import(workdir, tmp_path, {"architecture": "GPT-2", "context_length": 9})
    state, _ = small_state()
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        checkpoints.save(5, state, Record(validation_loss=1.5))

    def restore():
        with contextlib.closing(Checkpoints(workdir / "checkpoints", read_only=True)) as checkpoints:
            checkpoints.best_loss(config.eval.tokens)
            checkpoints.record(checkpoints.resolve("best"))

    uses = [
        lambda: run_directory.holds_run(workdir, config),
        lambda: run_directory.check_corpus(workdir, corpus),
        lambda: run_directory.origin_of(workdir, Path("/a")),
        lambda: origin.described_origin(workdir),
        restore,
    ]
    path = workdir / "checkpoints" / "5" / "format" / "metadata" if name == "metadata" else workdir / name
    found = 0
    for _ in damaged(path):
        for use in uses:
            try:
                use()
            except (UserError, Damaged) as error:
                found += "\n" not in str(error)
    assert found > 10
    for use in uses:
        use()

"""Untrusted run directories can do no harm: the tests for the rows of docs/reference/threat_model.md."""

import contextlib
import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest

import train
from mini_gpt import suites
from mini_gpt.config import loading, places
from mini_gpt.data import corpora
from mini_gpt.hugging_face import origin
from mini_gpt.runtime import program
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import layouts, loop
from mini_gpt.training import state as states
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def config(home, corpus_files):
    more = {"data.path": corpus_files, "data.cache_dir": str(home / "cache"), "train.steps": 4}
    return loading.load("configs/default.py", SMALL | more)


@pytest.fixture
def run(home, config, tmp_path):
    """Return a copy of one small run."""
    if not (home / "run").exists():
        loop.train(config, home / "run", conclude=False)
    return shutil.copytree(home / "run", tmp_path / "run")


def change(run, **fields):
    """Change data fields in the config.json of a run, as an attacker could."""
    path = run / "config.json"
    values = json.loads(path.read_text())
    values.pop("sha256", None)
    values["data"] |= fields
    path.write_text(json.dumps(values))


# Places


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"path": "/**"}, "data.path"),
        ({"path": "~/.ssh/*"}, "data.path"),
        ({"corpus": "tfds:lm1b"}, "data.corpus"),
        ({"corpus": "tfds:lm1b", "path": "/srv/theirs"}, "data.corpus"),
        ({"corpus": "tiny_shakespeare", "path": "/dev/zero"}, "data.path"),
    ],
)
def test_a_place_never_typed_is_not_read(run, fields, name, monkeypatch):
    change(run, **fields)
    opened = []
    monkeypatch.setattr(corpora, "open_corpus", opened.append)
    opened_run = Run(run)
    with pytest.raises(UserError, match=rf"^{name}: found .*config\.json names it.* type it once: --config\.{name}="):
        _ = opened_run.corpus
    with pytest.raises(UserError, match=rf"^{name}: found .*config\.json names it.* type it once: --config\.{name}="):
        loading.load(run / "config.json")
    assert opened == []


def test_a_place_typed_once_is_remembered(run, corpus_files):
    change(run, path=corpus_files + "*")
    with pytest.raises(UserError, match="type it once"):
        _ = Run(run).corpus
    assert Run(run, overrides={"data.path": corpus_files + "*"}).corpus.num_documents == 100
    assert Run(run).corpus.num_documents == 100
    assert loading.load(run / "config.json").data.path == corpus_files + "*"


def test_both_files_of_pairs_must_have_been_typed(small, tmp_path):
    def data(target):
        paths = {"data__path": str(tmp_path / "en"), "data__target_path": str(tmp_path / target)}
        return small(model__encoder_layers=1, data__corpus="pairs", **paths).data

    for typed, name in ((set(), "data.path"), ({"data.path"}, "data.target_path")):
        with pytest.raises(UserError, match=rf"^{name}: found .*c\.json names it.*: --config\.{name}="):
            places.check_corpus(data("de"), typed, tmp_path / "c.json")
    places.remember(data("de"))
    places.check_corpus(data("de"), (), tmp_path / "c.json")
    with pytest.raises(UserError, match=r"^data\.path: found"):
        places.check_corpus(data("fr"), (), tmp_path / "c.json")


@pytest.mark.parametrize("corpus", ["text", "tokens", "tiny_shakespeare", "pairs", "tfds:x", "a later corpus"])
def test_a_corpus_of_files_must_have_been_typed(small, tmp_path, corpus):
    data = dataclasses.replace(small().data, corpus=corpus, path=str(tmp_path))
    with pytest.raises(UserError, match=r"only .*c\.json names it"):
        places.check_corpus(data, (), tmp_path / "c.json")


def test_a_run_of_the_same_user_needs_no_override(run, config):
    assert Run(run).corpus.num_documents == 100
    assert Run(run).config.data.cache_dir == loading.load(run / "config.json").data.cache_dir == config.data.cache_dir


def test_another_text_at_a_known_place_is_refused(run, tmp_path, corpus_files):
    (tmp_path / "other.txt").write_text("another text of the user's")
    other = loading.override(loading.load("configs/default.py"), {"data.corpus": "text"} | {"data.path": str(tmp_path)})
    places.remember(loading.override(other, {"data.path": str(tmp_path / "*.txt")}).data)
    change(run, path=str(tmp_path / "*.txt"))
    with pytest.raises(UserError, match="the text has changed"):
        _ = Run(run).corpus


def test_a_cache_never_typed_is_not_used(run, tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    (theirs / "compiled").mkdir(parents=True)
    (theirs / "tokens").mkdir()
    change(run, cache_dir=str(theirs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    used = []
    monkeypatch.setattr("mini_gpt.commands.command_line.set_up", lambda cache_dir, flags=None: used.append(cache_dir))
    monkeypatch.setattr("mini_gpt.training.loop.train", lambda config, *_, **__: used.append(config.data.cache_dir))
    flags = [f"--config={run / 'config.json'}", f"--workdir={tmp_path / 'new'}"]
    monkeypatch.setattr("sys.argv", ["train.py", *flags])
    train.main()
    assert used == [None, None]
    assert Run(run).config.data.cache_dir is None
    assert Run(run, overrides={"data.cache_dir": str(theirs)}).config.data.cache_dir == str(theirs)
    suites.evaluate(Run(run), "perplexity", SuiteOptions())
    assert [path for path in theirs.rglob("*") if path.is_file()] == []


def test_dots_after_a_link_lead_to_no_known_place(run, tmp_path, corpus_files):
    """With a link in the run, `link/..` is not the directory that holds the link."""
    (run / "a" / "b").mkdir(parents=True)
    (run / "link").symlink_to("a/b")
    (tmp_path / "cache").mkdir()
    ours = loading.override(loading.load("configs/default.py"), {"data.cache_dir": str(tmp_path / "cache")})
    places.remember(ours.data)
    for path, is_known in ((run / ".." / "cache", True), (run / "link" / ".." / ".." / "cache", False)):
        change(run, cache_dir=str(path))
        assert Run(run).config.data.cache_dir == (str(path) if is_known else None)
    change(run, path=str(run / "link" / ".." / os.path.relpath(corpus_files, run)), cache_dir=None)
    with pytest.raises(UserError, match="type it once"):
        _ = Run(run).corpus
    change(run, path=str(run / "*" / ".." / os.path.relpath(corpus_files, run)))  # its key is that of our own text
    with pytest.raises(UserError, match=r"^data\.path: found .*; must not have '\.\.' after a wildcard$"):
        _ = Run(run).corpus


def test_parameters_are_counted_without_a_corpus(run, monkeypatch, capsys):
    change(run, path="/srv/theirs/*")
    assert type_in(monkeypatch, "mini_gpt.commands.count_parameters", f"--config={run / 'config.json'}") is None
    assert "total" in capsys.readouterr().out


# Files of a run


def test_links_that_form_a_cycle_are_refused(run):
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / "again").symlink_to(run)
    with pytest.raises(UserError, match=r"eval/again: found a link to "):
        Run(run)


@pytest.mark.parametrize("record", [{"workdir": 5, "checkpoint_step": 4}, {"workdir": "a"}, [], {"workdir": {}}])
def test_invalid_records_of_initial_weights_are_refused(run, config, record):
    (run / "init_from.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"init_from\.json: not a record of initial weights"):
        origin.described_origin(run)
    (run / "init_from.json").rename(run / "imported_from.json")
    with pytest.raises(UserError, match=r"imported_from\.json: not a record of initial weights"):
        origin.described_origin(run)


@pytest.mark.parametrize("fields", [{"validation_loss": "x"}, {"checksums": 5}, {"format": None}, {"more": 1}], ids=str)
def test_invalid_records_of_a_checkpoint_are_damage_or_another_format(run, fields):
    path = run / "checkpoints" / "4" / "format" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match=r"has another checksum than when it was written|found checkpoint format None"):
        Run(run)


# Output


def test_control_characters_in_errors_are_escaped(capsys):
    def fail():
        raise UserError("config.json: \x1b]0;owned\x07\n\u202e\ud800: no such field")

    with pytest.raises(SystemExit) as ended:
        program.run(fail)
    assert str(ended.value) == r"error: config.json: \x1b]0;owned\x07\n\u202e\ud800: no such field"


@pytest.mark.parametrize("on_screen", [True, False])
def test_control_characters_are_escaped_on_a_terminal(run, monkeypatch, capsys, on_screen):
    monkeypatch.setattr("sys.stdout.isatty", lambda: on_screen, raising=False)
    prompt = "\x1b[2J"
    assert type_in(monkeypatch, "sample.py", f"--workdir={run}", f"--prompt={prompt}", "--length=1") is None
    assert (prompt in capsys.readouterr().out) != on_screen


# Numbers


@pytest.fixture
def poisoned(run, config):
    """Save a checkpoint with NaNs and valid checksums; return its run directory."""
    source = Run(run)
    bad = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(np.nan), source.model.parameters)
    _, abstract = states.abstract(config, layouts.vocab_size(config, source.tokenizer), source.mesh)
    state = states.first(config, bad, abstract)
    with contextlib.closing(Checkpoints(run / "checkpoints", keep=2)) as checkpoints:
        checkpoints.save(5, state, Record())
    return run


def test_non_finite_weights_are_logged_or_refused(poisoned, config, tmp_path, caplog):
    Run(poisoned)
    assert "step 5: found non-finite values (NaN or infinity) in " in caplog.text
    with pytest.raises(UserError, match=r"--init_from: .*, step 5: found non-finite values \(NaN or infinity\) in "):
        loop.train(config, tmp_path / "new", init_from=poisoned)
    assert not (tmp_path / "new").exists()

"""Untrusted run directories can do no harm: the tests for the rows of docs/reference/threat_model.md."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.hugging_face import origin
from mini_gpt.runtime import program
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import inputs, loop, train_state
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def config(corpus_files):
    return loading.load("configs/default.py", SMALL | {"data.path": corpus_files, "train.steps": 4})


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


# Configs


def test_a_config_json_names_no_cache(run, tmp_path):
    change(run, cache_dir=str(tmp_path / "theirs"))
    for open_config in (lambda: Run(run), lambda: loading.load(run / "config.json")):
        with pytest.raises(UserError, match=r"config\.json: data\.cache_dir: no such config field"):
            open_config()


def test_another_text_than_that_of_the_run_is_refused(run, tmp_path):
    (tmp_path / "other.txt").write_text("another text of the user's")
    change(run, path=str(tmp_path / "*.txt"))
    with pytest.raises(UserError, match="the text has changed"):
        _ = Run(run).corpus
    change(run, path=str(run / "*" / ".." / ".." / "*.txt"))
    with pytest.raises(UserError, match=r"^data\.path: \S+/other\.txt leads to \S+/other\.txt, outside "):
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
    _, abstract = train_state.abstract(config, inputs.vocab_size(config, source.tokenizer), source.mesh)
    state = train_state.first(config, 257, abstract, bad)
    with contextlib.closing(Checkpoints(run / "checkpoints", keep=2)) as checkpoints:
        checkpoints.save(5, state, Record())
    return run


def test_non_finite_weights_are_logged_or_refused(poisoned, config, tmp_path, caplog):
    Run(poisoned)
    assert "step 5: found non-finite values (NaN or infinity) in " in caplog.text
    with pytest.raises(UserError, match=r"--init_from: .*, step 5: found non-finite values \(NaN or infinity\) in "):
        loop.train(config, tmp_path / "new", init_from=poisoned)
    assert not (tmp_path / "new").exists()

"""Commands: look at data, the environment, figures, the page of the lab, and the number of parameters."""

import importlib.metadata
import json
import re
import subprocess
import sys

import jax
import pytest

from mini_gpt import suites
from mini_gpt.commands import data, environment, figures, lab
from mini_gpt.data import corpora, token_store
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop, run_directory
from mini_gpt.training.assembly import assemble, make_mesh
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY, make_text

# python -m mini_gpt.data look: what a run would see.


def look(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["look", "look", "--config=configs/tiny.py", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(data.command_line, "set_up", lambda *_: None)  # it would change the log of other tests
    data.main()
    return capsys.readouterr().out


@pytest.fixture
def records(tmp_path):
    lines = [json.dumps({"text": make_text(n, 20 + n), "body": f"[body] {n}"}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return ["--config.data.corpus=text", f"--config.data.path={tmp_path}/*.jsonl"]


def test_look_prints_the_counts_of_the_splits_and_the_first_documents(records, monkeypatch, capsys):
    printed = look(monkeypatch, capsys, *records, "--documents=2", "--config.train.steps=7")
    found = re.findall(r"(train|validation|test) +([\d,]+) +([\d,]+) +([\d,]+) +([\d.]+)", printed)
    counts = {split: [int(number.replace(",", "")) for number in numbers] for split, *numbers, _ in found}
    texts = [make_text(n, 20 + n) for n in range(200)]
    assert sum(documents for documents, _, _ in counts.values()) == 200
    assert sum(size for _, size, _ in counts.values()) == sum(len(text.encode()) for text in texts)
    assert all(tokens == size + documents - 1 for documents, size, tokens in counts.values())  # of bytes, separators
    assert "7 steps of 16 × 128 tokens:" in printed and "data.split=documents; cached in" in printed
    assert f"document 1, {len(texts[0]):,} characters:\n  {' '.join(texts[0].split())[:60]}" in printed
    assert "document 2" in printed and "document 3" not in printed


def test_look_says_that_training_would_fail(records, monkeypatch, capsys):
    printed = look(monkeypatch, capsys, *records, "--config.data.text_field=body", "--config.context_length=9999")
    assert re.search(r"training would end with: data\.corpus: the train split has \d+ tokens", printed)
    assert "document 1, 8 characters:\n  [body] 0\n" in printed


def test_look_refuses_a_task(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"data\.corpus: a task makes its problems itself"):
        look(monkeypatch, capsys, "--config.data.corpus=task:reverse", "--config.data.tokenizer=characters")


# python -m mini_gpt.environment prints what a report of a bug needs, and nothing private.


def printed(*flags, **variables):
    call = [sys.executable, "-m", "mini_gpt.environment", *flags]
    values = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", **variables}
    done = subprocess.run(call, cwd=REPOSITORY, env=values, capture_output=True, text=True)
    return done, dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_versions_devices_and_variables_are_printed():
    done, said = printed(XLA_FLAGS="--xla_force_host_platform_device_count=2", SECRET_TOKEN="hidden")
    assert done.returncode == 0, done.stderr
    assert said["python"] == sys.version.split()[0] and said["jax"] == jax.__version__
    assert said["flax"] == importlib.metadata.version("flax")
    assert done.stdout.count("\ndevice ") == 2 and said["XLA_FLAGS"].endswith("count=2")
    assert "hidden" not in done.stdout and "PATH" not in said


@pytest.mark.slow
def test_the_fields_of_a_run_are_those_that_differ_from_the_defaults(trained, monkeypatch, capsys):
    run = trained(model__position="alibi")
    monkeypatch.setattr(sys, "argv", ["environment", f"--workdir={run}"])
    environment.main()
    text = capsys.readouterr().out
    said = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert said["model.position"] == "'alibi'" and said["train.steps"] == "8"
    assert said["data.path"] == "(a path)" and str(run.parent) not in text
    assert "model.norm" not in said


# The commands write the figures that exist for an encoding or a run.

OF_RUN = {
    "learned": {"maps", "heads", "similarity", "sums"},
    "sinusoidal": {"maps", "heads", "similarity", "sums", "sinusoids"},
    "rope": {"maps", "heads", "similarity", "rope"},
    "t5": {"maps", "heads", "similarity", "biases"},
}


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal", "t5"])
def test_a_run_has_the_figures_of_its_encoding(small, tmp_path, position):
    fields = {"model__position": position, "model__sinusoidal__columns": 8 if position == "sinusoidal" else None}
    loop.train(small(train__steps=1, model__num_layers=2, **fields), tmp_path / "run", conclude=False)
    suites.evaluate(Run(tmp_path / "run"), "figures", SuiteOptions())
    assert {path.stem for path in (tmp_path / "run" / "eval" / "figures").iterdir()} == OF_RUN[position]


@pytest.mark.slow
def test_every_figure_is_drawn_and_a_wrong_name_is_refused(tmp_path, monkeypatch):
    assert type_in(monkeypatch, "mini_gpt.commands.figures", f"--out={tmp_path}/out") is None
    assert {path.stem for path in (tmp_path / "out").iterdir()} == set(figures.ENCODINGS)
    line = type_in(monkeypatch, "mini_gpt.commands.figures", "--only=ropes", f"--out={tmp_path}/other")
    assert line.startswith("error: --only: found 'ropes'; must be one of sinusoids, ")
    assert not (tmp_path / "other").exists()


# The command that writes the lab page.


def run(monkeypatch, *arguments):
    """Run the command; return its error line, or None."""
    monkeypatch.setattr(sys, "argv", ["lab", *arguments])
    try:
        lab.main()
    except SystemExit as stop:
        return str(stop.code)
    return None


def test_the_page_is_written_and_overwritten(monkeypatch, tmp_path, capsys):
    path = tmp_path / "new" / "page.html"
    for _ in range(2):
        assert run(monkeypatch, f"--out={path}") is None
        assert capsys.readouterr().out == f"Written to {path}: open it in a browser.\n"
        page = path.read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and "The cat sat on the mat" in page and "src=" not in page
        path.write_text("old")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--out={}"], "found a directory; name a file"),
        (["--head=0.1"], "--workdir: found None; must be the run of --head"),
        (["--text="], "--workdir: found None; must be the run of --head"),
        (["--workdir=missing", "--head=1"], "missing/config.json: not found"),
    ],
)
def test_wrong_flags_are_one_line(monkeypatch, tmp_path, arguments, said):
    assert said in run(monkeypatch, *(argument.format(tmp_path) for argument in arguments))


# count_parameters counts the parameters that training would make, for any vocabulary.


@pytest.fixture
def counted(monkeypatch, capsys):
    """Return a function from flags to the number of parameters, or the error line."""

    def count(*flags):
        error = type_in(monkeypatch, "mini_gpt.commands.count_parameters", *flags)
        total = re.search(r"total +([\d,]+)", capsys.readouterr().out)
        return error or int(total[1].replace(",", ""))

    return count


def claim(config, directory):
    """Write the files of a new run; return the number of parameters in its training state."""
    corpus = corpora.open_corpus(config.data)
    tokenizer = token_store.fit_tokenizer(corpus, config.data)
    run_directory.claim(directory, config, corpus, tokenizer)
    state = assemble(config, make_mesh(config), corpus, tokenizer).abstract_state
    return sum(leaf.size for leaf in jax.tree.leaves(state.parameters))


TASK = {"data__corpus": "task:copy", "data__tokenizer": "characters", "context_length": 64}
MASKED = {"train__objective": "masked", "model__causal": False}


@pytest.mark.parametrize(
    "fields, config_is_enough",
    [
        ({}, True),
        (MASKED | {"model__prediction_head": True, "model__embedding_norm": True}, True),
        (TASK | MASKED | {"data__isolate_documents": True, "model__tie_embeddings": False}, True),
        ({"data__tokenizer": "bpe", "data__vocab_size": 270}, True),
        ({"data__tokenizer": "characters"}, False),
    ],
    ids=str,
)
def test_the_count_is_that_of_the_training_state(counted, small, tmp_path, fields, config_is_enough):
    trained = claim(small(**fields), tmp_path / "run")
    assert counted(f"--workdir={tmp_path / 'run'}") == trained
    if config_is_enough:
        assert counted(f"--config={tmp_path / 'run' / 'config.json'}") == trained


def test_a_given_vocabulary_is_counted(counted):
    few, more = (counted("--config=configs/shakespeare_char.py", f"--vocab_size={size}") for size in (1, 101))
    assert more - few == 100 * 384


def test_sizes_out_of_range_or_unknown_are_refused(counted):
    assert counted("--config=configs/tiny.py", "--vocab_size=0").startswith("error: --vocab_size: found 0")
    line = counted("--config=configs/shakespeare_char.py")
    assert line.startswith("error: data.tokenizer: found 'characters'") and "--vocab_size" in line


def test_a_config_without_its_path_is_counted(counted, tmp_path):
    text = "from configs import default\n\ndef get_config():\n    config = default.get_config()\n"
    (tmp_path / "mine.py").write_text(text + "    config.data.corpus = 'text'\n    return config\n")
    assert counted(f"--config={tmp_path}/mine.py") == counted("--config=configs/default.py")

"""The commands: the files and text that they write, and their one-line errors."""

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys

import pytest

from mini_gpt.runtime import files, program
from mini_gpt.training import loop
from tests.conftest import REPOSITORY, SMALL


def type_in(monkeypatch, command, *arguments):
    """Run a command in this process. Return None, or the error line if it exits with status 1."""
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    monkeypatch.setattr("mini_gpt.commands.command_line.set_up", lambda *_: None)
    try:
        program.run(importlib.import_module(command.removesuffix(".py")).main)
    except SystemExit as stop:
        assert isinstance(stop.code, str) and "\n" not in stop.code
        return stop.code
    return None


def overtake(monkeypatch):
    """Let another process write each new directory first, just before the command completes it."""
    original = files.directory_written_whole

    @contextlib.contextmanager
    def overtaken(target):
        with original(target) as draft:
            yield draft
            target.mkdir()
            (target / "of another process").touch()

    monkeypatch.setattr(files, "directory_written_whole", overtaken)


@pytest.fixture
def flags(corpus_files):
    """Return the flags that make the default config small."""
    fields = SMALL | {"data.path": corpus_files}
    return ["--config=configs/default.py", *(f"--config.{name}={value}" for name, value in fields.items())]


@pytest.fixture
def run(trained):
    return trained(model__position="learned")


def test_train_eval_and_sample_agree(monkeypatch, flags, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert type_in(monkeypatch, "train.py", *flags, f"--workdir={workdir}", "--config.train.steps", "4") is None
    shown = re.search(
        r"Validation loss ([\d.]+) nats per token, ([\d.]+) bits per byte \(([\d,]+) tokens", capsys.readouterr().out
    )
    assert type_in(monkeypatch, "eval.py", f"--workdir={workdir}") is None
    result = json.loads((workdir / "eval" / "perplexity.json").read_text())
    assert (result["checkpoint_step"], result["split"], result["protocol"]) == (4, "validation", "blocks")
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["bits_per_byte"] == pytest.approx(
        result["nll"] * result["tokens_scored"] / math.log(2) / result["bytes_scored"]
    )
    assert shown.groups() == (f"{result['nll']:.4f}", f"{result['bits_per_byte']:.3f}", f"{result['tokens_scored']:,}")
    assert str(workdir / "eval" / "perplexity.json") in capsys.readouterr().out
    for _ in range(2):
        assert type_in(monkeypatch, "sample.py", f"--workdir={workdir}", "--prompt=the cat", "--length=20") is None
    first, second = capsys.readouterr().out.split("the cat")[1:]
    assert first == second


COMMANDS = ["train", "eval", "sample", "mini_gpt.sweep", "mini_gpt.commands.study", "mini_gpt.bench", "mini_gpt.lab"]
COMMANDS += ["mini_gpt.commands.hugging_face", "mini_gpt.commands.count_parameters"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_flag(monkeypatch, capsys, name):
    parsers, make = [], argparse.ArgumentParser.__init__
    monkeypatch.setattr(
        argparse.ArgumentParser, "__init__", lambda self, *a, **o: parsers.append(self) or make(self, *a, **o)
    )
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(name).main()
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("usage: ")
    assert [action.dest for parser in parsers for action in parser._actions if not action.help] == []


def test_the_default_workdir_joins_the_overrides(monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "train", lambda config, workdir, **_: seen.append(str(workdir)))
    for extra in ([], ["--config.model.position=alibi", "--config.seed=1"], ["--config.data.text_field=a/b"]):
        assert type_in(monkeypatch, "train.py", "--config=configs/tiny.py", *extra) is None
    assert type_in(monkeypatch, "train.py", "--config=configs/presets.py:gpt2_small") is None
    long = f"--config.data.text_field={'x' * 230}"
    assert type_in(monkeypatch, "train.py", "--config=configs/tiny.py", long) is None
    assert "flag without its directory" in type_in(monkeypatch, "train.py", "--config=configs/tiny.py", "--workdir=")
    assert seen == [
        "runs/tiny",
        "runs/tiny,model.position=alibi,seed=1",
        "runs/tiny,data.text_field=a_b-32c1e791",
        "runs/presets,gpt2_small",
        f"runs/tiny,data.text_field={'x' * 79}-e2ec8137",
    ]


BAD_TRAIN = [
    (["--confg.seed=1"], r"--confg\.seed=1: no such flag"),
    (["--n_layer=2"], r"--n_layer=2: no such flag; did you mean --config\.model\.num_layers"),
    (["--zzzzzz=2"], r"--zzzzzz=2: no such flag; --help"),
    (["--config.seed"], r"override: found 'seed'"),
    (["--config.train.batch_size=3", "--config.mesh.data=2"], r"train\.batch_size: found 3"),
    (["--workdir=/proc/x"], r"/proc/x: can't be made a directory"),
    ([f"--workdir={__file__}"], r"'\S+\.py': found a file"),
    (["--config.data.path=nothing/*"], r"data\.path: 'nothing/\*' matches no file"),
    (["--config.context_length=50000"], r"data\.corpus: the train split has .* needs at least 50001"),
    (["--workdir=~no_such_user/x"], "~no_such_user/x: found no home directory"),
    (["--cache_dir=~no_such_user/x"], "~no_such_user/x: found no home directory"),
    (["--config.data.path=~no_such_user/x"], "~no_such_user/x: found no home directory"),
]


@pytest.mark.parametrize("arguments, message", BAD_TRAIN)
def test_bad_training_flags_end_in_one_line_and_write_nothing(monkeypatch, flags, tmp_path, arguments, message):
    line = type_in(monkeypatch, "train.py", *flags, f"--workdir={tmp_path}/run", *arguments)
    assert re.match(f"error: {message}", line)
    assert not (tmp_path / "run").exists()


BAD_FLAGS = [
    ("sample.py", ["--workdir=runs/none", "--promt=a"], "--promt=a: no such flag; did you mean --prompt"),
    ("eval.py", [], "the following arguments are required: --workdir"),
    ("eval.py", ["--workdir=runs/none", "--tokens=a"], "argument --tokens: invalid int value: 'a'"),
]


@pytest.mark.parametrize("command, arguments, line", BAD_FLAGS)
def test_bad_flags_are_named_in_one_line(monkeypatch, command, arguments, line):
    assert type_in(monkeypatch, command, *arguments).startswith(f"error: {line}")


@pytest.mark.slow
def test_a_command_without_a_home_directory_ends_in_one_line():
    left_out = ("MINI_GPT_CACHE", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | {"HOME": "~"}
    command = [sys.executable, "train.py", "--config=configs/tiny.py"]
    ended = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    lines = ended.stderr.splitlines()  # Matplotlib may say first that it uses a temporary directory
    assert ended.returncode == 1 and lines[-1].startswith("error: ~/.cache/mini_gpt: found no home") and len(lines) <= 2


BAD_EVAL = [
    (["--checkpoint=77"], r"--checkpoint: found '77'; must be last, best or one of 4, 8"),
    (["--config.context_length=64"], r"context_length: found 64; learned positions end at model\.max_positions \(32\)"),
    (["--config.model.num_layers=2"], r"overrides: the checkpoint has nothing for the parameter blocks/1/"),
    (["--config.model.max_positions=64"], r"overrides: the checkpoint has shape \(32, 32\) for .*/embedding"),
    (["--config.data.tokenizer=characters"], r"data\.tokenizer: can"),
    (["--config.data.split_fractions=(0.5,0.4,0.1)"], r"data\.split_fractions: can"),
]


@pytest.mark.parametrize("arguments, message", BAD_EVAL)
def test_a_bad_evaluation_ends_in_one_line(monkeypatch, run, arguments, message):
    assert re.match(f"error: {message}", type_in(monkeypatch, "eval.py", f"--workdir={run}", *arguments))
    assert not (run / "eval").exists()


def test_directories_without_a_run_are_refused(monkeypatch, small, tmp_path, run):
    assert "config.json: not found" in type_in(monkeypatch, "eval.py", f"--workdir={tmp_path}/none")
    (run / "checkpoints").rename(run / "elsewhere")
    for command in (["eval.py"], ["sample.py", "--prompt=a"]):
        line = type_in(monkeypatch, *command, f"--workdir={run}")
        assert re.match(r"error: .*checkpoints: not found; train first", line)
    (run / "checkpoints").mkdir()
    assert "no checkpoint; train first" in type_in(monkeypatch, "eval.py", f"--workdir={run}")


def test_a_changed_text_is_refused(monkeypatch, run, corpus_files, tmp_path):
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "other").mkdir()
    for number in range(120):
        (tmp_path / "other" / f"{number}.txt").write_text(f"other text {number} " * 10)
    config["data"]["path"] = f"{tmp_path}/other/*"
    (run / "config.json").write_text(json.dumps(config))
    assert "config.json: not a run's config (its sha256 does not match: it is damaged, or was edited" in type_in(
        monkeypatch, "eval.py", f"--workdir={run}"
    )
    del config["sha256"]
    (run / "config.json").write_text(json.dumps(config))
    assert type_in(monkeypatch, "eval.py", f"--workdir={run}", f"--config.data.path={tmp_path}/other/*") is None
    assert "was trained on text (fingerprint" in type_in(monkeypatch, "eval.py", f"--workdir={run}")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can keep the memory")
def test_freed_memory_is_kept_for_the_next_step():
    """A step that allocates and frees 64 MB has page faults only the first time."""
    script = """
import resource
import jax
import jax.numpy as jnp
from mini_gpt.commands import command_line

command_line.set_up()
x = jnp.ones((4096, 64))
step = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counts = [faults()]
for _ in range(20):
    step(x).block_until_ready()
    counts.append(faults())
print(*[after - before for before, after in zip(counts, counts[1:])])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    first, *others = map(int, done.stdout.split())
    pages = 4 * 4096**2 // resource.getpagesize()
    assert first > pages / 10 > statistics.median(others)


def test_training_starts_without_slow_imports():
    """Matplotlib is for evaluation suites, Pallas for TPUs, and the others are for other texts and places."""
    slow = {"matplotlib", "jax.experimental.pallas", "pyarrow", "fsspec", "ray"}
    program = f"import sys, mini_gpt.commands.train; print({slow} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=REPOSITORY, text=True) == "set()\n"

"""Runs in directories with names that libraries could read as a pattern, an escape or a URL."""

import contextlib
import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mini_gpt import suites
from mini_gpt.runtime import files
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.run import Run
from mini_gpt.training.train_state import TrainState
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY, SMALL, slow
from tests.faults import kills
from tests.faults.kills import Trainer
from tests.training.interruption import assert_same_bits

ODD = [
    "[2024] proj",
    "books/**",
    "a*b?c",
    "back\\slash",
    "x.__lock",
    "gs:",
    "100%25#1?a=b&c",
    'it\'s "quoted" `now`',
    "größer 日本 🎉",
    "{a,b}|c;$HOME",
    "-dash",
    "é" * 110,
]


def random_names(seed: int, count: int) -> list[str]:
    """Return random relative paths of one or two levels, with unusual characters."""
    rng = random.Random(seed)
    odd = string.punctuation.replace("/", "") + " äß語🎉\u00a0" + "[]*?\\" * 4
    random_name = lambda: "".join(rng.choice(odd) for _ in range(rng.randint(2, 12)))
    return ["/".join(random_name() for _ in range(rng.randint(1, 2))) for _ in range(count)]


def small_state() -> TrainState:
    parameters = {"kernel": jnp.arange(12.0).reshape(3, 4), "blocks": [{"bias": jnp.ones(5)}]}
    return TrainState(jnp.int32(1), parameters, {"mu": jnp.zeros(()), "nu": (jnp.ones(2),)}, jnp.bool(False))


def shapes_of(state: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def save_and_restore(directory: Path) -> None:
    """Save two checkpoints, and restore the second one with a new `Checkpoints`."""
    state = small_state()
    with contextlib.closing(Checkpoints(directory)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, Record())
    with contextlib.closing(Checkpoints(directory, read_only=True)) as checkpoints:
        assert checkpoints.steps() == [2]
        assert_same_bits(checkpoints.restore(2, shapes_of(state)), state)


@pytest.mark.parametrize("name", [*ODD[::3], *slow(*ODD[1::3], *ODD[2::3], *random_names(seed=0, count=40))])
def test_a_checkpoint_under_an_odd_path_is_restored(tmp_path, name):
    save_and_restore(tmp_path / name / "checkpoints")
    assert {path.name for path in tmp_path.iterdir()} == {Path(name).parts[0]}, "nothing is written elsewhere"


def test_the_parent_of_a_symlink_is_that_of_its_target(tmp_path, monkeypatch):
    (tmp_path / "far" / "away [1]").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away [1]")
    monkeypatch.chdir(tmp_path)
    save_and_restore(Path("link") / ".." / "run" / "checkpoints")
    assert (tmp_path / "far" / "run" / "checkpoints" / "2").is_dir() and not (tmp_path / "run").exists()


def test_temporary_links_to_odd_paths_are_deleted(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    save_and_restore(tmp_path / "[odd]" / "checkpoints")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("text", ["new\nline", "\x1b[31mred", "tab\t", "\u2028", os.fsdecode(b"\xff")])
def test_a_directory_with_unprintable_text_is_refused(monkeypatch, text):
    monkeypatch.setattr(loop, "train", lambda *_, **__: None)
    said = type_in(monkeypatch, "train.py", "--config=configs/tiny.py", f"--workdir=runs/{text}")
    assert said and "found an unprintable character in the path" in said and "\n" not in said


def test_plain_names_are_kept_and_others_stay_distinct():
    plain = ["tiny", "tiny,model.position=alibi", "a-b_c.d=1e-3,e", "x" * files.LONGEST_NAME]
    assert [files.plain_name(text) for text in plain] == plain
    rng = random.Random(0)
    odd = {"".join(rng.choice("ab/*[]:'\" \n\\é") for _ in range(rng.randint(1, 300))) for _ in range(2000)}
    odd |= {"data.path=a/b", "data.path=a*b", "data.path=a[b", "x" * 241, "x" * 242}
    odd -= set(map(files.plain_name, odd))  # texts that are plain already
    names = {files.plain_name(text) for text in odd}
    assert len(names) == len(odd)
    assert all(re.fullmatch(r"[A-Za-z0-9._=,-]{1,120}", name) for name in names)


def test_odd_overrides_give_distinct_file_names():
    texts = [{"data.path": path} for path in ("a/b", "a_b", "a/**", "x" * 300)]
    stems = [suites.file_stem("perplexity", SuiteOptions("validation"), overrides=text) for text in texts]
    assert stems[1] == "perplexity,data.path=a_b" and len(set(stems)) == 4
    assert all(files.plain_name(stem) == stem for stem in stems)


def test_the_name_of_a_result_has_sorted_overrides_and_no_whole_path():
    both = {"model.rope.scaling": "ntk", "model.rope.factor": "4"}
    stems = [
        suites.file_stem("heads", SuiteOptions(), overrides=dict(order))
        for order in (both.items(), [*both.items()][::-1])
    ]
    assert stems[0] == stems[1] == "heads,model.rope.factor=4,model.rope.scaling=ntk"
    path = {"data.path": f"/home/{'me/' * 50}books.txt"}
    assert re.fullmatch(r"heads,data\.path=books\.txt-\w{8}", suites.file_stem("heads", SuiteOptions(), overrides=path))
    beside = [suites.file_stem("play", SuiteOptions(beside=f"/{folder}/tiny")) for folder in "ab"]
    assert beside[0] != beside[1] and all(stem.startswith("play,beside=tiny-") for stem in beside)


def test_errors_of_other_threads_are_shown_and_those_that_orbax_repeats_are_not():
    script = """
import logging, threading
from mini_gpt.commands import command_line

command_line.set_up()
def fail(error):
    raise error
thread = threading.Thread(target=fail, args=[ValueError("a defect")])
thread.start()
thread.join()
logging.getLogger("absl").error("a save failed", exc_info=OSError("No space left on device"))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("Traceback") == 1 and "\nValueError: a defect\n" in done.stderr


def flags_of(corpus_files, cache: Path) -> list[str]:
    fields = SMALL | {"data.path": corpus_files} | {"train.steps": 4, "model.position": "learned"}
    return ["--config=configs/default.py", f"--cache_dir={cache}", *(f"--config.{x}={y}" for x, y in fields.items())]


def run_commands(monkeypatch, flags, root: Path, capsys) -> None:
    """Train, resume, evaluate and sample a run in `root`."""
    run = root / "run"
    assert type_in(monkeypatch, "train.py", *flags, f"--workdir={run}") is None
    assert type_in(monkeypatch, "train.py", *flags, f"--workdir={run}") is None
    assert type_in(monkeypatch, "eval.py", f"--workdir={run}", "--config.context_length=16") is None
    assert json.loads((run / "eval" / "perplexity,context_length=16.json").read_text())["checkpoint_step"] == 4
    capsys.readouterr()
    assert type_in(monkeypatch, "sample.py", f"--workdir={run}", "--prompt=the", "--length=4") is None
    assert capsys.readouterr().out.startswith("the")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ODD, *random_names(seed=1, count=3)])
def test_all_commands_work_in_an_odd_directory(monkeypatch, corpus_files, tmp_path, capsys, name):
    root, flags = tmp_path / name, flags_of(corpus_files, tmp_path / "cache" / name)
    if name.startswith("-"):
        monkeypatch.chdir(tmp_path)  # a relative path that begins with a dash
        (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
        root = Path(name)
    run_commands(monkeypatch, flags, root, capsys)
    run = root / "run"
    hugging_face = "mini_gpt.commands.hugging_face"
    assert type_in(monkeypatch, hugging_face, "export", f"--workdir={run}", f"--output={root / 'out'}") is None
    plain = [flag for flag in flags if not flag.startswith("--config.model.") and "context_length" not in flag]
    imported = [f"--input={root / 'out'}", f"--workdir={root / 'imported'}", *plain, "--config.model.dtype=float32"]
    assert type_in(monkeypatch, hugging_face, "import", *imported) is None
    assert type_in(monkeypatch, "eval.py", f"--workdir={root / 'imported'}") is None
    origin = [f"--init_from={run}", f"--workdir={root / 'tuned'}"]
    assert type_in(monkeypatch, "train.py", *flags, *origin) is None
    vary = [flag for flag in flags if "model.position" not in flag] + ["--vary=model.position=none,('rope', 'none')"]
    vary = [flag.replace("num_layers=1", "num_layers=2") for flag in vary]
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # each run's process has one device
    assert type_in(monkeypatch, "mini_gpt.sweep", *vary, f"--workdir={root / 'sweep'}") is None
    capsys.readouterr()
    assert type_in(monkeypatch, "mini_gpt.sweep", *vary, f"--workdir={root / 'sweep'}") is None
    named = sorted(path.name for path in (root / "sweep").glob("*,seed=0*"))
    assert named[0] == "none,seed=0" and named[1].startswith("position=_") and files.plain_name(named[1]) == named[1]


@pytest.mark.slow
def test_the_default_workdir_works_in_an_odd_directory(monkeypatch, corpus_files, tmp_path):
    here = tmp_path / "[2024] a\\b" / "**"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    (here / "configs").symlink_to(REPOSITORY / "configs")
    flags = [*flags_of(corpus_files, tmp_path / "cache"), "--config.model.position=['rope']", "--config.train.steps=1"]
    assert type_in(monkeypatch, "train.py", *flags) is None
    (run,) = Path("runs").iterdir()
    assert re.fullmatch(r"default,context_length=32,[A-Za-z0-9._=,-]{1,100}", run.name)
    assert Run(run).step == 1


@pytest.mark.slow
def test_training_works_in_a_read_only_parent_directory(tmp_path):
    trainer = Trainer(tmp_path, "[parent]/run", cache="cache")
    trainer.workdir.mkdir(parents=True)
    trainer.workdir.parent.chmod(0o555)
    if os.getuid() == 0:  # root may write everywhere, unless this right is dropped
        if shutil.which("setpriv") is None:
            pytest.skip("root may write everywhere, and setpriv, which drops this right, is missing")
        trainer.before = ["setpriv", "--bounding-set=-dac_override"]
    kills.run_to_the_end(trainer)
    parent, run = trainer.workdir.parent, f"--workdir={trainer.workdir}"
    for command in (
        ["-m", "mini_gpt.hugging_face", "export", run, f"--output={parent / 'exported'}"],
        ["-m", "mini_gpt.sweep", *trainer.command, f"--workdir={parent / 'sweep'}", "--vary=model.position=rope,none"],
        ["train.py", *trainer.command, f"--workdir={parent / 'other'}"],
    ):
        started = [*trainer.before, sys.executable, *command]
        one_device = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        done = subprocess.run(started, cwd=REPOSITORY, capture_output=True, text=True, env=one_device)
        *_, last = done.stderr.splitlines()
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert last.startswith("error: ") and "Permission denied" in last, done.stderr
    assert [path.name for path in parent.iterdir()] == ["run"]

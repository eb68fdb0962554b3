"""What a resumed run may change is recorded, and what it may not is refused before any work."""

import json
import shutil
from pathlib import Path

import pytest

from mini_gpt.config import loading
from mini_gpt.data import corpora
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, start
from tests.commands.test_command_line import type_in
from tests.training.interruption import kill_after

# A value for each field that may change, other than that of `small`.
FREE = {
    "eval.every": 3, "eval.tokens": 128, "eval.sample_tokens": 1, "checkpoint.every": 3, "checkpoint.keep": 5,
    "mesh.data": -1, "mesh.fsdp": 2, "mesh.tensor": 2, "train.log_every": 2, "train.nonfinite": "skip",
    "train.nonfinite_limit": 3,
}  # fmt: skip


@pytest.mark.slow
def test_commands_follow_a_run_whose_corpus_has_moved(monkeypatch, small, tmp_path, corpus_files):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(Path(corpus_files).parent, old)
    config = small(train__steps=2, data__path=f"{old}/*.txt")
    loop.train(config, tmp_path / "run", conclude=False)
    old.rename(new)
    moved = [f"--config.{name}={value}" for name, value in (FREE | {"data.path": f"{new}/*.txt"}).items()]
    monkeypatch.chdir(tmp_path)
    assert type_in(monkeypatch, "train.py", "--workdir=run", "--cache_dir=elsewhere", *moved) is None
    changed = loading.differences(config, loading.read(Path("run/config.json")))
    assert {name: value for name, (_, value) in changed.items()} == FREE | {"data.path": f"{new}/*.txt"}
    assert list(Path("elsewhere").iterdir())
    assert type_in(monkeypatch, "eval.py", "--workdir=run") is None
    assert type_in(monkeypatch, "train.py", "--workdir=run") is None, "the run's own config resumes it"


@pytest.mark.slow
def test_more_checkpoints_than_before_are_no_lost_ones(small, tmp_path, caplog):
    """A run without a checkpoint at step 5 resumes with one at each step, also if it is killed at its new start."""
    kill_after(5, small(checkpoint__every=100, eval__every=100), tmp_path)
    often = small(checkpoint__every=1, eval__every=100)
    with caplog.at_level("INFO", "mini_gpt"):
        for steps in (0, 3):
            kill_after(steps, often, tmp_path)
    assert loading.read(tmp_path / "config.json") == often
    assert caplog.text.count("checkpoint.every was 100, is 1") == 1
    assert int(loop.train(often, tmp_path, conclude=False).step) == 8


def refusal(config, workdir, init_from=None):
    with pytest.raises(UserError) as refused:
        start.open_run(config, workdir, init_from)
    return str(refused.value)


def test_refused_runs_prepare_no_corpus(monkeypatch, trained, small, tmp_path):
    run = trained()
    monkeypatch.setattr(corpora, "open_corpus", lambda data: pytest.fail("a corpus was opened"))
    assert "data.corpus was 'text', is 'english'" in refusal(small(data__corpus="english"), run)
    assert refusal(small(), run, tmp_path / "other").endswith("random weights; leave it out, or name a new directory")
    new = tmp_path / "new"
    assert refusal(small(), new, tmp_path / "none").startswith(f"{tmp_path}/none/config.json: not found")
    assert refusal(small(model__d_model=64), new, run).startswith(f"--init_from: {run} has shape (32,) for")
    assert refusal(small(data__tokenizer="words"), new, run).startswith("data.tokenizer: found 'words'")
    shutil.rmtree(run / "checkpoints")
    assert refusal(small(), new, run).startswith(f"{run}/checkpoints: not found; train first")


def test_refusals_name_the_fields_that_the_user_wrote(trained, small):
    run = trained()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for fields, listed in (
        ({"context_length": 64}, "context_length was 32, is 64"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"seed": 1, "data__seed": 0}, "seed was 0, is 1"),
        ({"data__seed": 1}, "data.seed was 0, is 1"),
        ({"model__d_ff": 96}, "model.d_ff was 128, is 96"),
        ({"model__d_model": 64, "model__d_ff": 96}, "model.d_model was 32, is 64; model.d_ff was 128, is 96"),
    ):
        said = f"--workdir: {run} holds another run ({listed}); give the run's own values, or name a new directory"
        assert refusal(small(**fields), run).startswith(said)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_resumes_with_its_own_config(monkeypatch, small, tmp_path):
    seen = []
    monkeypatch.setattr(loop, "train", lambda config, workdir, **_: seen.append((config, workdir)))
    config, run = small(model__d_ff=96, data__corpus="english", data__path=None), tmp_path / "run"
    run.mkdir()
    missing = "error: --config: missing; "
    remedy = "name a file such as configs/tiny.py, or the --workdir of a run"
    assert type_in(monkeypatch, "train.py") == missing + remedy
    assert type_in(monkeypatch, "train.py", f"--workdir={run}") == f"{missing}{run} holds no run; {remedy}"
    (run / "config.json").write_text(json.dumps(loading.to_dict(config)))
    assert type_in(monkeypatch, "train.py", f"--workdir={run}") is None
    assert type_in(monkeypatch, "train.py", f"--workdir={run}", "--config.train.steps=9") is None
    assert seen == [(config, run), (loading.override(config, {"train.steps": 9}), run)]

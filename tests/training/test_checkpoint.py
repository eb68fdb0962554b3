"""A checkpoint is restored bit for bit or found damaged."""

import contextlib
import itertools
import random
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.checkpoint import Checkpoints, Damaged, Record
from mini_gpt.training.run import Run
from mini_gpt.training.train_state import TrainState
from tests.training.interruption import assembled, assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of failed Orbax reads


@pytest.fixture
def written(small, tmp_path):
    """Return (directory of checkpoints 4 and 8, abstract state, {step: state})."""
    config = small(train__steps=8, train__log_every=8, eval__sample_tokens=0)
    loop.train(config, tmp_path / "run", conclude=False)
    abstract = assembled(config).abstract_state
    directory = tmp_path / "run" / "checkpoints"
    with contextlib.closing(Checkpoints(directory, read_only=True)) as checkpoints:
        return directory, abstract, {step: checkpoints.restore(step, abstract) for step in (4, 8)}


def restore_last(directory, abstract):
    with contextlib.closing(Checkpoints(directory)) as checkpoints:
        return checkpoints.restore_last(abstract)


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_a_damaged_file_never_changes_the_restored_state(written, tmp_path, damage, caplog):
    """For each damaged file, the last checkpoint is restored bit for bit, or moved to damaged/ as a whole."""
    directory, abstract, states = written
    rng, aside = random.Random(0), []
    paths = [path.relative_to(directory) for path in (directory / "8").rglob("*") if path.is_file()]
    assert len(paths) > 15
    for number, path in enumerate(sorted(p for p in paths if (directory / p).stat().st_size)):
        copy = tmp_path / str(number) / "checkpoints"
        shutil.copytree(directory, copy)
        damage(copy / path, rng)
        caplog.clear()
        step, state = restore_last(copy, abstract)
        assert_same_bits(state, states[step])
        moved = copy.parent / "damaged" / "checkpoints-8"
        assert (step == 4) == moved.exists() == (not (copy / "8").exists())
        if step == 4:
            aside.append(str(path))
            assert f"{copy / '8'} is damaged" in caplog.text and str(moved) in caplog.text
        shutil.rmtree(copy.parent)
    assert any("parameters/d/" in path for path in aside) and any("training/d/" in path for path in aside)
    assert "8/format/metadata" in aside


@pytest.mark.slow
def test_nothing_is_moved_if_every_checkpoint_is_damaged(written, tmp_path):
    directory, abstract, _ = written
    for step in (8, 4):
        (directory / str(step) / "format" / "metadata").write_text("{")
    with pytest.raises(UserError, match=r"checkpoints/8: damaged \(.*and no other checkpoint can be restored; copy"):
        restore_last(directory, abstract)
    assert (directory / "8").exists() and (directory / "4").exists()
    with pytest.raises(UserError, match=r"checkpoints/8: damaged .*; give another --checkpoint"):
        Run(directory.parent)


def small_state():
    """Return a state of one array, and its shapes."""
    arrays = {"a": jnp.arange(6.0)}
    state = TrainState(jnp.int32(0), arrays, arrays, jnp.bool(False))
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.mark.parametrize("arrays", [{"a": 7}, {"a": 5}, {"b": 6}, {"a": 6, "b": 6}], ids=str)
def test_other_shapes_than_the_configs_are_damage(tmp_path, arrays):
    """As after a change of config.json by hand."""
    state, abstract = small_state()
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(4, state, Record())
    of = abstract.parameters["a"].sharding
    wanted = {name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=of) for name, size in arrays.items()}
    checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
    with contextlib.closing(checkpoints), pytest.raises(UserError, match=r"4: damaged \(.*\)"):
        checkpoints.restore_parameters("last", wanted)


@pytest.mark.slow
def test_a_run_resumes_exactly_after_a_damaged_checkpoint(small, tmp_path):
    config = small(train__steps=12)
    uninterrupted = loop.train(config, tmp_path / "uninterrupted", conclude=False)
    loop.train(small(train__steps=8), tmp_path / "run", conclude=False)
    data = next((tmp_path / "run" / "checkpoints" / "8" / "parameters" / "d").iterdir())
    flip(data, random.Random(1))
    assert_same_bits(loop.train(config, tmp_path / "run", conclude=False), uninterrupted)
    assert (tmp_path / "run" / "damaged" / "checkpoints-8").exists()
    rows = [(tmp_path / name / "metrics.jsonl").read_text().count("\n") for name in ("uninterrupted", "run")]
    assert rows == [12, 12]


@pytest.mark.slow
def test_the_checksum_finds_swapped_rows_of_an_array(written, monkeypatch):
    directory, abstract, _ = written

    def exchanged(self, part, *args, **kwargs):
        restored = original(self, part, *args, **kwargs)
        if part.name == "parameters":
            up = restored["blocks"][0]["mlp"]["up"]
            up["kernel"] = up["kernel"].at[3].set(up["kernel"][5]).at[5].set(up["kernel"][3])
        return restored

    original = ocp.StandardCheckpointHandler.restore
    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", exchanged)
    with (
        contextlib.closing(Checkpoints(directory, read_only=True)) as checkpoints,
        pytest.raises(Damaged, match=r"parameters/blocks/0/mlp/up/kernel has another checksum"),
    ):
        checkpoints.restore(8, abstract)


def test_a_clock_that_jumps_during_a_save_does_not_end_it(tmp_path, monkeypatch):
    state, _ = small_state()
    hours = itertools.count()
    clock = types.SimpleNamespace(time=lambda: 3600.0 * next(hours))
    monkeypatch.setattr("orbax.checkpoint._src.futures.future.time", clock)
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(4, state, Record())
        checkpoints.wait()
        assert checkpoints.steps() == [4]


def test_reading_a_run_logs_no_warning_of_a_read_only_directory(written, caplog):
    with contextlib.closing(Checkpoints(written[0], read_only=True)) as checkpoints:
        checkpoints.restore(8, written[1])
    assert "read only" not in caplog.text


def test_only_checkpoints_after_the_restored_one_are_moved_away(tmp_path):
    """Checkpoint 2 was being deleted when the process was killed; 8 is damaged."""
    state, abstract = small_state()
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=9)) as checkpoints:
        for step in (2, 4, 8):
            checkpoints.save(step, state, Record())
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "format")
    (tmp_path / "checkpoints" / "8" / "format" / "metadata").write_text("{")
    assert restore_last(tmp_path / "checkpoints", abstract)[0] == 4
    assert {path.name for path in (tmp_path / "damaged").iterdir()} == {"checkpoints-8"}
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=2)) as checkpoints:
        checkpoints.save(6, state, Record())
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6]


def test_the_last_checkpoints_and_the_best_on_the_last_sample_are_kept(tmp_path):
    state, _ = small_state()
    losses = {1: (1.5, 64), 2: (1.6, 64), 3: (1.9, 128), 4: (1.8, 128), 5: (1.85, 128)}
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", keep=1)) as checkpoints:
        for step, (loss, eval_tokens) in losses.items():
            checkpoints.save(step, state, Record(loss, eval_tokens))
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints", read_only=True)) as checkpoints:
        assert checkpoints.steps() == [4, 5] and checkpoints.resolve("best") == 4
        assert (checkpoints.best_loss(64), checkpoints.best_loss(128)) == (float("inf"), 1.8)

"""Checkpoints: restored bit for bit or found damaged, checksums of arrays, and what a resumed run may change."""

import contextlib
import itertools
import json
import random
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mini_gpt.config import loading
from mini_gpt.data import corpora
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, start
from mini_gpt.training.checkpoint import Checkpoints, Damaged, Record, checksums
from mini_gpt.training.run import Run
from mini_gpt.training.train_state import TrainState
from tests.commands.test_command_line import type_in
from tests.training.interruption import assembled, assert_same_bits, kill_after

# A checkpoint is restored bit for bit or found damaged.

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


# Checksums of arrays agree with their definition on any mesh, and notice any flipped bit.


def independent_sums(array: np.ndarray) -> str:
    """Return the checksum by its definition, one entry at a time."""
    words = array.reshape(-1).view(f"uint{8 * array.dtype.itemsize}").tolist()
    sums = []
    for seed in (0x9E3779B9, 0x7F4A7C15):
        total = 0
        for place, word in enumerate(words):
            x = place ^ seed
            x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
            x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
            total += word * ((x ^ (x >> 16)) | 1)
        sums.append(f"{total % 2**32:08x}")
    return "".join(sums)


@pytest.mark.parametrize(
    "shape, dtype", [((), "int32"), ((5,), "float32"), ((8, 16), "float32"), ((4, 3, 8), "bfloat16")]
)
def test_checksums_on_any_mesh_equal_an_independent_sum(shape, dtype):
    array = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    expected = {"x": independent_sums(np.asarray(array))}
    assert checksums({"x": array}) == checksums({"x": np.asarray(array)}) == expected
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    if shape and shape[-1] % 8 == 0:
        divided = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 1), "d")))
        assert checksums({"x": divided}) == expected


def test_any_flipped_bit_changes_both_sums():
    array = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    before = checksums({"x": array})["x"]
    for bit in range(32 * array.size):
        words = array.copy().view(np.uint32).reshape(-1)
        words[bit // 32] ^= np.uint32(1 << bit % 32)
        after = checksums({"x": words.view(np.float32).reshape(array.shape)})["x"]
        assert before[:8] != after[:8] and before[8:] != after[8:]


# What a resumed run may change is recorded, and what it may not is refused before any work.

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

"""Runs that start from the weights of another run (--init_from)."""

import contextlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.model import parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import initial_weights, loop, train_state
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.run import Run
from mini_gpt.training.train_state import TrainState
from tests.training.interruption import assert_same_bits, kill_after


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(small, tmp_path, caplog):
    source = loop.train(small(model__position="rope"), tmp_path / "source")
    longer = {"context_length": 64, "model__rope__scaling": "linear", "model__rope__factor": 2.0, "seed": 5}
    config = small(model__position="rope", optimizer__learning_rate=1e-12, optimizer__weight_decay=0.0, **longer)
    with caplog.at_level("INFO", "mini_gpt"):
        tuned = loop.train(config, tmp_path / "tuned", init_from=tmp_path / "source")
    for left, right in zip(*(jax.tree.leaves(state.parameters) for state in (source, tuned)), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-9)
    assert int(tuned.step) == 8 and "source, step 8" in caplog.text and "context_length 32 → 64" in caplog.text
    assert json.loads((tmp_path / "tuned" / "init_from.json").read_text())["checkpoint_step"] == 8
    # The same command resumes the run, and so does the run directory alone; another --init_from is refused.
    fast = small(model__position="rope", checkpoint__every=2, **longer)
    uninterrupted = loop.train(fast, tmp_path / "uninterrupted", init_from=tmp_path / "source")
    for steps, given in ((1, tmp_path / "source"), (5, None)):  # before and after the first checkpoint
        kill_after(steps, fast, tmp_path / "cut", init_from=given)
    assert_same_bits(uninterrupted, loop.train(fast, tmp_path / "cut"))
    with pytest.raises(UserError, match=r"--init_from: found .*tuned; the run in .*source was started from random"):
        loop.train(small(model__position="rope"), tmp_path / "source", init_from=tmp_path / "tuned")


@pytest.mark.slow
def test_parameters_without_optimizer_state_are_trained_in_place_or_anew(small, tmp_path):
    """The checkpoint of an import is such a one; a new run from it and training in place end with the same bits."""
    config, alone = small(checkpoint__every=2), tmp_path / "alone"
    source = loop.train(config, alone)
    for name in ("checkpoints", "metrics.jsonl", "tensorboard", "eval"):
        path = alone / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    kept = jax.tree.map(np.asarray, source.parameters)
    with contextlib.closing(Checkpoints(alone / "checkpoints")) as checkpoints:
        checkpoints.save(0, TrainState(jnp.int32(0), kept, None, jnp.bool(False)), Record())
    assert not (alone / "checkpoints" / "0" / "training").exists()
    read = Run(alone)
    assert read.step == 0
    for left, right in zip(jax.tree.leaves(kept), jax.tree.leaves(read.model.parameters), strict=True):
        np.testing.assert_array_equal(left, right)
    anew = loop.train(config, tmp_path / "anew", init_from=alone)
    assert_same_bits(anew, loop.train(config, alone))
    assert int(anew.step) == 8 and any(map(np.any, map(np.asarray, jax.tree.leaves(anew.optimizer_state))))


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_weights_of_the_other_layout_of_layers_are_read(small, tmp_path, stacked):
    fields = {"model__num_layers": 2, "train__steps": 1}
    loop.train(small(model__scan_layers=stacked, **fields), tmp_path / "run", conclude=False)
    convert = jax.jit(lambda tree: parameters.with_layers(tree, stacked=not stacked))
    expected = convert(Run(tmp_path / "run").model.parameters)
    read = Run(tmp_path / "run", overrides={"model.scan_layers": str(not stacked)}).model.parameters
    jax.tree.map(np.testing.assert_array_equal, read, expected)

    other = small(model__scan_layers=not stacked, mesh__data=1, mesh__fsdp=4, **fields)
    abstract = train_state.abstract(other, 257, sharding.make_mesh(*other.mesh.sizes))[1].parameters
    taken = initial_weights.read(tmp_path / "run", None, other, sharding.make_mesh(*other.mesh.sizes))[1]
    jax.tree.map(np.testing.assert_array_equal, taken, expected)
    assert jax.tree.map(lambda leaf: leaf.sharding, taken) == jax.tree.map(lambda leaf: leaf.sharding, abstract)
    with pytest.raises(UserError, match=rf"model\.scan_layers was {stacked}, is {not stacked}"):
        loop.train(other, tmp_path / "run")


@pytest.mark.slow
def test_weights_of_another_shape_are_refused(small, tmp_path):
    loop.train(small(model__position="learned"), tmp_path / "source")
    for overrides, message in (
        (
            {"model__position": "learned", "context_length": 64},
            r"has shape \(32, 32\) for the parameter .*learned/embedding; the config needs",
        ),
        (
            {"model__position": "rope", "model__num_layers": 3},
            r"has nothing for the parameter blocks/1/\S+; the config",
        ),
        ({"data__tokenizer": "characters"}, r"data\.tokenizer: found 'characters', but the run of .* has 'bytes'"),
    ):
        with pytest.raises(UserError, match=message):
            loop.train(small(**overrides), tmp_path / "new", init_from=tmp_path / "source")
    with pytest.raises(UserError, match=r"config\.json: not found"):
        loop.train(small(), tmp_path / "new", init_from=tmp_path / "nothing")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_scaling_needs_the_context_of_the_initial_weights(small, tmp_path):
    loop.train(small(model__position="rope", train__steps=1), tmp_path / "source", conclude=False)
    longer = {"model__position": "rope", "context_length": 64, "train__steps": 1, "model__rope__factor": 4.0}
    start = lambda name, **fields: loop.train(
        small(**longer, **fields), tmp_path / name, init_from=tmp_path / "source", conclude=False
    )
    message = (
        r"model\.rope\.original_context: found 16, but the run of .*source has 32; give --config\.model\.rope\.ori"
    )
    with pytest.raises(UserError, match=message):
        start("yarn", model__rope__scaling="yarn")
    start("yarn", model__rope__scaling="yarn", model__rope__original_context=32)
    longer["model__rope__factor"] = 2.0  # 64 / 2 is the context of the source
    start("linear", model__rope__scaling="linear")


@pytest.mark.slow
def test_a_run_keeps_the_tokenizer_of_its_first_weights(small, tmp_path, corpus_files):
    loop.train(small(data__tokenizer="characters"), tmp_path / "source")
    (tmp_path / "few").mkdir()
    for number in range(120):
        (tmp_path / "few" / f"{number}.txt").write_text("the cat " * (20 + number % 7))
    config = small(data__tokenizer="characters", data__path=f"{tmp_path}/few/*.txt")
    loop.train(config, tmp_path / "tuned", init_from=tmp_path / "source")
    assert Run(tmp_path / "tuned").tokenizer.to_dict() == Run(tmp_path / "source").tokenizer.to_dict()

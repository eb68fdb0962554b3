"""Settings without effect are named; and runs that start from the weights of another run."""

import collections
import contextlib
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import presets
from mini_gpt.config import loading
from mini_gpt.data import tasks
from mini_gpt.data.text_batches import TextBatches, Vocab
from mini_gpt.model import parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import definition, new_runs
from mini_gpt.training import initial_weights, loop, settings, start, train_state
from mini_gpt.training.checkpoint import Checkpoints, Record
from mini_gpt.training.optimizer import make_schedule
from mini_gpt.training.run import Run
from mini_gpt.training.train_state import TrainState
from tests.conftest import REPOSITORY
from tests.training.interruption import assert_same_bits, kill_after

# Settings that cannot take effect are named, with the value that is reached; the project's own configs have none.

STEPS = 200


def warned(small, schedule, **fields):
    """Return whether the config of a schedule over 200 steps has a warning, and its learning rate in each step."""
    given = {"schedule": schedule} | fields
    config = small(train__steps=STEPS, **{f"optimizer__{name}": value for name, value in given.items()})
    rates = np.asarray(make_schedule(config.optimizer, STEPS)(jnp.arange(STEPS)), np.float64)
    return [line.split(":")[0] for line in settings.without_effect(config, None)], rates


@pytest.mark.parametrize(
    "schedule, warmup", [("constant", 201), ("inverse_sqrt", 200), ("cosine", 200), ("wsd", 200), ("wsd", 1000)]
)
def test_a_warmup_that_leaves_no_step_is_named(small, schedule, warmup):
    found, rates = warned(small, schedule, warmup_steps=warmup)
    assert found == ["optimizer.warmup_steps"] and np.all(np.diff(rates) > 0)


@pytest.mark.parametrize("warmup", [20, 150, 199])
def test_a_shortened_decay_is_named(small, warmup):
    found, rates = warned(small, "wsd", warmup_steps=warmup, decay_fraction=0.95)
    assert found == ["optimizer.decay_fraction"] and (np.diff(rates) < 0).sum() < 190


@pytest.mark.parametrize(
    "schedule, fields",
    [
        ("constant", {"warmup_steps": STEPS}),
        ("inverse_sqrt", {"warmup_steps": STEPS - 1}),
        ("cosine", {"warmup_steps": 0}),
        ("wsd", {"warmup_steps": 20, "decay_fraction": 0.9}),  # no stable phase, but both are complete
        ("wsd", {"warmup_steps": 20, "decay_fraction": 1.0}),  # all steps after the warm-up
    ],
)
def test_a_schedule_that_fits_is_silent(small, schedule, fields):
    assert warned(small, schedule, **fields)[0] == []


def test_a_batch_larger_than_the_text_is_named(small):
    config = small(context_length=10, train__batch_size=64)
    train_batches = TextBatches(np.arange(10 * 20 + 10), config, vocab=Vocab(256, 256))
    places = train_batches[0]["inputs"][:, 0] // 10
    uses = len(places) / len(set(places.tolist()))
    (found,) = settings.without_effect(config, train_batches.rows_per_epoch)
    assert found.startswith(
        f"train.batch_size: found 64; the training data have 20 rows, so each is about {uses:.3g} times in a step"
    )
    assert settings.without_effect(config, 64) == settings.without_effect(config, None) == []


def test_the_passes_are_the_uses_of_each_window(small):
    config = small(context_length=10, train__batch_size=6, train__steps=15)
    train_batches = TextBatches(np.arange(10 * 30 + 10), config, vocab=Vocab(256, 256))
    starts = np.concatenate([train_batches[step]["inputs"][:, 0] for step in range(15)])
    uses = [collections.Counter((starts[epoch : epoch + 30] // 10).tolist()) for epoch in (0, 30, 60)]
    assert all(set(used.values()) == {1} and len(used) == 30 for used in uses)
    assert settings.passes(config, train_batches.rows_per_epoch) == (
        "15 steps of 6 × 10 tokens: 3 passes over the training data"
    )


def test_the_passes_of_span_corruption_count_its_text(small):
    fields = {"model__encoder_layers": 1, "train__objective": "span_corruption", "source_length": 32}
    config = small(train__steps=100, **fields)
    train_batches = TextBatches(np.arange(5000), config, vocab=Vocab(256, 256))
    (said, unit), rows = settings.passes(config, train_batches.rows_per_epoch).split(" × "), train_batches.length
    assert unit.startswith(f"{rows} tokens: {100 * 8 / train_batches.rows_per_epoch:.3g} passes") and said[-1] == "8"
    assert rows > 32


def test_the_passes_of_pairs_count_rows(small):
    fields = {"model__encoder_layers": 1, "data__corpus": "pairs", "data__path": "unread.tsv"}
    said = settings.passes(small(train__steps=1000, **fields), 250)
    assert said == "1,000 steps of 8 rows of pairs: 32 passes over the training data"


def test_few_and_many_passes_keep_their_digits(small):
    said = [settings.passes(small(), rows).split(": ")[1] for rows in (64, 64 * 300, 2, 1)]
    found = [text.removesuffix(" over the training data") for text in said]
    assert found == ["1 pass", "0.00333 passes", "32 passes", "64 passes"]
    assert "tokens: 12,800 passes over" in settings.passes(small(train__steps=1600), 1)


def test_a_run_says_its_passes_once_and_its_warnings_each_time(small, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mini_gpt")
    config = small(train__steps=2, optimizer__warmup_steps=10, eval__every=2, checkpoint__every=2)
    for new in (True, False):
        caplog.clear()
        loop.train(config, tmp_path, conclude=False)
        said = [record.getMessage() for record in caplog.records if record.name == start.log.name]
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == 1 and "warmup_steps: found 10; the learning rate" in warned[0] and warned[0] in said
        assert any("2 steps of 8 × 32 tokens" in line for line in said) == new


def shipped():
    """Return all configs by name: a file that takes an argument, once for each of its values."""
    arguments = {"tasks": [name.removeprefix("task:") for name in tasks.known()], "presets": presets.SHAPES}
    arguments["positions"] = ["full", "quick"]
    files = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py") if path.stem != "__init__")
    plain = [f"configs/{name}.py" for name in files if name not in arguments]
    names = plain + [f"configs/{name}.py:{argument}" for name in arguments for argument in arguments[name]]
    return {name: loading.load(name) for name in names}


@pytest.mark.slow
def test_the_projects_own_configs_have_no_warning():
    loaded, silent = shipped(), set()
    for path in sorted((REPOSITORY / "configs" / "studies").glob("*.py")):
        plan = definition.load(str(path), {})
        loaded |= {f"{path.name}: {condition}": config for condition, config in plan.configs.items()}
        silent |= {(f"{path.name}: {condition}", line) for condition, line in new_runs.of_other_conditions(plan)}
    assert len(loaded) > 100
    found = {(name, line) for name, config in loaded.items() for line in settings.without_effect(config, None)}
    assert found == silent, "fields that a study shares with conditions that do not read them"


def test_fields_of_an_encoding_that_no_layer_has_are_named():
    fields = {"model.position": ("alibi", "none"), "model.num_layers": 2, "model.t5.max_distance": 99}
    load = lambda more: loading.load("configs/default.py", fields | more)
    assert settings.unread(load({})) == {
        "model.t5.max_distance": "model.t5.max_distance: found 99, but no layer has model.position=t5; leave it out"
    }
    assert settings.unread(load({"model.position": ("t5", "none")})) == {}
    rope = {"model.t5.max_distance": 128, "model.rope.base": 500.0}
    assert [*settings.unread(load(rope))] == ["model.rope.base"]
    assert settings.unread(load(rope | {"model.rope.original_context": 7})).keys() == {
        "model.rope.base",
        "model.rope.original_context",
    }
    for name in ("pope", "accumulated"):
        assert settings.unread(load(rope | {"model.position": name})) == {}


# Runs that start from the weights of another run (--init_from).


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

"""Non-finite losses and gradients never change the state: the run stops, or skips the step."""

import json
import math
import re

import jax
import numpy as np
import pytest

from mini_gpt.data.text_batches import TextBatches
from mini_gpt.objectives.text import TextObjective
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import tuning
from mini_gpt.training import loop, writers
from mini_gpt.training.checkpoint import Checkpoints
from tests.conftest import slow
from tests.training.interruption import assembled, assert_same_bits, rows, wrap_step

FIELDS = {"train__steps": 8, "checkpoint__every": 4, "eval__every": 8, "model__dropout": 0.2}


@pytest.fixture
def poison(monkeypatch):
    """Return a function that takes indices of batches and makes the weights of these batches infinite."""
    original = TextBatches.__getitem__

    def make(*places):
        def poisoned(self, place):
            batch = original(self, place)
            if place in places:
                batch["weights"] = batch["weights"] * np.float32(math.inf)
            return batch

        monkeypatch.setattr(TextBatches, "__getitem__", poisoned)

    return make


def trained_on(config, places, parameters=None):
    """Return the state after one step on the batch of each index, in turn. None is a skipped step.

    parameters: the first ones; None for random ones.
    """
    run = assembled(config)
    state, step = run.first_state(parameters), run.lowered_step().compile()
    for place in places:
        if place is None:
            state = state._replace(step=state.step + 1)
        else:
            state, _ = step(state, sharding.put_batch(run.objective.train_batches[place], run.mesh))
    return state


def test_a_validation_loss_that_is_not_finite_is_null_in_json(small, tmp_path, monkeypatch):
    monkeypatch.setattr(TextObjective, "scalars", lambda *_: {"validation/loss": math.nan})
    loop.train(small(**FIELDS), tmp_path, conclude=False)
    strictly = lambda text: json.loads(text, parse_constant=pytest.fail)
    last = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["step"] == 8 and last["validation/loss"] is None
    assert "validation/loss" not in writers.read(tmp_path / "metrics.jsonl")[-1]
    assert strictly((tmp_path / "checkpoints" / "8" / "format" / "metadata").read_text())["validation_loss"] is None


def logged_steps(workdir):
    return [row["step"] for row in rows(workdir)]


class LateMetric:
    """A metric that is not ready when the next step starts."""

    def __init__(self, value):
        self.value = value

    def is_ready(self):
        return False

    def __bool__(self):
        return bool(self.value)

    def __float__(self):
        return float(self.value)


@pytest.fixture(params=["at once", *slow("a step later")])
def metrics_delay(request, monkeypatch):
    """Make the metrics of a step ready at once, or only after the next step has started."""
    if request.param == "at once":
        return

    def delayed(step):
        def late(state, batch):
            state, metrics = step(state, batch)
            return state, {name: LateMetric(value) for name, value in metrics.items()}

        return late

    wrap_step(monkeypatch, delayed)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stop_saves_the_step_before_and_can_resume(small, tmp_path, poison, metrics_delay, accumulation, capsys):
    config = small(train__accumulation_steps=accumulation, **FIELDS)
    before = trained_on(config, range(5))
    poison(5)
    with pytest.raises(UserError) as raised:
        loop.train(config, tmp_path, conclude=False)
    found = re.fullmatch(
        r"step 6: found loss (nan|inf), gradient norm nan at learning rate (\S+); step 5 is saved; resume with "
        r"train\.nonfinite=skip, or start a new run with a lower learning rate",
        str(raised.value),
    )
    assert tuning.DIVERGED.search(str(raised.value)), "studies know it"
    rate = config.optimizer.learning_rate * math.sqrt(config.optimizer.warmup_steps / 6)
    assert float(found[2]) == pytest.approx(rate, rel=1e-3)
    assert logged_steps(tmp_path) == [1, 2, 3, 4, 5]
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), before)
    checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert checkpoints.steps() == [4, 5]
    assert_same_bits(checkpoints.restore(5, abstract), before)
    with pytest.raises(UserError, match="step 6: found loss"):  # the same command stops at the same step
        loop.train(config, tmp_path, conclude=False)
    skipping = small(train__accumulation_steps=accumulation, train__nonfinite="skip", **FIELDS)
    assert_same_bits(loop.train(skipping, tmp_path, conclude=False), trained_on(config, [0, 1, 2, 3, 4, None, 6, 7]))
    assert logged_steps(tmp_path) == list(range(1, 9))


@pytest.mark.slow
def test_a_non_finite_first_step_stops(small, tmp_path, poison):
    poison(0)
    with pytest.raises(UserError, match=r"step 1: found loss .*; no step is saved yet; resume with"):
        loop.train(small(**FIELDS), tmp_path, conclude=False)


@pytest.mark.slow
def test_skipped_steps_change_only_the_step_and_are_limited(small, tmp_path, poison, metrics_delay, caplog):
    config = small(train__nonfinite="skip", train__nonfinite_limit=2, **FIELDS)
    expected = trained_on(config, [0, None, 2, 3, 4, None, 6, 7])
    poison(1, 5)
    caplog.set_level("WARNING", "mini_gpt")
    assert_same_bits(loop.train(config, tmp_path / "two", conclude=False), expected)
    assert "step 2: found loss" in caplog.text and "skipped, 2 of at most 2" in caplog.text
    logged = rows(tmp_path / "two")
    assert [row["step"] for row in logged] == list(range(1, 9))
    assert [row["step"] for row in logged if "train/loss" not in row] == [2, 6]
    assert all(math.isfinite(value) for row in logged for value in row.values())
    poison(1, 5, 6)
    with pytest.raises(UserError, match=r"step 7: .*; step 4 is saved; train\.nonfinite_limit allows 2 such steps"):
        loop.train(config, tmp_path / "three", conclude=False)
    with pytest.raises(UserError, match="step 7"):  # the count is in the checkpoint
        loop.train(config, tmp_path / "three", conclude=False)


@pytest.mark.slow
def test_stopping_after_a_resume_keeps_the_best_checkpoint(small, tmp_path, poison):
    fields = FIELDS | {"eval__every": 4, "checkpoint__keep": 1}
    loop.train(small(**fields | {"train__steps": 4}), tmp_path, conclude=False)
    poison(6)
    with pytest.raises(UserError, match=r"step 7: found loss .*; step 6 is saved"):
        loop.train(small(**fields), tmp_path, conclude=False)
    checkpoints = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert checkpoints.steps() == [4, 6] and checkpoints.resolve("best") == 4
    assert checkpoints.record(6).validation_loss is None

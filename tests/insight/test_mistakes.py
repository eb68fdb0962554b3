"""Mistakes in the code of a model: each does what its name says, and a model that was trained with one is found."""

import dataclasses
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import examination
from docs.tutorials import find_the_fault
from mini_gpt.insight.diagnosis import losses, mistakes, probe
from mini_gpt.insight.diagnosis.losses import Losses
from mini_gpt.insight.diagnosis.mistakes import Mistake
from mini_gpt.model import build
from mini_gpt.model.attention.context import Context, Coordinates, Mask
from tests.conftest import slow
from tests.insight import broken
from tests.random_models import random_model

TOKEN_BYTES = np.array([1] * 256 + [0])
RIGHT = Mistake("scale", 1.0)
# {kind: (number of the mistake, the same model by another config or other weights)}
SAME = {
    "base": (100.0, broken.fields(model__rope__base=100.0)),
    "scale": (4.0, broken.scale(broken.queries, 4)),
    "future": (0.0, broken.fields(model__causal=False, train__objective="masked")),
    "no order": (0.0, broken.fields(model__position="none")),
}


@pytest.fixture
def random(small):
    """Return a function that makes a random model with RoPE, and windows of random tokens."""

    def make(**overrides):
        model = random_model(small(**{"model__position": "rope"} | overrides), TOKEN_BYTES)
        return model, np.random.default_rng(0).integers(256, size=(4, 33)).astype(np.int32)

    return make


def nll(model, windows_BM, shift=0):
    """Return the loss of each window, from the logits; shift: of the targets."""
    log_BLV = np.asarray(jax.nn.log_softmax(model(windows_BM[:, :-1])))
    targets_BL = windows_BM[:, 1:]
    losses_BL = -np.take_along_axis(np.roll(log_BLV, shift, axis=1), targets_BL[..., None], 2)[..., 0]
    return losses_BL.mean(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAME)
def test_a_mistake_is_the_change_of_its_name(random, kind):
    (number, change), (model, windows_BM) = SAME[kind], random()
    mistake, changed = Mistake(kind, number), change(model)
    plain = dataclasses.replace(changed, config=model.config)  # the objective of the losses stays
    found_B, right_B = (mistakes.losses(model, windows_BM, each) for each in (mistake, RIGHT))
    np.testing.assert_allclose(found_B, nll(plain, windows_BM), rtol=1e-4)
    np.testing.assert_allclose(right_B, nll(model, windows_BM), rtol=1e-4)
    assert np.abs(found_B - right_B).max() > 1e-3


@pytest.mark.slow
def test_shifted_targets_and_scanned_layers(random):
    model, windows_BM = random(model__scan_layers=True, model__num_layers=2)
    for shift in (-1, 1):
        found_B = mistakes.losses(model, windows_BM, Mistake("targets", shift))
        np.testing.assert_allclose(found_B, nll(model, windows_BM, shift), rtol=1e-4)


def test_a_late_mask_hides_weights_after_the_softmax(small):
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4)).astype(np.float32)
    core = mistakes.LateMask(small(model__d_model=8, model__num_heads=2).model)
    coordinates = Coordinates.of(5)
    context = Context(coordinates, coordinates, Mask(causal=True))
    found = np.asarray(core.choose(q, k, v, context, None)(q, k, v, context))
    for head in range(2):
        weights = np.exp(q[0, :, head] @ k[0, :, head].T / 2)
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found[0, :, head], np.tril(weights) @ v[0, :, head], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["norm", "base", *slow(*(kind for kind in mistakes.CHECKS if kind not in ("norm", "base")))]
)
def test_a_mistake_changes_no_parameter(small, kind):
    config = small(model__position="rope", model__num_layers=2).model
    number = {"scale": 4.0, "base": 100.0, "targets": 1, "shuffled order": 3}.get(kind, 0.0)
    mistake = Mistake(kind, number, ("final_norm", "blocks/1/mlp_norm") if kind == "norm" else ())
    wrong = nnx.eval_shape(lambda: mistakes.make(build.make(config, 257, rngs=nnx.Rngs(0)), mistake))
    definition, parameters = build.split(wrong)
    expected, shapes = build.abstract(config, 257)
    assert jax.tree.map(lambda x: x.shape, parameters) == jax.tree.map(lambda x: x.shape, shapes)
    assert definition != expected


@pytest.mark.slow
def test_positions_that_do_not_matter_are_found(random):
    model, windows_BM = random()
    silent = broken.scale(broken.queries, 0.0)(model)  # without queries, attention is even at all positions
    (result,) = mistakes.unused_positions(silent, windows_BM)
    assert result.found and abs(result.value) < 1e-6 and result.check == "positions"
    rise = nll(SAME["no order"][1](model), windows_BM).mean() / nll(model, windows_BM).mean() - 1
    (result,) = mistakes.unused_positions(model, windows_BM)
    assert result.value == pytest.approx(rise, abs=1e-4)
    for position in ("learned", "fox"):  # which are at the input, or not read
        assert mistakes.unused_positions(random(model__position=position)[0], windows_BM) == []


@pytest.mark.parametrize("found, is_named", [(2.0, True), (1.99, True), (1.9, False), (2.19, True), (2.3, False)])
def test_a_mistake_is_named_if_it_gives_the_recorded_loss(monkeypatch, found, is_named):
    monkeypatch.setattr(mistakes, "search", lambda *_: Mistake("future"))
    monkeypatch.setattr(mistakes, "losses", lambda *_: np.full(4, found))
    measured = Losses(3.0, 3.0, 2.0, 0.0, True, None, 4.0, None)

    def checks(**others):
        results = mistakes.explanation(None, None, None, dataclasses.replace(measured, **others))
        return {result.check: result.value for result in results}

    assert checks() == ({"trained mask": pytest.approx(3 - found)} if is_named else {})
    assert ("trained mask" in checks(same_step=False)) is (found < 2.2), "then 1.9 is near enough"
    assert checks(recorded=3.1) == checks(recorded=None) == checks(loss=np.nan) == {}


def test_blocks_are_the_sample_of_the_loss(random):
    model, _ = random()
    tokens = np.random.default_rng(1).integers(256, size=3000)
    blocks_BM = probe.blocks(losses.sample(model, tokens, 1024), 33, None)
    assert blocks_BM.shape == (32, 33), "two blocks in each of sixteen pieces"
    assert nll(model, blocks_BM).mean() == pytest.approx(losses.sample_score(model, tokens, 1024).nll, rel=1e-5)


def test_norms_with_their_first_weights_are_found(random):
    model, _ = random()
    assert mistakes.constant_norms(model) == ()
    first = broken.weights(lambda parameters: parameters["final_norm"]["scale"].fill(1))(model)
    assert mistakes.constant_norms(first) == ("final_norm",)


def test_the_seed_draws_all_faults():
    drawn = [find_the_fault.draw(seed) for seed in range(140)]
    assert drawn == [find_the_fault.draw(seed) for seed in range(140)]
    assert min(Counter(fault for fault, _ in drawn)[fault] for fault in find_the_fault.FAULTS) >= 8
    assert {mistake.kind for _, mistake in drawn if mistake} == {*mistakes.CHECKS}
    for fault, mistake in drawn:
        found = [mistakes.CHECKS[mistake.kind][0], "recorded loss"] if mistake else []
        assert examination.blamed(found) == fault and (not found or found[0] in find_the_fault.checks(fault))
    assert examination.blamed(["loss"]) == "unknown" and examination.blamed(["positions"]) == "order"


@pytest.mark.slow
def test_a_hidden_fault_is_trained_guessed_and_named(monkeypatch, tmp_path, capsys):
    seed = next(seed for seed in range(99) if str(find_the_fault.draw(seed)[1]) == "targets shifted by -1")
    fields = {"train.steps": 60, "eval.every": 60, "checkpoint.every": 60, "optimizer.warmup_steps": 10}
    monkeypatch.setattr(find_the_fault, "FIELDS", find_the_fault.FIELDS | fields)
    call = ["find_the_fault", f"--seed={seed}", f"--workdir={tmp_path / 'run'}"]

    def run(*more):
        monkeypatch.setattr(sys, "argv", [*call, *more])
        find_the_fault.main()
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="does not hold the run of this seed"):
        run("--guess=norm")
    assert "--guess=NAME" in run()
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(b"shifted" in text or b"mistake" in text for text in texts)
    said = run("--guess=norm")
    assert said.startswith("Wrong: it is not norm.") and "targets" not in said and "FOUND" not in said
    said = run("--answer")
    assert "FOUND  trained targets: With targets shifted by -1" in said and "The fault is targets." in said
    assert "Right: the fault is targets." in run("--guess=targets")

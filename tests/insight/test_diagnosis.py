"""The checks name the cause in models that are broken on purpose, and find nothing in healthy ones."""

import dataclasses
import math
import os

import jax
import numpy as np
import pytest
from mini_gpt.model.attention.inputs import Mask

from mini_gpt import suites
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.insight.diagnosis import alternatives, blocks, checks, losses, probe, weights
from mini_gpt.insight.diagnosis.result import most_likely
from mini_gpt.runtime import sharding
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.evaluation.models import random_model

LIBRARY = os.path.dirname(os.__file__)  # real text that comes with every Python
REAL = {
    "data__path": f"{LIBRARY}/[i-t]*.py",
    "data__split_fractions": (0.8, 0.1, 0.1),
    "context_length": 48,
    "model__num_layers": 2,
    "model__d_model": 48,
    "train__steps": 250,
    "train__batch_size": 16,
    "train__log_every": 5,
    "optimizer__learning_rate": 4e-3,
    "optimizer__warmup_steps": 25,
    "eval__every": 1000,
    "eval__sample_tokens": 0,
    "checkpoint__every": 1000,
}


BIDIRECTIONAL = {"model__causal": False, "train__objective": "masked"}


@pytest.fixture
def initial(small):
    """Return a function that makes (untrained model, windows, training tokens). Large weights make attention uneven."""

    def make(**overrides):
        config = small(model__num_layers=2, **overrides)
        store = token_store.open_store(corpora.open_corpus(config.data), config.data, tokenizers.ByteTokenizer())
        model = random_model(config, tokenizers.ByteTokenizer().token_bytes, noise=0)
        larger = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, model.parameters)
        model = dataclasses.replace(model, parameters=larger, mesh=sharding.make_reading_mesh(1, 1))
        return model, probe.windows(store.tokens("validation"), 33), store.tokens("train")

    return make


@pytest.mark.parametrize("position, uses", [("rope", True), *slow(("none", False), ("learned", True))])
def test_a_bidirectional_model_needs_positions_to_use_order(initial, position, uses):
    model, windows_BM, _ = initial(model__position=position, **BIDIRECTIONAL)
    (order,) = checks.order(model, windows_BM)
    assert order.found is not uses
    assert order.value > 0.2 if uses else order.value < 1e-4


@pytest.mark.slow
def test_a_causal_model_without_positions_uses_order(initial):
    model, windows_BM, _ = initial(model__position="none")
    (order,), (causality,) = checks.order(model, windows_BM), checks.causality(model, windows_BM)
    assert order.value > 0.2 and causality.value == 0.0
    # Here, the same value is computed directly: all tokens except the first and the last are shuffled.
    inputs_BL, rng = windows_BM[:, :-1], np.random.default_rng(5)
    shuffled_BL = np.stack([[row[0], *rng.permutation(row[1:-1]), row[-1]] for row in inputs_BL])
    others_BL = inputs_BL.copy()
    others_BL[:, 1:-1] = np.roll(inputs_BL, 1, axis=0)[:, 1:-1]
    plain_BV, *moved = (
        np.exp(probe.predictions(model, text_BL, 31)) for text_BL in (inputs_BL, shuffled_BL, others_BL)
    )
    moves = [np.abs(plain_BV - other_BV).sum(-1).mean() / 2 for other_BV in moved]
    assert order.value == pytest.approx(moves[0] / moves[1], rel=0.15)


@pytest.fixture
def leaking(monkeypatch):
    """Remove the causal mask from all functions that are traced during the test."""
    between = Mask.between
    monkeypatch.setattr(Mask, "between", lambda mask, *places: between(mask._replace(causal=False), *places))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("leaking")
def test_a_missing_causal_mask_is_found(initial):
    (causality,) = checks.causality(*initial(model__position="rope")[:2])
    assert causality.found


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 8])
def test_unscaled_logits_grow_with_the_root_of_the_width(initial, heads):
    fields = {"model__position": "none", "model__num_heads": heads, "model__scale_attention": False}
    model, windows_BM, _ = initial(**fields)
    *_, scale = blocks.attention(model, probe.layers(model, windows_BM))
    assert scale.check == "scale of logits" and scale.found
    assert scale.value == pytest.approx(math.sqrt(32 / heads), rel=1e-4)


@pytest.mark.slow
def test_isolated_documents_are_shuffled_one_by_one(initial):
    model, windows_BM, _ = initial(model__position="none", data__isolate_documents=True, **BIDIRECTIONAL)
    windows_BM[:, [5, 27]] = 256  # position 16 attends to 5..26 only: a separator starts a document
    (order,) = checks.order(model, windows_BM)
    assert order.found and order.value < 1e-4
    assert checks.movable_positions(windows_BM[0, :-1], 16, 256).tolist() == [*range(6, 16), *range(17, 27)]
    alike_BM = np.full((4, 33), 7)
    assert checks.order(model, alike_BM) == [], "equal tokens: shuffling changes nothing"


def test_documents_are_split_at_masked_separators(initial):
    model, windows_BM, _ = initial(model__position="none", data__isolate_documents=True, **BIDIRECTIONAL)
    windows_BM[windows_BM == 256] = 7
    windows_BM[:, 16] = 256  # the separator is masked in the inputs; it still starts a document
    other_BM = windows_BM.copy()
    other_BM[:, 17:32] = windows_BM[:, 17:32][:, ::-1]
    entropies = [probe.layers(model, windows)[0].entropy_B for windows in (windows_BM, other_BM)]
    np.testing.assert_allclose(entropies[0], entropies[1], rtol=1e-5)
    joined_BM = windows_BM.copy()
    joined_BM[:, 16] = 7
    assert np.abs(probe.layers(model, joined_BM)[0].entropy_B - entropies[0]).max() > 1e-3


def test_attention_to_one_token_has_no_entropy_checks(initial):
    model, windows_BM, _ = initial(model__attention_window=1)
    layers = probe.layers(model, windows_BM)
    assert [finding.check for finding in blocks.attention(model, layers)] == ["scale of logits"]
    assert not any(finding.found for finding in blocks.stream(model, layers))


@pytest.mark.slow
def test_broken_losses_heads_units_and_values_are_found(initial):
    model, windows_BM, train_tokens = initial(model__position="rope", model__activation="relu")
    sound = probe.layers(model, windows_BM)
    counts = np.bincount(train_tokens, minlength=257) + 1
    unigram = -np.log(counts / counts.sum())[windows_BM[:, 1:]].mean()
    nll = float(probe.nll(model, windows_BM).mean())
    simpler = {"unigram": unigram, "bigram": None}
    loss, *_ = losses.check(losses.Losses(loss=nll, train=nll, windows=nll, **simpler, **losses.recorded([], 0)))
    assert loss.found and f"that of a unigram model {unigram:.2f}" in loss.says, "nothing is learned yet"
    assert not any(finding.found for finding in blocks.stream(model, sound))

    broken = jax.tree.map(np.array, model.parameters)
    broken["blocks"][1]["mlp"]["up"]["bias"][:16] = -1e3  # 16 of 128 units are always 0
    broken["blocks"][0]["attention"]["out"]["kernel"][8:16] = 0  # the second of four heads
    assert not checks.dead_heads(model, train_tokens).found and not blocks.dead_units(sound).found
    model = dataclasses.replace(model, parameters=broken)
    heads, units = checks.dead_heads(model, train_tokens), blocks.dead_units(probe.layers(model, windows_BM))
    assert 1 / 8 <= units.value < 0.2 and units.found
    assert heads.value == 0 and "without effect: 0.1." in heads.says
    for factor, found in ((5, False), (1e-4, True)):
        scaled = dataclasses.replace(model, parameters=jax.tree.map(np.copy, broken))
        scaled.parameters["embedding"] *= factor  # tied embeddings: the small factor makes all logits nearly 0
        predictions = checks.predictions(scaled, windows_BM, np.log(counts / counts.sum()))[0]
        assert predictions.check == "predictions" and predictions.found is found, predictions
    broken["embedding"][3, 5] = np.nan
    finite, *others = blocks.stream(model, probe.layers(model, windows_BM))
    assert finite.check == "finite" and finite.value == 1 and finite.found
    assert finite.says == "Non-finite parameters: 1."
    assert most_likely([heads, *others, finite]) == "a training step with non-finite gradients"
    broken["embedding"][3, 5], broken["blocks"][1]["mlp"]["up"]["bias"][:] = 0, 3e38
    finite, *_ = blocks.stream(model, probe.layers(model, windows_BM))
    assert finite.found and finite.says == "Non-finite parameters: 0; an activation is non-finite."


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    def train(small, name, **overrides):
        workdir = tmp_path_factory.mktemp(name.replace(" ", "-"))
        loop.train(small(**(REAL | {"data__cache_dir": str(workdir / "cache")} | overrides)), workdir, conclude=False)
        return suites.evaluate(Run(workdir), "diagnose", SuiteOptions())

    return train


BROKEN = {
    "no position": (BIDIRECTIONAL | {"model__position": "none"}, "order", "model.position=none in a bidirectional"),
    "no scale": ({"model__scale_attention": False}, "scale of logits", "model.scale_attention=False"),
    "no residual": ({"model__residual": False, "model__num_layers": 4}, "residual", "model.residual=False"),
    "high rate": ({"optimizer__learning_rate": 1.0}, "activations", "optimizer.learning_rate far too high"),
    "leak": ({}, "causality", "no causal mask"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_of_a_broken_model_is_named(small, trained, request, name, capsys):
    fields, check, cause = BROKEN[name]
    if name == "leak":
        request.getfixturevalue("leaking")
    result = trained(small, name, **fields)
    assert check in result["found"] and result["most_likely"].startswith(cause), result
    printed = capsys.readouterr().out
    assert f"FOUND  {check}: " in printed and f"Most likely: {cause}" in printed


def test_an_untrained_matrix_has_no_structure():
    rng = np.random.default_rng(0)
    for shape in ((48, 192), (192, 48), (48, 48)):
        drawn = 0.02 * rng.normal(size=shape)
        trained = drawn + np.outer(*(0.1 * rng.normal(size=size) for size in shape))
        assert weights.structure(drawn) < weights.UNTRAINED < weights.LEARNED < weights.structure(trained)
        expected = np.linalg.svd(trained)[1][0] / (trained.std() * (shape[0] ** 0.5 + shape[1] ** 0.5))
        assert weights.structure(trained) == pytest.approx(expected)
    zeroed = np.ones((4, 6))
    zeroed[1], zeroed[:, 2] = 0, 0
    assert weights.zero_lines(zeroed) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"model__scan_layers": True}, {"model__num_kv_heads": 2}, {"model__activation": "swiglu"}]
)
def test_each_alternative_differs_and_fits(initial, fields):
    model, windows_BM, _ = initial(model__position="rope", model__tie_embeddings=False, **fields)
    names = []
    plain = model.nll(windows_BM[:8, :-1], windows_BM[:8, 1:])
    for name, other in alternatives.others(model):
        nll = other.nll(windows_BM[:8, :-1], windows_BM[:8, 1:])
        assert np.isfinite(nll).all() and np.abs(nll - plain).max() > 1e-4, name
        names.append(name)
    assert len(names) == len(set(names)) >= 15

"""The checks name the cause in models that are broken on purpose, and find nothing in healthy ones."""

import dataclasses
import json
import math
import os

import jax
import numpy as np
import pytest

from mini_gpt.commands import suites
from mini_gpt.commands.suites.base import SuiteOptions
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.insight.diagnosis import checks, probe
from mini_gpt.model.attention.masks import Mask
from mini_gpt.runtime import sharding
from mini_gpt.training import loop
from mini_gpt.training.run import Run
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


@pytest.mark.parametrize("position, uses", [("none", False), ("rope", True), ("learned", True)])
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
    *_, scale = checks.attention(model, probe.layers(model, windows_BM))
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
    assert [finding.check for finding in checks.attention(model, layers)] == ["scale of logits"]
    assert not any(finding.found for finding in checks.stream(model, layers))


@pytest.mark.slow
def test_broken_losses_heads_units_and_values_are_found(initial):
    model, windows_BM, train_tokens = initial(model__position="rope", model__activation="relu")
    sound = probe.layers(model, windows_BM)
    counts = np.bincount(train_tokens, minlength=257) + 1
    unigram = -np.log(counts / counts.sum())[windows_BM[:, 1:]].mean()
    loss = next(f for f in checks.predictions(model, windows_BM, np.log(counts / counts.sum())) if f.check == "loss")
    assert loss.found and f"that of a unigram model {unigram:.2f}" in loss.says, "nothing is learned yet"
    assert not any(finding.found for finding in checks.stream(model, sound))

    broken = jax.tree.map(np.array, model.parameters)
    broken["blocks"][1]["mlp"]["up"]["bias"][:16] = -1e3  # 16 of 128 units are always 0
    broken["blocks"][0]["attention"]["out"]["kernel"][8:16] = 0  # the second of four heads
    assert [f.found for f in checks.dead(model, sound, train_tokens)] == [False, False]
    model = dataclasses.replace(model, parameters=broken)
    heads, units = checks.dead(model, probe.layers(model, windows_BM), train_tokens)
    assert 1 / 8 <= units.value < 0.2 and units.found
    assert heads.value == 0 and "without effect: 0.1." in heads.says
    for factor, found in ((5, False), (1e-4, True)):
        scaled = dataclasses.replace(model, parameters=jax.tree.map(np.copy, broken))
        scaled.parameters["embedding"] *= factor  # tied embeddings: the small factor makes all logits nearly 0
        predictions = checks.predictions(scaled, windows_BM, np.log(counts / counts.sum()))[0]
        assert predictions.check == "predictions" and predictions.found is found, predictions
    broken["embedding"][3, 5] = np.nan
    finite, *others = checks.stream(model, probe.layers(model, windows_BM))
    assert finite.check == "finite" and finite.value == 1 and finite.found
    assert checks.most_likely([heads, *others, finite]) == "a training step with non-finite gradients"


def test_a_loss_that_rises_again_is_found():
    falling = np.linspace(5, 2, 100)
    row = lambda loss: {"train/loss": loss, "train/gradient_norm": 1.0}
    (finding,) = checks.training([row(loss) for loss in falling])
    assert not finding.found and finding.value == pytest.approx(0)
    (finding,) = checks.training([row(loss) for loss in [*falling, *np.full(30, 4.0)]])
    assert finding.found and finding.value == pytest.approx(4 - falling[-6:].mean(), rel=0.01)
    assert checks.training([row(1.0)] * 5) == [], "too few rows"
    (finding,) = checks.training([{"train/loss": 1.0}] * 30)  # non-finite norms are not logged
    assert not finding.found
    noisy = 2 + 1.5 * np.random.default_rng(0).normal(size=60)
    (finding,) = checks.training([row(loss) for loss in noisy])
    assert finding.value > checks.RISE and not finding.found, "noise is not a rise"


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


HEALTHY = {
    "none": {"model__position": "none"},
    "learned": {"model__position": "learned"},
    "sinusoidal": {"model__position": "sinusoidal", "model__scale_embeddings": True},
    "rope": {"model__position": "rope", "model__norm": "rmsnorm", "model__activation": "swiglu"},
    "alibi": {"model__position": "alibi", "model__num_heads": 2},
    "t5": {"model__position": "t5", "model__activation": "relu", "model__dropout": 0.1},
    "pattern": {"model__position": ("rope", "none"), "model__num_kv_heads": 1},
    "post": {"model__norm_placement": "post", "optimizer__learning_rate": 2e-3},
    "muon": {"model__position": "rope", "optimizer__name": "muon", "optimizer__learning_rate": 1e-2},
    "masked": BIDIRECTIONAL | {"model__position": "rope", "train__steps": 500},
    "deep": {"model__num_layers": 6, "model__tie_embeddings": False, "train__label_smoothing": 0.1},
    "characters": {"data__tokenizer": "characters", "data__isolate_documents": True, "model__position": "rope"},
    "bpe": {"data__tokenizer": "bpe", "data__vocab_size": 400, "model__attention_window": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_model(small, trained, name):
    result = trained(small, name, **HEALTHY[name])
    assert result["found"] == [], json.dumps(result["rows"], indent=1)

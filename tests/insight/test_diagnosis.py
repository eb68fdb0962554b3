"""Models that were broken on purpose have their cause named; healthy ones have none."""

import json
import math
import os

import jax
import numpy as np
import pytest
from flax import nnx

from mini_gpt.commands import suites
from mini_gpt.commands.suite_options import Request
from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.insight import diagnosis, probe
from mini_gpt.insight.probe import Probe
from mini_gpt.model import MiniGPT
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.attention.masks import Mask
from mini_gpt.runtime import sharding
from mini_gpt.training import loop
from mini_gpt.training.run import Run

LIBRARY = os.path.dirname(os.__file__)  # real text, which every Python has
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
def drawn(small, tmp_path):
    """Gives a model as it was drawn, but with larger weights, so that attention is uneven; and windows of text."""

    def make(**overrides):
        config = small(model__num_layers=2, **overrides)
        store = token_store.open_store(corpora.open_corpus(config.data), config.data, tokenizers.ByteTokenizer())
        model = MiniGPT(config.model, 257 + (config.train.objective == "masked"), rngs=nnx.Rngs(0))
        definition, parameters = model_parameters.split(model)
        parameters = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, parameters)
        mesh = sharding.make_reading_mesh(config.mesh.fsdp, config.mesh.tensor)
        checked = Probe(definition, parameters, config, tokenizers.ByteTokenizer(), mesh, None)
        return checked, probe.windows(store.split("validation").tokens, 33), store.split("train").tokens

    return make


@pytest.mark.parametrize("position, uses", [("none", False), ("rope", True), ("learned", True)])
def test_B7_a_bidirectional_model_uses_order_by_its_positions_alone(drawn, position, uses):
    model, windows_BM, _ = drawn(model__position=position, **BIDIRECTIONAL)
    (order,) = diagnosis._order(model, windows_BM)
    assert order.found is not uses
    assert order.value > 0.2 if uses else order.value < 1e-4
    assert diagnosis._leak(model, windows_BM) == []


def test_B6_a_causal_model_without_positions_uses_order(drawn):
    model, windows_BM, _ = drawn(model__position="none")
    (order,), (causality,) = diagnosis._order(model, windows_BM), diagnosis._leak(model, windows_BM)
    assert order.value > 0.2 and causality.value == 0.0
    # Once more by hand: the same last token, all others but the first in another order.
    inputs_BL, draw = windows_BM[:, :-1], np.random.default_rng(5)
    shuffled_BL = np.stack([[row[0], *draw.permutation(row[1:-1]), row[-1]] for row in inputs_BL])
    others_BL = inputs_BL.copy()
    others_BL[:, 1:-1] = np.roll(inputs_BL, 1, axis=0)[:, 1:-1]
    plain_BV, *moved = (np.exp(model.predictions(tokens)) for tokens in (inputs_BL, shuffled_BL, others_BL))
    moves = [np.abs(plain_BV - other_BV).sum(-1).mean() / 2 for other_BV in moved]
    assert order.value == pytest.approx(moves[0] / moves[1], rel=0.15)


@pytest.fixture
def leaking(monkeypatch):
    """Takes the causal mask away from all that is traced from here on, until the test is over."""
    between = Mask.between
    monkeypatch.setattr(Mask, "between", lambda mask, *places: between(mask._replace(causal=False), *places))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("leaking")
def test_A6_a_missing_causal_mask_is_a_leak(drawn):
    (causality,) = diagnosis._leak(*drawn(model__position="rope")[:2])
    assert causality.found


@pytest.mark.parametrize("heads", [2, 8])
def test_A4_logits_without_scale_grow_with_the_root_of_the_width(drawn, heads):
    fields = {"model__position": "none", "model__num_heads": heads, "model__scale_attention": False}
    model, windows_BM, _ = drawn(**fields)
    *_, scale = diagnosis._attention(model, model.layers(windows_BM))
    assert scale.check == "scale of logits" and scale.found
    assert scale.value == pytest.approx(math.sqrt(32 / heads), rel=1e-4)


def test_B7_documents_that_are_kept_apart_are_shuffled_within_themselves(drawn):
    model, windows_BM, _ = drawn(model__position="none", data__isolate_documents=True, **BIDIRECTIONAL)
    windows_BM[:, [5, 27]] = 256  # the middle reads with the places 6 to 26, from where 5 opens its document
    (order,) = diagnosis._order(model, windows_BM)
    assert order.found and order.value < 1e-4
    assert diagnosis._movable(windows_BM[0, :-1], 16, 256).tolist() == [*range(6, 16), *range(17, 27)]
    alike_BM = np.full((4, 33), 7)
    assert diagnosis._order(model, alike_BM) == [], "no other order to compare with"


def test_documents_are_told_apart_by_the_text_of_which_the_masked_objective_hides_a_part(drawn):
    model, windows_BM, _ = drawn(model__position="none", data__isolate_documents=True, **BIDIRECTIONAL)
    windows_BM[windows_BM == 256] = 7
    windows_BM[:, 16] = 256  # a document opens where the inputs hide the token: no place before it sees what follows
    other_BM = windows_BM.copy()
    other_BM[:, 17:32] = windows_BM[:, 17:32][:, ::-1]
    entropies = [model.layers(windows)[0].entropy_B for windows in (windows_BM, other_BM)]
    np.testing.assert_allclose(entropies[0], entropies[1], rtol=1e-5)
    apart_BM = windows_BM.copy()
    apart_BM[:, 16] = 7
    assert np.abs(model.layers(apart_BM)[0].entropy_B - entropies[0]).max() > 1e-3


def test_where_no_query_has_a_choice_entropies_are_not_asked_for(drawn):
    model, windows_BM, _ = drawn(model__attention_window=1)
    layers = model.layers(windows_BM)
    assert [finding.check for finding in diagnosis._attention(model, layers)] == ["scale of logits"]
    assert not any(finding.found for finding in diagnosis._numbers(model, layers))


def test_what_is_said_of_losses_heads_units_and_numbers(drawn):
    model, windows_BM, train_tokens = drawn(model__position="rope", model__activation="relu")
    sound = model.layers(windows_BM)
    counts = np.bincount(train_tokens, minlength=257) + 1
    unigram = -np.log(counts / counts.sum())[windows_BM[:, 1:]].mean()
    loss = next(
        f for f in diagnosis._predictions(model, windows_BM, np.log(counts / counts.sum())) if f.check == "loss"
    )
    assert loss.found and f"that of a unigram model {unigram:.2f}" in loss.says, "nothing is learnt yet"
    assert not any(finding.found for finding in diagnosis._numbers(model, sound))

    broken = jax.tree.map(np.array, model.parameters)
    broken["blocks"][1]["mlp"]["up"]["bias"][:16] = -1e3  # of 128 units an eighth is never reached
    broken["blocks"][0]["attention"]["out"]["kernel"][8:16] = 0  # the second of four heads
    assert [f.found for f in diagnosis._dead(model, sound, train_tokens)] == [False, False]
    model.parameters = broken
    heads, units = diagnosis._dead(model, model.layers(windows_BM), train_tokens)
    assert 1 / 8 <= units.value < 0.2 and units.found
    assert heads.value == 0 and "without effect: 0.1." in heads.says
    for factor, found in ((5, False), (1e-4, True)):
        model.parameters = jax.tree.map(np.copy, broken)
        model.parameters["embedding"] *= factor  # tied: at the little one all logits are nearly 0
        predictions = diagnosis._predictions(model, windows_BM, np.log(counts / counts.sum()))[0]
        assert predictions.check == "predictions" and predictions.found is found, predictions
    model.parameters = broken
    broken["embedding"][3, 5] = np.nan
    finite, *others = diagnosis._numbers(model, model.layers(windows_BM))
    assert finite.check == "finite" and finite.value == 1 and finite.found
    assert diagnosis.most_likely([heads, *others, finite]) == "a step with bad numbers was taken"


def test_a_training_that_went_up_again_is_a_finding():
    falling = np.linspace(5, 2, 100)
    row = lambda loss: {"train/loss": loss, "train/gradient_norm": 1.0}
    (finding,) = diagnosis._training([row(loss) for loss in falling])
    assert not finding.found and finding.value == pytest.approx(0)
    (finding,) = diagnosis._training([row(loss) for loss in [*falling, *np.full(30, 4.0)]])
    assert finding.found and finding.value == pytest.approx(4 - falling[-6:].mean(), rel=0.01)
    assert diagnosis._training([row(1.0)] * 5) == [], "too few to say"
    noisy = 2 + 1.5 * np.random.default_rng(0).normal(size=60)
    (finding,) = diagnosis._training([row(loss) for loss in noisy])
    assert finding.value > diagnosis.RISE and not finding.found, "noise is no rise"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    def train(small, name, **overrides):
        workdir = tmp_path_factory.mktemp(name.replace(" ", "-"))
        loop.train(small(**(REAL | {"data__cache_dir": str(workdir / "cache")} | overrides)), workdir, conclude=False)
        return suites.evaluate(Run(workdir), "diagnose", Request())

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
def test_C10_the_cause_is_named_where_a_model_was_broken_on_purpose(small, trained, request, name, capsys):
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
def test_C10_nothing_is_found_in_a_healthy_model(small, trained, name):
    result = trained(small, name, **HEALTHY[name])
    assert result["found"] == [], json.dumps(result["rows"], indent=1)

"""The checks of a text and of losses: what each finds in broken models, and not in sound ones."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from mini_gpt.data import corpora, token_store, tokenizers
from mini_gpt.insight.diagnosis import blocks, checks, losses, probe, weights
from mini_gpt.runtime import sharding
from tests.conftest import slow
from tests.insight import broken
from tests.random_models import random_model

# The checks of text, on models made by hand: what each one finds, and what it does not find in sound models.

BIDIRECTIONAL = {"model__causal": False, "train__objective": "masked"}


@pytest.fixture
def initial(small):
    """Return a function that makes (untrained model, windows, training tokens). Large weights make attention uneven."""

    def make(**overrides):
        config = small(**{"model__num_layers": 2, "model__position": "rope"} | overrides)
        store = token_store.open_store(corpora.open_corpus(config.data), config.data, tokenizers.ByteTokenizer())
        model = random_model(config, tokenizers.ByteTokenizer().token_bytes, noise=0)
        larger = jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, model.parameters)
        model = dataclasses.replace(model, parameters=larger, mesh=sharding.make_reading_mesh(1, 1))
        return model, probe.windows(store.tokens("validation"), 33, None), store.tokens("train")

    return make


def by_name(results):
    return {result.check: result for result in results}


@pytest.mark.parametrize(
    "position, causal, layers, uses",
    [
        ("rope", False, 2, True),
        *slow(
            ("none", False, 2, False), ("learned", False, 2, True), ("none", True, 2, True), ("none", True, 1, False)
        ),
    ],
)
def test_positions_or_deep_causal_attention_give_order(initial, position, causal, layers, uses):
    fields = {"model__position": position, "model__num_layers": layers}
    model, windows_BM, _ = initial(**fields | ({} if causal else BIDIRECTIONAL))
    (order,) = checks.order(model, windows_BM)
    assert order.found is not uses
    assert order.value > 0.2 if uses else order.value < 1e-4


@pytest.mark.slow
def test_the_use_of_order_is_the_effect_of_shuffling(initial):
    model, windows_BM, _ = initial(model__position="none")
    (order,) = checks.order(model, windows_BM)
    inputs_BL = windows_BM[:, :-1]
    _, changed = checks.reordered(model, inputs_BL)
    shuffled_BL, others_BL = changed["shuffled"], changed["others"]
    assert (np.sort(shuffled_BL) == np.sort(inputs_BL)).all() and (shuffled_BL != inputs_BL).any(axis=1).all()
    assert (shuffled_BL[:, [0, -1]] == inputs_BL[:, [0, -1]]).all(), "the prediction is at the last token"
    plain_BV, *moved = (
        np.exp(probe.predictions(model, text_BL, 31)) for text_BL in (inputs_BL, shuffled_BL, others_BL)
    )
    moves = [np.abs(plain_BV - other_BV).sum(-1).mean() / 2 for other_BV in moved]
    assert order.value == pytest.approx(moves[0] / moves[1], rel=1e-5)


@pytest.mark.parametrize("fields", [{}, *slow(BIDIRECTIONAL)])
def test_right_masks_hide_later_tokens_and_other_documents(initial, fields):
    model, windows_BM, _ = initial(data__isolate_documents=True, **fields)
    results = checks.masks(model, windows_BM)
    assert [result.check for result in results] == (["documents"] if fields else ["causality", "documents"])
    assert not any(result.found for result in results) and max(result.value for result in results) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no causal mask", "joined documents"])
def test_a_wrong_mask_is_found_by_its_check(initial, with_wrong_mask, name):
    model, windows_BM, _ = initial(data__isolate_documents=True)
    with_wrong_mask(name)
    assert [result.check for result in checks.masks(model, windows_BM) if result.found] == [broken.MASKS[name][1]]


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 8])
def test_unscaled_logits_grow_with_the_root_of_the_width(initial, heads):
    fields = {"model__position": "none", "model__num_heads": heads, "model__scale_attention": False}
    model, windows_BM, _ = initial(**fields)
    *_, scale = blocks.attention(model, probe.layers(model, windows_BM))
    assert scale.check == "scale of logits" and scale.found
    assert scale.value == pytest.approx(math.sqrt(32 / heads), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [True, False])
def test_a_replaced_residual_stream_is_found(initial, residual):
    model, windows_BM, _ = initial(model__residual=residual)
    result = by_name(blocks.stream(model, probe.layers(model, windows_BM)))["residual"]
    assert result.found is not residual and (result.value > 0.1) is residual


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
def test_dead_heads_units_and_flat_predictions_are_found(initial):
    model, windows_BM, train_tokens = initial(model__activation="relu")
    sound = blocks.check(model, probe.layers(model, windows_BM))
    assert not any(result.found for result in sound) and not checks.dead_heads(model, train_tokens).found
    parameters = jax.tree.map(np.array, model.parameters)
    parameters["blocks"][1]["mlp"]["up"]["bias"][:16] = -1e3  # 16 of 128 units are always 0
    parameters["blocks"][0]["attention"]["out"]["kernel"][8:16] = 0  # the second of four heads
    model = dataclasses.replace(model, parameters=parameters)
    heads, units = checks.dead_heads(model, train_tokens), blocks.dead_units(probe.layers(model, windows_BM))
    assert 1 / 8 <= units.value < 0.2 and units.found and "in layer 1." in units.says
    assert heads.found and heads.value == 0 and "without effect: 0.1." in heads.says
    counts = np.bincount(train_tokens, minlength=257) + 1
    for factor, found in ((5, False), (1e-4, True)):
        scaled = broken.scale(lambda parameters: parameters["embedding"], factor)(model)
        log_BV = probe.predictions(scaled, windows_BM[:, :-1], 31)  # the small factor makes all logits nearly 0
        assert losses.variation(log_BV, np.log(counts / counts.sum())).found is found


@pytest.mark.slow
def test_non_finite_weights_and_activations_are_found(initial):
    model, windows_BM, _ = initial()
    (finite,) = weights.check(broken.weights(broken.spoil)(model))
    assert finite.found and finite.says == "Non-finite parameters: embedding (1)."
    parameters = jax.tree.map(np.array, model.parameters)
    parameters["blocks"][1]["mlp"]["down"]["bias"][:] = 3e38
    model = dataclasses.replace(model, parameters=parameters)
    assert not weights.check(model)[0].found
    assert by_name(blocks.stream(model, probe.layers(model, windows_BM)))["activations"].found


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


def test_only_a_whole_block_counts_as_untrained():
    trained = {f"encoder/blocks/{layer}/{name}": 2.0 for layer in range(12) for name in ("a/kernel", "b/kernel")}
    for untrained, found in ((set(), False), ({"b/kernel"}, False), ({"a/kernel", "b/kernel"}, True)):
        ratios = trained | {f"encoder/blocks/1/{name}": 1.01 for name in untrained}
        (result,) = weights.untrained(ratios)
        assert result.found is found and ("untrained: encoder/blocks/1. " in result.says) is found
    assert weights.untrained(dict.fromkeys(trained, 1.05)) == [], "none is trained"
    ratios = dict.fromkeys(trained, 1.2) | {f"encoder/blocks/1/{name}": 1.01 for name in ("a/kernel", "b/kernel")}
    assert not weights.untrained(ratios)[0].found, "by Muon"


# The checks of losses, on hand-made numbers.


def test_a_loss_that_rises_again_is_found():
    falling = np.linspace(5, 2, 100)

    def training(values, step=1000):
        rows = [{"step": at, "train/loss": value, "train/gradient_norm": 1.0} for at, value in enumerate(values)]
        return losses.training(rows, step)

    (finding,) = training(falling)
    assert not finding.found and finding.value == pytest.approx(0)
    (finding,) = training([*falling, *np.full(30, 4.0)])
    assert finding.found and finding.value == pytest.approx(4 - falling[-6:].mean(), rel=0.01)
    assert not training([*falling, *np.full(30, 4.0)], step=99)[0].found, "it rises after the model's step"
    assert training([1.0] * 5) == [], "too few rows"
    (finding,) = losses.training([{"step": 1, "train/loss": 1.0}] * 30, 1)  # non-finite norms are not logged
    assert not finding.found
    (finding,) = training(2 + 1.5 * np.random.default_rng(0).normal(size=60))
    assert finding.value > losses.RISE and not finding.found, "noise is not a rise"


ROWS = [{"step": step, "validation/loss": loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5))]
IMPORTED = {"recorded": None, "recorded_train": None}


@pytest.mark.parametrize(
    "changed, found",
    [
        ({}, []),
        ({"loss": 2.005}, []),  # another device rounds otherwise
        ({"loss": 2.02}, ["recorded loss"]),
        ({"loss": 2.1}, ["recorded loss"]),
        ({"loss": 1.9}, ["recorded loss"]),  # it reads its targets, or it is another checkpoint
        ({"loss": math.nan, "train": math.nan}, ["loss", "recorded loss"]),
        ({"loss": 2.2, "same_step": False}, []),
        ({"loss": 2.4, "same_step": False}, ["recorded loss"]),
        ({"train": 2.4, "recorded": None}, ["recorded loss"]),
        ({"train": 0.17, "loss": 1.98, "recorded": 1.98, "rise": 0.52}, ["overfitting"]),
        ({"train": 1.7, "rise": 0.15}, ["overfitting"]),
        ({"train": 1.99, "rise": 0.15}, []),  # training text became harder too: not overfit
        ({"train": 0.9, "recorded": None}, ["overfitting"]),
        ({"loss": 2.6, "recorded": 2.6, "train": 2.5, "recorded_train": 2.5}, []),  # early
        ({"loss": 3.19, "recorded": 3.19}, ["loss"]),
        ({"loss": 2.6} | IMPORTED, ["loss"]),
        ({"loss": 2.3} | IMPORTED, []),
        ({"loss": 2.6, "bigram": None} | IMPORTED, []),  # masked
    ],
)
def test_losses_are_compared_with_the_record(changed, found):
    healthy = {"loss": 2.0, "train": 1.9, "recorded": 2.0, "rise": 0.0, "same_step": True}
    healthy |= {"recorded_train": 1.95, "unigram": 3.2, "bigram": 2.4}
    made = losses.Losses(**healthy | changed)
    assert [result.check for result in losses.check(made) if result.found] == found


def test_the_record_of_the_nearest_evaluation_is_taken():
    names = ("recorded", "rise", "same_step")
    taken = [tuple(map(losses.recorded(ROWS, step).get, names)) for step in (9, 10, 22, 28, 30)]
    expected = [(3.0, 0.0, False), (3.0, 0.0, True), (2.0, 0.0, False), (2.5, 0.0, False), (2.5, 0.5, True)]
    assert taken == expected, "a later evaluation does not count in the rise"
    falling = [{"step": step, "train/loss": 20.0 - step} for step in range(15)]
    assert losses.recorded(falling, 9)["recorded_train"] == np.mean([15, 14, 13, 12, 11]), "the last five rows so far"


def test_the_bigram_loss_is_that_of_the_formula():
    train, texts = np.array([0, 1, 2, 0, 1, 0, 2, 2]), [np.array([0, 1, 1]), np.array([1, 3, 2])]
    counts = np.array([3, 2, 3, 0]) + 1
    unigram_V = np.log(counts / counts.sum())
    expected = []
    for first, second in (pair for text in texts for pair in itertools.pairwise(text)):
        followers = [b for a, b in itertools.pairwise(train) if a == first]
        share = math.exp(unigram_V[second])
        if followers:
            kinds = len(set(followers))
            share = (followers.count(second) + kinds * share) / (len(followers) + kinds)
        expected.append(-math.log(share))
    assert losses.bigram(train, texts, unigram_V) == pytest.approx(np.mean(expected))

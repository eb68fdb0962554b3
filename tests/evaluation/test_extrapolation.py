"""Extrapolation, against a separate forward pass on the context of each target."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.evaluation import extrapolation, perplexity
from mini_gpt.evaluation.extrapolation import Windowing
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import loss as losses
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.random_models import random_model

TOKEN_BYTES = np.array([1] * 200 + [2] * 56 + [0])
TOKENS = np.random.default_rng(0).integers(256, size=150)


@pytest.fixture
def measure(small, monkeypatch):
    """Return a function that scores tokens, by default random ones, and returns (rows, by_position, model, tokens)."""

    def make(lengths, strides, tokens=TOKENS, **overrides):
        monkeypatch.setattr(extrapolation, "SLIDING_TARGETS", 40)
        config = small(context_length=8, **overrides)
        model = random_model(config, TOKEN_BYTES)
        windowings = extrapolation.plan(len(tokens), "validation", lengths, strides)
        rows, by_position = extrapolation.extrapolation(model, tokens, TOKEN_BYTES, windowings)
        return rows, by_position, model, tokens

    return make


def loss_of_one(model, tokens, start, target):
    """Return the loss (nats) of one target given tokens[start:target], from a separate forward pass."""
    context = np.zeros((1, 24), int)  # one shape, compiled once; the causal mask hides the padding
    context[0, : target - start] = tokens[start:target]
    logits_BLV = model.logits(jnp.array(context))[:, target - start - 1 : target - start]
    return float(losses.nll(logits_BLV, jnp.array([[tokens[target]]]))[0, 0])


@pytest.mark.parametrize("position", ["alibi", *slow("rope")])
def test_each_row_is_the_mean_over_its_targets(measure, position):
    rows, by_position, model, tokens = measure((8, 20), (3, 8), model__position=position)
    assert [(row["length"], row["protocol"], row["stride"]) for row in rows] == [
        (8, "blocks", 8), (8, "sliding", 3), (20, "blocks", 20), (20, "sliding", 3), (20, "sliding", 8),
    ]  # fmt: skip
    for row in rows:
        length, stride = row["length"], row["stride"]
        if row["protocol"] == "blocks":
            starts = {t: (t - 1) // length * length for t in range(1, 150)}
        else:  # the last 40 targets; window n starts n * stride after the first
            origin = 110 - 1 - (length - stride)
            starts = {t: origin + max(0, math.ceil((t - origin - length) / stride)) * stride for t in range(110, 150)}
            assert all(length - stride + 1 <= t - start <= length for t, start in starts.items())
        losses_ = [loss_of_one(model, tokens, start, t) for t, start in starts.items()]
        assert row["tokens_scored"] == len(losses_) and row["first_target"] == min(starts)
        assert row["nll"] == pytest.approx(np.mean(losses_), abs=1e-5)
        sample = [loss for t, loss in zip(starts, losses_, strict=True) if t >= 110]
        assert len(sample) == 40 and row["sample_nll"] == pytest.approx(np.mean(sample), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        text_bytes = TOKEN_BYTES[tokens[list(starts)]].sum()
        assert row["bits_per_byte"] == pytest.approx(sum(losses_) / math.log(2) / text_bytes, rel=1e-5)
    for length in (8, 20):
        means = by_position[str(length)]
        assert len(means) == length
        for place in (0, 3, length - 1):
            each = [loss_of_one(model, tokens, start, start + place + 1) for start in range(0, 149 - place, length)]
            assert means[place] == pytest.approx(np.mean(each), abs=1e-5)


def test_losses_by_position_count_context_inside_the_document(measure):
    tokens, separators = TOKENS.copy(), [6, 7, 31, 60, 66, 95]  # also at the ends of blocks, and an empty document
    tokens[separators] = 256
    _, by_position, model, _ = measure((8, 20), (), tokens, data__isolate_documents=True)
    for length in (8, 20):
        expected = {}
        for target in range(1, 150):
            first = max((target - 1) // length * length, *(place for place in [0, *separators] if place < target))
            loss = loss_of_one(model, tokens, first, target)
            expected.setdefault(target - first, []).append(loss)
        assert sorted(expected) == list(range(1, len(by_position[str(length)]) + 1))
        means = [np.mean(expected[count]) for count in sorted(expected)]
        np.testing.assert_allclose(by_position[str(length)], means, atol=1e-5)


def test_blocks_of_the_trained_length_equal_perplexity(measure):
    rows, _, model, tokens = measure((8,), (), model__position="rope")
    score = perplexity.score_split(model, tokens, TOKEN_BYTES)
    assert rows[0]["nll"] == pytest.approx(score.nll, rel=1e-6)


def test_lengths_past_a_learned_table_are_undefined(measure):
    rows, by_position, *_ = measure((4, 8, 9), (2,), model__position="learned")
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["undefined"] * 2
    for row in rows[4:]:
        assert (row["nll"], row["perplexity"], row["bits_per_byte"], row["tokens_scored"]) == (None, None, None, 0)
        assert row["reason"].startswith("model.max_positions: the learned table has 8 positions; found a length of 9")
    assert set(by_position) == {"4", "8"}
    further, *_ = measure((8, 32), (), model__position="learned", model__random_positions=20)
    assert [row["status"] for row in further] == ["ok", "undefined"]
    assert further[1]["reason"].startswith("model.random_positions: found 20; must be at least the length 32")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_loss_is_undefined(measure, monkeypatch, value):
    def broken(*args, **kwargs):
        return lambda inputs_BL, targets_BL: np.where(inputs_BL == inputs_BL.max(), value, 800.0)

    monkeypatch.setattr(perplexity, "make_nll_fn", broken)
    rows, by_position, *_ = measure((8,), ())
    assert (rows[0]["status"], rows[0]["nll"], rows[0]["sample_nll"]) == ("undefined", None, None)
    assert rows[0]["reason"] == "the model's loss is not finite" and by_position == {}


def test_a_perplexity_too_large_for_a_float_is_none(measure, monkeypatch):
    high = lambda inputs_BL, targets_BL: np.full(inputs_BL.shape, 800.0)
    monkeypatch.setattr(perplexity, "make_nll_fn", lambda *args, **kwargs: high)
    rows, *_ = measure((8,), ())
    assert (rows[0]["status"], rows[0]["nll"], rows[0]["perplexity"]) == ("ok", 800.0, None)


@pytest.mark.slow
def test_cost_is_logged_first_and_batches_are_as_in_training(measure, monkeypatch, caplog):
    shapes, nll = [], LoadedModel.nll

    def recorded(*args):
        if not shapes:
            assert "tokens go through the model" in caplog.text
        shapes.append(args[-1].shape)
        return nll(*args)

    monkeypatch.setattr(LoadedModel, "nll", recorded)
    with caplog.at_level("INFO", "mini_gpt"):
        measure((8, 16, 100), (4,), train__batch_size=4)
    assert {shape for shape in shapes} == {(4, 8), (2, 16), (1, 100)}, "32 tokens per batch, or one longer window"
    windows = [Windowing(8, 8, 1, 149), Windowing(16, 4, 110, 149)]
    assert [w.cost for w in windows] == [19 * 8, 16 * 10]
    # By hand: 19 blocks of 8, 10 of 16, 2 of 100; 40 targets in strides of 4: 10 windows of each length.
    assert f"{19 * 8 + 10 * 16 + 2 * 100 + 10 * 8 + 10 * 16 + 10 * 100:,} tokens go through" in caplog.text


@pytest.mark.parametrize(
    "text, lengths",
    [
        ("1x,2x,16x", (64, 128, 1024)),
        ("100", (100,)),
        ("2x,64,1x", (64, 128)),
        ("0.25x,1.5x", (16, 96)),
        ("1.1x", (110,)),
    ],
)
def test_lengths_are_tokens_or_multiples_of_the_context(text, lengths):
    trained = 100 if text == "1.1x" else 64
    assert extrapolation.parse_lengths("--lengths", text, trained, 2) == lengths


@pytest.mark.parametrize(
    "text, message",
    [
        ("1", r"--lengths: found '1'; must be at least 2"),
        ("-64", r"--lengths: found '-64'; must be at least 2"),
        ("1/3x", r"must be a whole number"),
        ("0x", r"must be at least 2"),
        ("far", r"--lengths: found 'far'; must be a whole number, .*2x \(1x is 64\)"),
        ("64,", r"--lengths: found ''; must be a whole number"),
        ("0.3x", r"--lengths: found '0.3x'; must be a whole number"),
        ("infx", r"--lengths: found 'infx'; must be a whole number"),
        ("1e5000", r"--lengths: found '1e5000'; must be a whole number"),
        ("1e999999999x", r"--lengths: found '1e999999999x'; must be a whole number"),
        ("9" * 5000, r"--lengths: found '9{199}…; must be a whole number"),
        ("1/0", r"--lengths: found '1/0'; must be a whole number"),
    ],
)
def test_bad_lengths_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        extrapolation.parse_lengths("--lengths", text, 64, 2)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"--strides: found 65, longer than the window of 64"):
        extrapolation.check_strides((64, 128), (16, 65))
    with pytest.raises(UserError, match=r"the test split has 200 tokens.* that can be scored: 64, 128$"):
        extrapolation.plan(200, "test", (64, 128, 200, 256), (16,))
    with pytest.raises(UserError, match="that can be scored: none of those given"):
        extrapolation.plan(20, "test", (64,), ())
    assert extrapolation.plan(201, "test", (200,), (1,))[-1] == Windowing(200, 1, 200, 200)
    assert extrapolation.plan(201, "test", (50,), (25,), 7)[-1] == Windowing(50, 25, 194, 200)
    assert extrapolation.plan(201, "test", (50,), (25,), 10**9)[-1] == Windowing(50, 25, 26, 200)

"""The loss of a split and beyond the context, against separate forward passes."""

import dataclasses
import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data.text_batches import Vocab, corrupted_blocks
from mini_gpt.evaluation import extrapolation, perplexity, scoring
from mini_gpt.evaluation.extrapolation import Windowing
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import loss as losses
from mini_gpt.objectives import base
from mini_gpt.runtime import devices, progress
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.random_models import random_model

# The loss of a split, against the logits of one block or one document at a time.

TOKEN_BYTES = np.array([1] * 256 + [0])


@pytest.fixture
def make_model(small):
    return lambda **overrides: random_model(small(**overrides), TOKEN_BYTES)


def make_tokens(count):
    tokens = np.random.default_rng(0).integers(256, size=count)
    tokens[5::17] = 256
    return tokens


@pytest.mark.parametrize("devices", [4, *slow(1)])
def test_blocks_score_each_token_once(make_model, devices):
    model, tokens = make_model(mesh__data=devices), make_tokens(300)
    score = perplexity.score_split(model, tokens, TOKEN_BYTES)
    forward, total = jax.jit(model.merge()), 0.0
    for start in range(0, 299, 32):
        block = tokens[start : start + 33]
        padded = jnp.array(np.pad(block, (0, 33 - len(block))))[None]
        total += float(losses.nll(forward(padded[:, :-1]), padded[:, 1:])[0, : len(block) - 1].sum())
    assert score.nll_sum == pytest.approx(total, rel=1e-5)
    assert (score.tokens, score.bytes) == (299, int((tokens[1:] != 256).sum()))


@pytest.mark.slow
def test_isolated_documents_are_scored_as_in_training(make_model):
    model, tokens = make_model(data__isolate_documents=True), make_tokens(33)
    score = perplexity.score_split(model, tokens, TOKEN_BYTES)
    starts = [0, *np.flatnonzero(tokens[:-1] == 256).tolist(), 32]
    forward, total = jax.jit(model.merge()), 0.0
    for start, end in itertools.pairwise(starts):  # each document alone, with its separator first
        logits = forward(jnp.array(tokens[start:end])[None])
        total += float(losses.nll(logits, jnp.array(tokens[start + 1 : end + 1])[None]).sum())
    assert score.nll_sum == pytest.approx(total, rel=1e-5)
    joined = perplexity.score_split(make_model(), tokens, TOKEN_BYTES)
    assert joined.nll_sum != pytest.approx(total, rel=1e-3)


@pytest.mark.slow
def test_masked_separators_still_isolate_documents(make_model):
    overrides = {"train__objective": "masked", "model__causal": False, "train__mask_rate": 0.5}
    model, tokens = make_model(data__isolate_documents=True, **overrides), make_tokens(32)
    tokens[::5] = 256
    score = perplexity.score_split(model, tokens, TOKEN_BYTES)
    ((rows, batch),) = corrupted_blocks(tokens, model.config, vocab=Vocab(257, 257), batch_size=1, seed=0)
    assert (batch["inputs"][0, tokens == 256] != 256).any(), "some separators are masked"
    starts = [*np.flatnonzero(tokens == 256).tolist(), 32]
    forward, total = jax.jit(model.merge()), 0.0
    for start, end in itertools.pairwise(starts):
        nll = losses.nll(forward(jnp.array(batch["inputs"][:, start:end])), jnp.array(batch["targets"][:, start:end]))
        total += float((nll * batch["weights"][:, start:end]).sum())
    assert rows == 1 and score.tokens == batch["weights"].sum()
    assert score.nll_sum == pytest.approx(total, rel=1e-5)


def test_each_stretch_of_a_sample_has_masks_of_its_own(make_model, monkeypatch):
    masked = {"train__objective": "masked", "model__causal": False, "train__mask_rate": 0.5}
    model, masks = make_model(**masked, train__batch_size=2), []
    monkeypatch.setattr(
        perplexity,
        "make_nll_fn",
        lambda _: lambda inputs, targets: masks.extend(inputs == 257) or np.zeros(inputs.shape),
    )
    for _ in range(2):
        perplexity.score_split(model, np.zeros(10_000, int), TOKEN_BYTES, most_tokens=2 * 16 * 32)
    first, again = np.array(masks).reshape(2, 32, 32)  # 16 stretches of two blocks
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first, axis=0)) == 32


def test_a_batch_has_no_more_tokens_than_in_training(make_model, monkeypatch):
    model = make_model(train__batch_size=8, train__accumulation_steps=4)
    shapes, seen, nll = set(), [], LoadedModel.nll

    def recorded(*args):
        shapes.add(args[-1].shape)
        return nll(*args)

    monkeypatch.setattr(LoadedModel, "nll", recorded)
    perplexity.score_split(model, make_tokens(300), TOKEN_BYTES)
    assert shapes == {(2, 32)}
    shapes.clear()
    longer = dataclasses.replace(make_model(context_length=64), batch_tokens=130)
    monkeypatch.setattr(progress, "advance", seen.append)
    perplexity.score_split(longer, make_tokens(300), TOKEN_BYTES)
    assert shapes == {(2, 64)} and sum(seen) == 5 * 64  # five windows, in batches of two


@pytest.mark.parametrize("masked", [False, True])
def test_threads_do_not_change_the_loss(make_model, monkeypatch, masked):
    fields = {"train__objective": "masked", "model__causal": False} if masked else {}
    model, tokens, callers, nll = make_model(train__batch_size=2, **fields), make_tokens(2000), set(), LoadedModel.nll

    def recorded(*args):
        callers.add(threading.current_thread())
        return nll(*args)

    monkeypatch.setattr(LoadedModel, "nll", recorded)
    monkeypatch.setattr(devices, "cores", lambda: [0])
    alone = perplexity.score_split(model, tokens, TOKEN_BYTES)
    assert callers == {threading.main_thread()}
    monkeypatch.setattr(devices, "cores", lambda: [0, 1, 2])
    together = perplexity.score_split(model, tokens, TOKEN_BYTES)
    assert 2 <= len(callers) <= 4
    assert together.nll_sum == alone.nll_sum and together.tokens == alone.tokens


def test_batches_that_run_at_the_same_time_are_small_and_on_one_device(make_model, monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: [3, 5, 7])
    model = make_model(train__batch_size=2)
    assert model.batches_at_a_time == 3
    assert dataclasses.replace(model, batch_tokens=2**13).batches_at_a_time == 2
    assert dataclasses.replace(model, batch_tokens=2**20).batches_at_a_time == 1
    assert make_model(train__batch_size=2, mesh__data=2).batches_at_a_time == 1


def test_a_split_too_short_to_score_is_refused(small):
    config = small(model__position="learned")
    with pytest.raises(UserError, match="the split has 1 tokens; must have at least 2"):
        perplexity.check_scorable(config, 1)
    perplexity.check_scorable(config, 2)
    masked = small(train__objective="masked", model__causal=False)
    with pytest.raises(UserError, match="the split has 31 tokens; must have at least 32"):
        perplexity.check_scorable(masked, 31)


@pytest.mark.parametrize("masked", [False, True])
def test_a_metric_of_your_own_gets_the_loss_of_each_token(make_model, monkeypatch, masked):
    fields = {"train__objective": "masked", "model__causal": False} if masked else {}
    model, tokens = make_model(**fields), make_tokens(2000)
    score = perplexity.score_split(model, tokens, TOKEN_BYTES, most_tokens=512)
    assert len(score.losses_T) == score.tokens and score.losses_T.std() > 0.1
    assert score.losses_T.sum(dtype=np.float64) == pytest.approx(score.nll_sum, rel=1e-12)
    before = perplexity.result(score, model)
    monkeypatch.setitem(scoring.METRICS, "worst", lambda score: score.losses_T.max())
    after = perplexity.result(score, model)
    assert list(before) == [name for name in after if name != "worst"] and after["worst"] > after["nll"]
    assert type(after["worst"]) is float and (after["bits_per_byte"] is None) == masked
    logged = base.scalars(score.nll, scoring.metrics(score))
    defined = {"loss", "worst"} if masked else {"loss", "worst", "bits_per_byte"}
    assert set(logged) == {f"validation/{name}" for name in defined}


# Extrapolation, against a separate forward pass on the context of each target.

SOME_OF_TWO_BYTES = np.array([1] * 200 + [2] * 56 + [0])
TOKENS = np.random.default_rng(0).integers(256, size=150)


@pytest.fixture
def measure(small, monkeypatch):
    """Return a function that scores tokens, by default random ones, and returns (rows, by_position, model, tokens)."""

    def make(lengths, strides, tokens=TOKENS, **overrides):
        monkeypatch.setattr(extrapolation, "SLIDING_TARGETS", 40)
        config = small(context_length=8, **overrides)
        model = random_model(config, SOME_OF_TWO_BYTES)
        windowings = extrapolation.plan(len(tokens), "validation", lengths, strides)
        rows, by_position = extrapolation.extrapolation(model, tokens, SOME_OF_TWO_BYTES, windowings)
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
        text_bytes = SOME_OF_TWO_BYTES[tokens[list(starts)]].sum()
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

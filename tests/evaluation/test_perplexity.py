"""The loss of a split, against the logits of one block or one document at a time."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data.text_batches import Vocab, corrupted_blocks
from mini_gpt.evaluation import perplexity, scoring
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import loss as losses
from mini_gpt.objectives import base
from mini_gpt.runtime import devices, progress
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.random_models import random_model

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

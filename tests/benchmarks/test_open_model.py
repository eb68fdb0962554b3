"""Measurements of an open model's heads, in models whose mechanism or loss is known."""

import itertools
import types

import numpy as np
import pytest

from benchmarks import english_pairs, open_model, open_model_context
from mini_gpt.data.subwords import BpeTokenizer
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.mechanisms import patching
from mini_gpt.training.run import Run
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import encode
from tests.random_models import random_model


def test_the_induction_heads_of_the_handmade_model_are_found_and_needed(small, monkeypatch):
    model = handmade.induction(small)
    for name, value in {"LENGTH": 8, "ROWS": 4, "CHOSEN": 1, "DRAWS": 1}.items():
        monkeypatch.setattr(open_model, name, value)
    text_BL = np.random.default_rng(0).permuted(np.tile(encode("abcdef"), (4, 2)), axis=1)[:, :9].astype(np.int32)
    found = open_model.induction(types.SimpleNamespace(model=model), open_model.Texts(text_BL, text_BL))
    assert list(found["strongest"]["induction"]) == ["1.0"]
    assert list(found["strongest"]["previous token"]) == ["0.0"]
    with_all, without = (
        found["nll_without"][name]["repeated random tokens"][0]["nll"] for name in ("none", "induction")
    )
    assert without > with_all + 1


@pytest.mark.slow
def test_patching_single_heads_equals_the_suite(small):
    model = handmade.induction(small)
    (*clean, answer), (*corrupted, other) = encode("abcdab"), encode("aecdae")
    pair = patching.TextPair(np.array(clean, np.int32), np.array(corrupted, np.int32), answer, other)
    np.testing.assert_allclose(open_model._effects(model, pair), patching.patch(model, pair).heads_NH, atol=1e-5)
    layers, heads = model.config.model.num_layers, model.config.model.num_heads
    everything = [head for head in np.ndindex(layers, heads)]
    assert open_model._patched(model, pair, [[], everything])[0] == pytest.approx(0, abs=1e-5)


def test_weights_on_marked_keys_equal_the_attention_maps(small):
    model, random = random_model(small(model__num_layers=2), np.ones(20, int)), np.random.default_rng(0)
    tokens_BL = random.integers(model.vocab_size, size=(3, 16)).astype(np.int32)
    is_key_BLS = (random.random((3, 16, 16)) < 0.3) & np.tri(16, dtype=bool)
    expected_NH = [
        np.einsum("bhls,bls->h", layer.weights_BHLS, is_key_BLS) / is_key_BLS.any(-1).sum()
        for layer in attention_maps(model, tokens_BL)
    ]
    np.testing.assert_allclose(open_model._mean_weight(model, tokens_BL, is_key_BLS), expected_NH, atol=1e-6)


def test_the_loss_without_heads_counts_only_marked_targets(small):
    model = random_model(small(), np.ones(20, int))
    tokens_BL = np.random.default_rng(0).integers(model.vocab_size, size=(3, 17)).astype(np.int32)
    counted_BL = np.arange(16) >= np.array([[4], [8], [12]])
    logits_BLV = np.asarray(model(tokens_BL[:, :-1]), np.float64)
    log_BLV = logits_BLV - np.log(np.exp(logits_BLV).sum(-1, keepdims=True))
    nll_BL = -np.take_along_axis(log_BLV, tokens_BL[:, 1:, None], -1)[..., 0]
    found = open_model._loss(model, [], tokens_BL, counted_BL)
    assert found["nll"] == pytest.approx(nll_BL[counted_BL].mean(), abs=1e-5)
    means_B = [row[counted].mean() for row, counted in zip(nll_BL, counted_BL, strict=True)]
    assert found["standard_error"] == pytest.approx(np.std(means_B, ddof=1) / np.sqrt(3), abs=1e-5)


def test_pairs_differ_in_one_word_and_have_answers_of_one_token():
    sentences = [
        text for make in (english_pairs._objects, english_pairs._years, english_pairs._agreement) for text in make()
    ]
    tokenizer = BpeTokenizer.train([" ".join(sentence) + " 8 1" for sentence in sentences], 600)
    for name, pairs in english_pairs.tasks(tokenizer).items():
        assert pairs, name
        for pair in pairs:
            assert len(pair.clean_L) == len(pair.corrupted_L) and (pair.clean_L != pair.corrupted_L).any()
            texts = [tokenizer.decode(tokens.tolist()).split() for tokens in pair[:2]]
            assert sum(one != other for one, other in zip(*texts, strict=True)) == 1
            assert pair.clean_answer != pair.corrupted_answer


@pytest.mark.slow
def test_losses_by_window_and_beyond_the_context_are_those_of_each_target_alone(trained, monkeypatch):
    for name, value in {"DOCUMENTS": {"windows": 3, "beyond": 3}, "WINDOWS": ((8, 8), (2, 8)), "BINS": 4}.items():
        monkeypatch.setattr(open_model_context, name, value)
    run = Run(trained())
    rows_XL = open_model_context._documents(run, 3)
    assert rows_XL.shape == (3, 65)

    def losses(model, targets, length, stride):
        """Return the loss of each target, whose windows of this length move by the stride."""
        nll_XT = np.empty((3, len(targets)))
        for (x, row_L), (n, target) in itertools.product(enumerate(rows_XL), enumerate(targets)):
            start = max(0, target - 1 - (target - targets[0]) % stride - (length - stride))
            padded_L = np.pad(row_L[start:target], (0, 64 - target + start))  # one length, so that JAX compiles once
            logits_V = np.asarray(model(padded_L[None]), np.float64)[0, target - start - 1]
            nll_XT[x, n] = np.log(np.exp(logits_V).sum()) - logits_V[row_L[target]]
        return nll_XT

    found, blocks_X = open_model_context.windows(run), losses(run.model, range(17, 33), 4, 4).mean(axis=1)
    for row, (length, stride) in zip(found["rows"], ((4, 4), (16, 4)), strict=True):
        means_X = losses(run.model, range(17, 33), length, stride).mean(axis=1)
        assert row["perplexity"] == pytest.approx(np.exp(means_X.mean()), rel=1e-5)
        assert row["against the first"]["mean"] == pytest.approx((means_X - blocks_X).mean(), abs=1e-5)
        assert row["nll"]["standard_error"] == pytest.approx(np.std(means_X, ddof=1) / np.sqrt(3), abs=1e-5)
    found = open_model_context.beyond(run)["against sliding"]
    sliding_XT = losses(run.model, range(33, 65), 32, 16)
    for scaling, factor in {"none": {}, "yarn": {"model.rope.factor": "2"}}.items():
        model = Run(run.workdir, overrides={"model.rope.scaling": scaling} | factor).model
        difference_XT = losses(model, range(33, 65), 64, 32) - sliding_XT
        assert found[scaling]["beyond"]["mean"] == pytest.approx(difference_XT.mean(), abs=1e-5)
        assert found[scaling]["bins"][3]["mean"] == pytest.approx(difference_XT[:, 16:].mean(), abs=1e-5)
    assert found["none"]["within"]["mean"] == pytest.approx(0, abs=1e-5)

"""Attributions add up to the logit, and name the parts that write it in models whose mechanism is known."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.special

from mini_gpt.insight import observing
from mini_gpt.insight.mechanisms.attribution import attribute
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import encode
from tests.random_models import random_model

SIZE = {"model__num_layers": 3, "model__num_heads": 2, "model__d_model": 8, "context_length": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {"model__use_bias": True, "model__attention_out_bias": True, "model__output_bias": True},
        *slow(
            {"model__norm": "rmsnorm", "model__parallel_residual": "one_norm", "model__scan_layers": True},
            {"model__output_norm": True, "model__position": "learned", "model__tie_embeddings": False},
            {"model__norm_placement": "none", "model__output_norm": True, "model__norm": "rmsnorm"},
            {"model__norm_weights": False, "model__scale_embeddings": True},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("other", [2, *slow(None)])
def test_shares_add_up_to_the_difference_of_logits(small, fields, other):
    model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
    tokens = encode("abcdef")
    logits_V = np.float64(model.logits(tokens[None])[0, -1])
    found = attribute(model, tokens, 4, other)
    expected = logits_V[4] - (logits_V.mean() if other is None else logits_V[other])
    assert found.total == pytest.approx(expected, abs=2e-5 * np.abs(logits_V).max() + 1e-5)
    parts = [found.embedding, *found.heads_NH.flat, *found.attention_N, *found.feed_forward_N, found.constant]
    assert sum(map(float, parts)) == pytest.approx(expected, abs=1e-4)
    assert np.abs(found.heads_NH).min() > 0


def test_the_share_of_a_head_is_that_of_its_output(small):
    """Recompute the shares in float64 from the weights of a model with one layer."""
    fields = {"model__num_layers": 1, "model__use_bias": True, "model__norm": "layernorm", "model__position": "none"}
    model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
    tokens, p = encode("abcd"), jax.tree.map(np.float64, model.parameters)
    block, epsilon = p["blocks"][0], model.config.model.norm_epsilon
    scaled = lambda x, whole: (x - x.mean(-1, keepdims=True)) / np.sqrt(whole.var(-1, keepdims=True) + epsilon)
    linear = lambda x, q: x @ q["kernel"] + q.get("bias", 0)
    x_LD, norm = p["embedding"][tokens], block["attention_norm"]
    inputs_LD = scaled(x_LD, x_LD) * norm["scale"] + norm["bias"]
    q_LD, k_LD, v_LD = (linear(inputs_LD, block["attention"][name]) for name in ("query", "key", "value"))
    parts = []
    for head in (slice(0, 4), slice(4, 8)):
        logits_S = q_LD[-1, head] @ k_LD[:, head].T / 2
        parts.append(scipy.special.softmax(logits_S) @ v_LD[:, head] @ block["attention"]["out"]["kernel"][head])
    whole_D = np.float64(observing.layers(model.merge(), model.with_layout(tokens[None]))[0].after_BLD[0, -1])
    direction_D = p["final_norm"]["scale"] * (p["embedding"][1] - p["embedding"][3])
    expected = [scaled(part_D, whole_D) @ direction_D for part_D in parts]
    np.testing.assert_allclose(attribute(model, tokens, 1, 3).heads_NH[0], expected, rtol=1e-4, atol=1e-5)


def test_the_induction_head_writes_the_whole_prediction(small):
    found = attribute(handmade.induction(small), encode("abcda"), *encode("be"))
    assert found.total > 1 and found.heads_NH[1, 0] == pytest.approx(found.total, rel=1e-4)
    np.testing.assert_allclose([found.heads_NH[0, 0], found.heads_NH[0, 1], found.heads_NH[1, 1]], 0, atol=1e-6)
    np.testing.assert_allclose(
        [found.embedding, *found.attention_N, *found.feed_forward_N, found.constant], 0, atol=1e-6
    )


def test_the_counting_head_writes_the_balance_of_brackets(small):
    shares = [
        attribute(handmade.brackets(small), encode(text), *encode("cd")).heads_NH[0, 1] for text in ("aab", "ab", "abb")
    ]
    assert (
        shares[0] > 0 and shares[1] == pytest.approx(0, abs=1e-6) and shares[2] == pytest.approx(-shares[0], rel=1e-4)
    )


def test_models_that_are_no_sum_of_layers_are_refused(small):
    for fields in ({"model__norm_placement": "post"}, {"model__residual": False}):
        model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes)
        with pytest.raises(UserError, match="use activation patching"):
            attribute(model, encode("abc"), 0)


def test_edits_that_break_the_sum_are_refused(small):
    model = random_model(small(**SIZE), handmade.TOKENIZER.token_bytes)
    for site in ("stream", "attention"):
        edits = Edits(**{site: Edit(np.ones((3, 1, 1, 1), np.float32))})
        with pytest.raises(UserError, match=f"edits.{site}: attribution needs"):
            attribute(dataclasses.replace(model, edits=edits), encode("abc"), 0)
    with pytest.raises(UserError, match="answer: found -1"):
        attribute(model, encode("abc"), -1)

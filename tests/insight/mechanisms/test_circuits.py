"""Circuits, roles of heads, and attribution."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.special

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.insight import observing
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.mechanisms import circuits, head_roles
from mini_gpt.insight.mechanisms.attribution import attribute
from mini_gpt.insight.mechanisms.circuits import Head
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.conftest import SMALL, slow
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import V, encode
from tests.random_models import random_model

# Circuits of heads equal what the model computes, and show the known mechanism of models made by hand.

ALL = np.arange(V)
SIZE = {"model__num_layers": 1, "model__num_heads": 4, "model__d_model": 16, "context_length": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {"model__position": "rope", "model__num_kv_heads": 2},
        {"model__position": "alibi", "model__use_bias": True, "model__qkv_bias": True},
        *slow(
            {"model__position": "t5", "model__variants__qk_norm": "weighted", "model__variants__soft_cap": 5.0},
            {"model__position": "none", "model__embedding_norm": True, "model__norm": "rmsnorm"},
        ),
    ],
    ids=str,
)
def test_the_qk_circuit_equals_the_logits_of_the_first_layer(small, fields):
    model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
    text_L = np.array([3, 1, 4, 1, 5], np.int32)
    logits_HLS = attention_maps(model, text_L[None])[0].logits_BHLS[0]
    for head in (0, 3):
        for query, key in ((4, 4), (4, 0), (3, 2)):
            found = Head(model, 0, head).qk(ALL, distance=query - key)[text_L[query], text_L[key]]
            assert found == pytest.approx(logits_HLS[head, query, key], rel=1e-4, abs=1e-5)


def test_the_ov_circuit_equals_the_change_of_logits(small):
    """With the last norm as a linear map, logits differ by OV between heads that attend to one token or another."""
    fields = {"model__num_kv_heads": 2, "model__use_bias": True, "model__qkv_bias": True, "model__norm": "layernorm"}
    model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
    p = jax.tree.map(np.float64, model.parameters)
    block, head = p["blocks"][0], 3
    x_VD, q = p["embedding"], block["attention_norm"]
    x_VD = (x_VD - x_VD.mean(-1, keepdims=True)) / np.sqrt(x_VD.var(-1, keepdims=True) + 1e-5) * q["scale"] + q["bias"]
    value_VK = (x_VD @ block["attention"]["value"]["kernel"] + block["attention"]["value"]["bias"])[:, 4:8]
    added_VD = value_VK @ block["attention"]["out"]["kernel"][12:16]
    expected = (added_VD - added_VD.mean(-1, keepdims=True)) * p["final_norm"]["scale"] @ p["embedding"].T
    np.testing.assert_allclose(Head(model, 0, head).ov(ALL), expected, rtol=1e-3, atol=1e-4)


def test_the_induction_head_copies_and_the_others_do_not(small):
    model = handmade.induction(small)
    letters = ALL[:-1]
    assert Head(model, 1, 0).copying(letters) == pytest.approx(1, abs=1e-6)
    ov = Head(model, 1, 0).ov(letters)
    np.testing.assert_allclose(ov, np.eye(V - 1) * ov[0, 0], atol=1e-6)
    assert ov[0, 0] > 0 and np.abs(Head(model, 0, 0).ov(letters)).max() == 0  # it writes to no logit


def test_a_head_that_lowers_the_attended_token_has_copying_of_minus_one(small):
    model = handmade.induction(small)
    parameters = jax.tree.map(np.array, model.parameters)
    parameters["blocks"][1]["attention"]["out"]["kernel"] *= -1
    assert Head(dataclasses.replace(model, parameters=parameters), 1, 0).copying(ALL) == pytest.approx(-1, abs=1e-6)


def test_keys_of_the_induction_head_read_the_previous_token_head(small):
    scores = circuits.composition(handmade.induction(small))
    found = {name: score[0, 0, 1, 0] for name, score in scores.items()}
    # W_OV has V equal singular values; those of W_QK are for V keys and for the first place, on V queries.
    assert found["key"] == pytest.approx((2 * V) ** -0.5, rel=1e-5) and found["query"] == found["value"] == 0
    assert all(np.abs(score[1]).max() == 0 and np.abs(score[:, :, 0]).max() == 0 for score in scores.values())


@pytest.mark.parametrize("qk_norm", ["weighted", *slow("all_heads", "layernorm")])
def test_composition_has_the_weights_of_the_norms(small, qk_norm):
    fields = {"model__num_layers": 2, "model__num_kv_heads": 2, "model__norm": "rmsnorm"}
    fields["model__variants__qk_norm"] = qk_norm
    model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
    scores = circuits.composition(model)
    p = jax.tree.map(np.float64, model.parameters)
    first, second = (block["attention_norm"]["scale"][:, None] for block in (p["blocks"][0], p["blocks"][1]))
    layers = [p["blocks"][layer]["attention"] for layer in range(2)]
    written_DD = first * layers[0]["value"]["kernel"][:, 4:8] @ layers[0]["out"]["kernel"][12:16]  # head 3, group 1
    (norms,) = (node for node in layers[1]["on_heads"].values() if "query_norm" in node)
    made = {}
    for name, head in (("query", 1), ("key", 0)):
        kernel_DK, scale = layers[1][name]["kernel"][:, 4 * head :][:, :4], norms[f"{name}_norm"]["scale"]
        kernel_DK = kernel_DK - kernel_DK.mean(-1, keepdims=True) * (qk_norm == "layernorm")
        made[name] = second * kernel_DK * (scale[4 * head :][:4] if qk_norm == "all_heads" else scale)
    qk_DD = made["query"] @ made["key"].T
    for name, matrix_DD in {"query": qk_DD, "key": qk_DD.T}.items():
        norms = [np.linalg.norm(matrix) for matrix in (written_DD @ matrix_DD, written_DD, matrix_DD)]
        assert scores[name][0, 3, 1, 1] == pytest.approx(norms[0] / norms[1] / norms[2], rel=1e-5)


def test_composition_equals_the_products_of_whole_matrices(small):
    model = random_model(small(**SIZE | {"model__num_layers": 2}), handmade.TOKENIZER.token_bytes, noise=0.4)
    scores = circuits.composition(model)
    first, second = Head(model, 0, 1), Head(model, 1, 2)
    full = lambda left, right: np.asarray(left, np.float64) @ np.asarray(right, np.float64)
    written_DD, qk_DD = full(first.value_DK(), first.out_KD()), full(second.query_DK(), second.key_DK().T)
    for name, matrix_DD in {"query": qk_DD, "key": qk_DD.T, "value": full(second.value_DK(), second.out_KD())}.items():
        norms = [np.linalg.norm(matrix) for matrix in (written_DD @ matrix_DD, written_DD, matrix_DD)]
        assert scores[name][0, 1, 1, 2] == pytest.approx(norms[0] / norms[1] / norms[2], rel=1e-5)


def test_too_many_tokens_are_refused(small):
    with pytest.raises(UserError, match="give at most 4096"):
        Head(handmade.induction(small), 0, 0).ov(np.zeros(5000, int))


@pytest.mark.parametrize(
    "fields, method",
    [
        ({"model__position": "fox"}, "qk"),
        ({"model__position": "relative_logits"}, "qk"),
        ({"model__position": "accumulated"}, "qk"),
        ({"model__variants__differential": True}, "ov"),
        ({"model__variants__latent": 8}, "qk"),
        ({"model__variants__latent": 8}, "ov"),
        ({"model__variants__query_scale": "ssmax"}, "qk"),
        ({"model__output_norm": True}, "ov"),
        ({"model__norm_placement": "post"}, "copying"),
        ({"model__variants__gate": "head"}, "ov"),
        ({"model__variants__clip_qkv": 8.0}, "copying"),
    ],
    ids=str,
)
def test_a_field_that_circuits_do_not_support_is_refused(small, fields, method):
    model = random_model(small(**SIZE | fields), handmade.TOKENIZER.token_bytes)
    with pytest.raises(UserError, match="circuits do not support it"):
        getattr(Head(model, 0, 0), method)(ALL)
    if method != "qk":
        with pytest.raises(UserError, match="circuits do not support it"):
            circuits.composition(model)


# The circuits suite reports copying, the strongest pairs of tokens, and which earlier heads are read.

LETTERS = np.arange(V - 1)
TWO_LAYERS = {"model__num_layers": 2, "model__num_heads": 2, "model__d_model": 16, "context_length": 8}


def test_the_induction_head_writes_the_token_that_it_attends_to(small):
    found = head_roles.roles(handmade.induction(small), LETTERS, pairs=len(LETTERS))
    assert [(role.layer, role.head) for role in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(found[2].writes) == [(token, token) for token in LETTERS]
    assert found[2].copying == pytest.approx(1) and found[3].copying == 0


def test_pairs_are_the_largest_entries_above_the_mean_of_the_row(small):
    model, tokens_T = random_model(small(**TWO_LAYERS), handmade.TOKENIZER.token_bytes, noise=0.4), np.array([4, 1, 3])
    role = head_roles.roles(model, tokens_T, pairs=3)[3]
    for pairs, scores_TT in {
        "attends": Head(model, 1, 1).qk(tokens_T, 1),
        "writes": Head(model, 1, 1).ov(tokens_T),
    }.items():
        above = {
            (q, k): scores_TT[i, j] - scores_TT[i].mean()
            for i, q in enumerate(tokens_T)
            for j, k in enumerate(tokens_T)
        }
        assert getattr(role, pairs) == sorted(above, key=above.get, reverse=True)[:3]


def test_a_head_without_a_qk_circuit_has_no_pairs_of_attention(small):
    model = random_model(small(**TWO_LAYERS | {"model__position": "fox"}), handmade.TOKENIZER.token_bytes, noise=0.4)
    assert all(role.attends is None and role.writes for role in head_roles.roles(model, LETTERS, pairs=2))


@pytest.mark.slow
def test_the_suite_reports_the_most_frequent_tokens(trained):
    run = Run(trained(model__num_layers=2))
    result = suites.evaluate(run, "circuits", SuiteOptions())
    tokens = np.asarray(run.store.tokens("validation"))
    assert result["tokens"][0] == chr(np.bincount(tokens).argmax()).replace(" ", "·")
    assert len(result["heads"]) == 8 and np.shape(result["composition"]["value"]) == (2, 4, 2, 4)
    rows = suites.SUITES["circuits"].rows(result)
    assert [row["key"] is None for row in rows] == [True] * 4 + [False] * 4
    place, score = rows[-1]["value"].split()
    layer, head = map(int, place.split("."))
    assert float(score) == pytest.approx(np.max(result["composition"]["value"], axis=(0, 1))[1, 3], abs=0.006)
    assert result["composition"]["value"][layer][head][1][3] == pytest.approx(float(score), abs=0.006)
    assert {path.suffix for path in (run.workdir / "eval").glob("circuits*")} == {".json", ".csv", ".png"}
    assert suites.evaluate(run, "circuits", SuiteOptions(text="abba"))["tokens"] == ["a", "b"]


def test_a_field_without_circuits_is_refused_before_measuring():
    config = loading.load("configs/default.py", SMALL | {"data.path": "unused", "model.norm_placement": "post"})
    with pytest.raises(
        UserError, match=r"--suite=circuits does not support model.norm_placement=post; use --suite=patch"
    ):
        suites.SUITES["circuits"].check(config, SuiteOptions())


# Attributions add up to the logit, and name the parts that write it in models whose mechanism is known.

THREE_LAYERS = {"model__num_layers": 3, "model__num_heads": 2, "model__d_model": 8, "context_length": 8}


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
    model = random_model(small(**THREE_LAYERS | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
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
    model = random_model(small(**THREE_LAYERS | fields), handmade.TOKENIZER.token_bytes, noise=0.4)
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
        model = random_model(small(**THREE_LAYERS | fields), handmade.TOKENIZER.token_bytes)
        with pytest.raises(UserError, match="use activation patching"):
            attribute(model, encode("abc"), 0)


def test_edits_that_break_the_sum_are_refused(small):
    model = random_model(small(**THREE_LAYERS), handmade.TOKENIZER.token_bytes)
    for site in ("stream", "attention"):
        edits = Edits(**{site: Edit(np.ones((3, 1, 1, 1), np.float32))})
        with pytest.raises(UserError, match=f"edits.{site}: attribution needs"):
            attribute(dataclasses.replace(model, edits=edits), encode("abc"), 0)
    with pytest.raises(UserError, match="answer: found -1"):
        attribute(model, encode("abc"), -1)

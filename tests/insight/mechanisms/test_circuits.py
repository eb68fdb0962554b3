"""Circuits of heads equal what the model computes, and show the known mechanism of models made by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.mechanisms import circuits
from mini_gpt.insight.mechanisms.circuits import Head
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.insight.mechanisms import handmade
from tests.insight.mechanisms.handmade import V
from tests.random_models import random_model

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

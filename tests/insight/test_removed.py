"""A model without some heads computes what the whole model computes with their outputs at zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.generation import cache
from mini_gpt.insight import removed
from mini_gpt.model import editing
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.random_models import random_model

HEADS = ((0, 3), (2,), (0, 1, 2, 3))
GROUPED = ((0, 3), (3,), (2, 3))  # of groups (0, 1) and (2, 3): one head of each, one head, one whole group
FIELDS = {"model.d_model": 32, "model.num_heads": 4, "model.num_layers": 3, "model.dtype": "float32"}


def model_of(position="rope", heads=None, **fields):
    dotted = {name.replace("__", "."): value for name, value in fields.items()}
    config = loading.load(
        "configs/tiny.py", FIELDS | {"model.position": position, "model.heads": heads, "mesh.data": 1} | dotted
    )
    return random_model(config, tokenizers.ByteTokenizer().token_bytes)


def tokens(rows, length):
    return np.random.default_rng(0).integers(0, 256, (rows, length)).astype(np.int32)


@pytest.mark.parametrize(
    ("position", "heads", "fields"),
    [
        ("rope", GROUPED, {"model__num_kv_heads": 2, "model__variants__qk_norm": "weighted"}),
        *slow(
            ("alibi", HEADS, {"model__variants__sink": "trained", "model__variants__gate": "head"}),
            ("rope", HEADS, {"model__num_kv_heads": 1, "model__norm": "rmsnorm", "model__activation": "swiglu"}),
            ("kerple", HEADS, {"model__variants__query_scale": "ssmax", "model__variants__gate": "entry"}),
            ("hard_alibi", HEADS, {"model__attention_window": (4, None, 6)}),
            ("fire", HEADS, {"model__variants__canon": True}),
            ("fox", HEADS, {"model__output_norm": True}),
            ("cope", HEADS, {"model__variants__normaliser": "stick_breaking"}),
            ("learned", HEADS, {"model__parallel_residual": "one_norm"}),
            ("rope", HEADS, {"model__scan_layers": True}),
        ),
    ],
)
def test_a_smaller_model_equals_the_whole_one_with_these_heads_off(position, heads, fields):
    model, tokens_BL = model_of(position, **fields), tokens(2, 12)
    smaller = removed.smaller(model, heads)
    mask_NBH = removed.mask(model.config.model, heads)[:, None]
    expected_BLV = np.asarray(dataclasses.replace(model, edits=editing.head_mask(mask_NBH)).logits(tokens_BL))
    close = {"rtol": 2e-5, "atol": 2e-5 * np.abs(expected_BLV).max()}
    np.testing.assert_allclose(smaller.logits(tokens_BL), expected_BLV, **close)
    np.testing.assert_allclose(removed.whole(smaller).logits(tokens_BL), expected_BLV, **close)
    lengths_B = jnp.array([5, 9])
    logits_BV, kept = jax.jit(cache.prefill, static_argnums=3)(smaller, jnp.asarray(tokens_BL[:, :9]), lengths_B, 12)
    np.testing.assert_allclose(logits_BV, expected_BLV[[0, 1], [4, 8]], **close)
    assert [len(layer.keys_XSK) // 2 for layer in kept.layers] == [
        len({head * model.config.model.num_kv_heads // 4 for head in of_layer}) for of_layer in heads
    ]
    logits_BV, _ = jax.jit(cache.decode)(smaller, jnp.asarray(tokens_BL[[0, 1], [5, 9]]), kept)
    np.testing.assert_allclose(logits_BV, expected_BLV[[0, 1], [5, 9]], **close)


def test_all_parameters_of_removed_heads_and_groups_are_gone():
    whole = model_of(model__num_kv_heads=2)
    smaller, at = removed.smaller(whole, GROUPED), lambda model: model_parameters.count(model.parameters)
    width, d_model = 8, 32
    of_heads = 7 * width * (2 * d_model + 1)  # 7 heads: queries with biases, and rows of the output projection
    of_groups = 2 * width * 2 * (d_model + 1)  # 2 groups: keys and values with biases
    assert at(whole) - at(smaller) == of_heads + of_groups
    kernel = smaller.parameters["blocks"][0]["attention"]["key"]["kernel"]
    np.testing.assert_array_equal(kernel, whole.parameters["blocks"][0]["attention"]["key"]["kernel"])


def test_units_are_removed_from_the_least_important_on_and_each_layer_keeps_its_best():
    importance_NH = np.array([[4.0, 1, 2, 3], [9, 8, 7, 6], [0.1, 0.2, 0.3, 0.4]])
    config = model_of().config.model
    order = [(layer, *heads) for layer, heads in removed.removal_order(config, importance_NH)]
    assert order == [(2, 0), (2, 1), (2, 2), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1)]
    grouped = dataclasses.replace(config, num_kv_heads=2)
    assert removed.removal_order(grouped, importance_NH) == [(2, (0, 1)), (0, (0, 1)), (1, (2, 3))]
    assert removed.units(dataclasses.replace(config, heads=HEADS))[:3] == [(0, (0,)), (0, (3,)), (1, (2,))]


@pytest.mark.parametrize(
    ("field", "value", "heads", "message"),
    [
        ("model.position", "t5", HEADS, "model.position: found 't5'; needs model.heads=None"),
        ("model.position", "pope", HEADS, "model.position: found 'pope'; needs model.heads=None"),
        ("model.variants.selective", True, HEADS, "model.variants.selective: found True; needs model.heads=None"),
        (
            "model.variants.qk_norm",
            "all_heads",
            HEADS,
            "model.variants.qk_norm: found 'all_heads'; needs model.heads=None",
        ),
        ("model.scan_layers", True, HEADS, "model.scan_layers: found True; needs model.heads=None"),
        ("model.num_kv_heads", 2, (*HEADS[:2], (0, 1, 2)), "equally many heads in each of its groups"),
        ("model.num_layers", 3, HEADS[:2], "needs for each of 3 layers numbers below 4, in order"),
        ("model.num_layers", 3, ((), (0,), (1,)), "needs for each of 3 layers"),
        ("model.num_layers", 3, ((1, 0), (0,), (1,)), "needs for each of 3 layers"),
        ("model.num_layers", 3, ((4,), (0,), (1,)), "needs for each of 3 layers"),
    ],
)
def test_heads_that_can_not_be_kept_are_refused_by_name(field, value, heads, message):
    with pytest.raises(UserError, match=message):
        loading.load("configs/tiny.py", FIELDS | {field: value, "model.heads": heads})

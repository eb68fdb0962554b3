"""Statistics, diagnosis and the explorer of models whose heads hide keys or have a sink."""

import numpy as np
import pytest

from mini_gpt.insight import attention
from mini_gpt.insight.diagnosis import blocks, probe
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.explorer import Explorer
from mini_gpt.suites.heads import Heads
from tests.conftest import slow
from tests.random_models import random_model

TOKEN_BYTES = np.array([1] * 256 + [0])
FIELDS = [
    {"model__position": "hard_alibi"},
    {"model__variants__sink": "trained"},
    {"model__position": ("fire", "rope")},
]


@pytest.mark.parametrize("fields", [FIELDS[2], *slow(*FIELDS[:2])], ids=str)
def test_statistics_and_diagnosis_are_finite(small, fields):
    model = random_model(small(model__num_layers=2, **fields), TOKEN_BYTES)
    tokens_BL = np.random.default_rng(0).integers(256, size=(2, 32))
    curves, weights_NHLS = attention.attention_statistics(model, tokens_BL, np.ones((2, 32), bool))
    sum_NHL = np.nansum(weights_NHLS, axis=-1)  # NaN: masked
    assert all(map(np.isfinite, curves.values())) and ((sum_NHL > 0) & (sum_NHL < 1.0001)).all()
    layers = probe.layers(model, tokens_BL)
    assert not any(result.found for result in blocks.stream(model, layers))
    for layer in layers:
        assert (layer.entropy_B >= 0).all() and (layer.entropy_B <= 1.0001).all()


def test_the_entropy_of_a_head_does_not_depend_on_the_weight_of_its_sink():
    weights = np.full((1, 1, 1, 4), 0.25)
    for share in (1.0, 0.01):
        np.testing.assert_allclose(attention.relative_entropy(share * weights, np.array([[[4]]])), 1, rtol=1e-5)


@pytest.mark.parametrize("name, value", [("sink", "zero"), ("normaliser", "stick_breaking")])
def test_the_explorer_refuses_weights_that_are_no_softmax_of_the_logits(small, name, value):
    with pytest.raises(UserError, match=rf"found model\.variants\.{name}={value}; the page shows the softmax"):
        Explorer(Heads()).check(small(**{f"model__variants__{name}": value}), SuiteOptions())

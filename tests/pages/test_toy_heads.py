"""The toy heads of the docs compute the formula of attention."""

import math

import numpy as np
import pytest

from docs.figures import toy_heads
from docs.figures.toy_heads import X_LD
from mini_gpt.pages.lab.example import PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_the_toy_computes_the_formula(preset):
    logits_HLS, weights_HLS = toy_heads.maps(preset, temperature=0.5)
    for head in range(2):
        half = slice(2 * head, 2 * head + 2)
        expected = X_LD[:, half] @ (X_LD @ PRESETS[preset])[:, half].T / math.sqrt(2) / 0.5
        np.testing.assert_allclose(logits_HLS[head], expected, rtol=1e-5, atol=1e-6)
        exp = np.exp(expected - expected.max(-1, keepdims=True))
        np.testing.assert_allclose(weights_HLS[head], exp / exp.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_negating_keys_of_a_head_does_not_change_the_other():
    plain, negated = (toy_heads.maps(name)[0] for name in ("swapped in pairs", "swapped, half negated"))
    np.testing.assert_array_equal(plain[0], negated[0])
    np.testing.assert_allclose(plain[1], -negated[1], rtol=1e-6)


def test_permuting_the_words_permutes_the_map():
    order = (2, 0, 5, 3, 1, 4)
    plain, permuted = (toy_heads.maps("swapped in pairs", order=each)[1] for each in (range(6), order))
    np.testing.assert_allclose(permuted, plain[:, order][:, :, order], rtol=1e-5)

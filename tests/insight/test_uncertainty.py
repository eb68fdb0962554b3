import numpy as np
import pytest

from mini_gpt.insight import uncertainty


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=16)
    expected = values.std(ddof=1) / 4
    assert uncertainty.of_ratio(values, np.ones(16)) == pytest.approx(expected)
    assert uncertainty.of_ratio(np.repeat(values, 4), np.ones(64)) == pytest.approx(expected), "groups of neighbours"
    assert uncertainty.jackknife([1.0]) is uncertainty.jackknife([1.0, None]) is None

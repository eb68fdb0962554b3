"""The text that the comparison with EleutherAI's harness scores, and stored numbers, if the harness is installed."""

import json

import numpy as np
import pytest

from benchmarks import evaluation_harness
from mini_gpt.data.tokenizers import ByteTokenizer
from tests.suites import harness

CUTS = {"abcdefg": "abcdef", "abéd": "abé", "aébc": "aéb", "abcé": "ab", "aé": "", "\U0001f600": "\U0001f600"}


@pytest.mark.parametrize("text, cut", CUTS.items())
def test_the_text_is_cut_between_characters(text, cut):
    document = np.frombuffer(text.encode(), np.uint8)
    assert evaluation_harness.longest_whole_blocks(ByteTokenizer(), document, 2) == cut


@pytest.mark.slow
def test_the_harness_computes_the_stored_numbers(tmp_path):
    pytest.importorskip("lm_eval")
    found, stored = harness.by_harness(tmp_path), json.loads(harness.STORED.read_text())
    assert {*found} == {*stored}
    for kind, numbers in stored.items():
        np.testing.assert_allclose(found[kind].pop("log_probabilities"), numbers.pop("log_probabilities"), atol=2e-4)
        assert found[kind] == pytest.approx(numbers, rel=1e-3)

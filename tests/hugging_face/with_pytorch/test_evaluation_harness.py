"""The text that the comparison with EleutherAI's harness scores."""

import numpy as np
import pytest

from benchmarks import evaluation_harness
from mini_gpt.data.tokenizers import ByteTokenizer

CUTS = {"abcdefg": "abcdef", "abéd": "abé", "aébc": "aéb", "abcé": "ab", "aé": "", "\U0001f600": "\U0001f600"}


@pytest.mark.parametrize("text, cut", CUTS.items())
def test_the_text_is_cut_between_characters(text, cut):
    document = np.frombuffer(text.encode(), np.uint8)
    assert evaluation_harness.longest_whole_blocks(ByteTokenizer(), document, 2) == cut

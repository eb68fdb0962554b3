"""The comparisons of benchmarks/ with Transformers and with EleutherAI's harness."""

import json

import numpy as np
import pytest

from benchmarks import evaluation_harness, transformers_baseline
from mini_gpt.commands import decoding_speed
from mini_gpt.data.tokenizers import ByteTokenizer
from tests.suites import harness

# The comparison with Transformers alternates between the two models.


def test_the_two_models_alternate(small, monkeypatch):
    config = small(model__position="learned", model__max_positions=32)
    turns = []

    def recorded(name, write):
        return lambda *arguments: turns.append(name) or write(*arguments)

    monkeypatch.setattr(decoding_speed, "ROUNDS", 4)
    monkeypatch.setattr(transformers_baseline.loading, "load", lambda *_: config)
    monkeypatch.setattr(decoding_speed, "time_decoding", recorded("ours", decoding_speed.time_decoding))
    monkeypatch.setattr(transformers_baseline, "set_fastest_threads", lambda model: None)
    monkeypatch.setattr(transformers_baseline, "time_decoding", recorded("theirs", transformers_baseline.time_decoding))
    report = json.loads(json.dumps(transformers_baseline.compare("some.py", {}, 5, 20)))
    assert turns == ["ours", "ours", "theirs", "theirs", "ours", "ours", "theirs", "theirs", "ours"]
    assert report["transformers"]["model"] == "GPT2LMHeadModel" and report["transformers"]["dtype"] == "float32"
    assert min(report[side]["tokens_per_second"]["median"] for side in ("mini_gpt", "transformers")) > 0
    assert report["ratio"]["median"] > 0


# The text that the comparison with EleutherAI's harness scores, and stored numbers, if the harness is installed.

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

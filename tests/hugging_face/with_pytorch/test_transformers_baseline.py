"""The comparison with Transformers alternates between the two models."""

import json

from benchmarks import transformers_baseline
from mini_gpt.commands import decoding_speed


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

"""Runs with encodings, variants and patterns are trained, resumed and measured by all suites."""

import json

import pytest

from mini_gpt.commands import suites
from mini_gpt.commands.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import slow

VARIANTS = {"qk_norm": "weighted", "query_scale": "ssmax", "soft_cap": 5.0, "gate": "entry", "canon": True}
RUNS = {
    "variants": {f"model__variants__{name}": value for name, value in VARIANTS.items()} | {"model__position": "pope"},
    "selective": {"model__variants__selective": True, "model__variants__sink": "trained"},
    "sticks": {"model__variants__normaliser": "stick_breaking", "model__position": "cope"},
    "patterns": {
        "model__position": ("rope", "fox"),
        "model__attention_window": (4, None),
        "model__rope__base": (9.0, 1e4),
    },
    "dynamic": {"model__rope__scaling": "dynamic", "model__rope__factor": 2.0, "model__position": ("rope", "none")},
    "muon": {"model__position": "fox", "optimizer__name": "muon", "model__variants__canon": True},
    "offsets": {"model__position": "learned", "train__random_offsets": 90, "model__scan_layers": True},
}


@pytest.mark.parametrize("name", slow(*RUNS))
def test_a_run_is_trained_resumed_and_measured(small, tmp_path, name, capsys):
    config = small(**RUNS[name], model__num_layers=2, eval__sample_tokens=3)
    loop.train(config, tmp_path)
    assert ("sample.py" in capsys.readouterr().out) == (config.model.without_cache is None)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows and all(row.get("train/loss", 1) < 10 for row in rows)
    run = Run(tmp_path)
    shown = config.model.variants.sink == "none" and config.model.variants.normaliser == "softmax"
    suites.evaluate(run, "extrapolation", SuiteOptions(lengths="2x", strides="2x"))
    for suite in ("heads", "figures", *(["explorer"] if shown else [])):
        suites.evaluate(run, suite, SuiteOptions())

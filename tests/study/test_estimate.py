"""What `study plan` says before any training."""

import pytest

from mini_gpt.study import estimate
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.machine import Slot
from mini_gpt.study.results import Results


@pytest.mark.slow
def test_the_cost_of_each_condition_is_measured(monkeypatch, overrides, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "")
    conditions = {"wide": {"model.d_ff": 96}, "narrow": {"model.d_ff": 64}}
    plan = Plan("s", Study("", "configs/default.py", conditions, [0, 1], {"perplexity": {}}, (), overrides))
    costs = estimate.measure(plan, Slot(None, {}))
    assert list(costs) == ["wide", "narrow"] and costs["wide"].bytes > costs["narrow"].bytes > 0
    assert all(min(cost) > 0 for cost in costs.values())
    assert "4 of 4 runs are missing; 2 at a time" in estimate.text(Results(plan, tmp_path), costs, 2)

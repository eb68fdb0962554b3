"""The costs of a study are measured by processes that do not wait for each other."""

from mini_gpt.study import estimate
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.machine import Slot


def test_a_process_with_a_long_log_is_not_stopped(monkeypatch, overrides, tmp_path):
    monkeypatch.setattr(estimate, "MODULE", "tests.study.noisy_measure")
    monkeypatch.setenv("DONE", str(tmp_path / "done"))
    conditions = {"waits": {"model.d_ff": 64}, "noisy": {"model.d_ff": 96}}
    plan = Plan("s", Study("", "configs/default.py", conditions, [0], {"perplexity": {}}, (), overrides))
    costs = estimate.measure(plan, [Slot(None, {}), Slot(None, {})])
    assert {name: cost.step_seconds for name, cost in costs.items()} == {"waits": 1.0, "noisy": 1.0}

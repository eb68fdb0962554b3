"""The tuning of a study: each condition is trained at each value of a field, and is compared at its best value.

Unequal tuning favours one side: optimizers that were called 1.4 to 2 times as fast as AdamW were 1.1 to 1.4 times as
fast when both were tuned (Wen et al. 2025, arXiv 2509.02046).
"""

import math
import re
from pathlib import Path

import numpy as np

from mini_gpt.runtime.errors import UserError
from mini_gpt.study import ledger, statistics
from mini_gpt.study.definition import Plan, PlannedRun
from mini_gpt.study.results import Results
from mini_gpt.study.runner import Job, last_error
from mini_gpt.suites import SUITES
from mini_gpt.suites.base import Row

DIVERGED = re.compile(r"found loss .*, gradient norm |gives non-finite numbers")  # a run's last error


def frozen(plan: Plan, workdir: Path) -> Plan:
    """Return the plan with the values that the ledger has for it; the same plan if it has none."""
    if plan.tuning is None:
        return plan
    digest = ledger.digest(plan.tuning)
    found = [one for one in ledger.entries(workdir) if one["event"] == "tuned" and one["tuning"] == digest]
    return Plan(plan.name, plan.study, plan.places, found[0]["chosen"]) if found else plan


def results(plan: Plan, workdir: Path) -> Results:
    assert plan.tuning is not None
    return Results(plan.tuning, workdir / "tuning")


def loss(found: Results, run: PlannedRun) -> float | None:
    """Return the loss of a run of the tuning at its trained length: ∞ if it diverged, None if it is missing."""
    ((suite, options),) = found.plan.suites.items()
    if found.missing(run):
        job = Job(run, found.workdir / run.name)
        error = last_error(job.log) if job.workdir.exists() else None
        return math.inf if error and DIVERGED.search(error) else None
    label, length = SUITES[suite].compared(run.config, options)[0]
    row = found.row(run, suite, label, length)
    return math.inf if row is None or row["nll"] is None else row["nll"]


def missing(found: Results) -> list[PlannedRun]:
    """Return the runs that are to be trained; those that diverged are not tried again."""
    return [run for run in found.plan.runs if loss(found, run) is None]


def rows(plan: Plan, found: Results) -> list[Row]:
    """Return a row for each condition and value. The mean is None unless all seeds have a loss."""
    table = []
    for name, (condition, value) in plan.tuned.items():
        losses = [loss(found, run) for run in found.plan.runs if run.condition == name]
        known = [one for one in losses if one is not None and one < math.inf]
        is_known = len(known) == len(losses)
        drawn_R = statistics.draw_means(known) if is_known and len(known) > 1 else None
        low, high = (None, None) if drawn_R is None else statistics.interval(drawn_R, plan.study.level)
        row = {"condition": condition, "value": value, "seeds": len(known), "diverged": losses.count(math.inf)}
        row |= {"nll_mean": float(np.mean(known)) if is_known else None, "interval_low": low, "interval_high": high}
        table.append(row | {"chosen": (plan.chosen or {}).get(condition) == value})
    return table


def choose(plan: Plan, found: Results) -> dict[str, float]:
    """Return {condition: value with the lowest mean loss}; of equal means, the smaller value.

    Raises UserError if a condition has no value at which all runs have a loss.
    """
    table, best = [row for row in rows(plan, found) if row["nll_mean"] is not None], {}
    for condition in plan.conditions:
        means = [(row["nll_mean"], row["value"]) for row in table if row["condition"] == condition]
        if not means:
            raise UserError(f"tune: each value has runs of {condition} that diverged; give smaller values")
        best[condition] = min(means)[1]
    return best


def freeze(plan: Plan, workdir: Path, found: Results) -> Plan:
    """Write the best values to the ledger, before the first run of the comparison, and return the plan with them."""
    assert plan.tuning is not None
    chosen = choose(plan, found)
    ledger.append(workdir, "tuned", plan, 0, tuning=ledger.digest(plan.tuning), chosen=chosen)
    return frozen(plan, workdir)


def at_edge(plan: Plan) -> str:
    """Return a sentence on the conditions whose best value is the first or the last one, or ""."""
    (values,) = (plan.study.tune or {}).values()
    ends = {values[0]: "the smallest", values[-1]: "the largest"}
    found = [f"{name} ({value}, {ends[value]})" for name, value in (plan.chosen or {}).items() if value in ends]
    return f"At the edge of the values, so a better one may be beyond: {', '.join(found)}." if found else ""

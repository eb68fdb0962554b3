"""What a study will cost and what it can show, before any training."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import processes, statistics, tuning
from mini_gpt.study.definition import Plan
from mini_gpt.study.machine import Slot
from mini_gpt.study.results import Results
from mini_gpt.study.runner import clock
from mini_gpt.study.worker import Cost
from mini_gpt.suites import results as result_files

MIB = 2**20


def measure(plan: Plan, slot: Slot) -> dict[str, Cost]:
    """Return the cost of a run of each condition, measured one after another in a process in a slot.

    Raises UserError if a config cannot be measured.
    """
    suites = {name: dataclasses.asdict(options) for name, options in plan.suites.items()}
    content = {"configs": list(map(loading.to_dict, plan.configs.values())), "suites": suites}
    process = processes.start(processes.WORKER, content, slot, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process.connection:  # its end ends the process, after Ctrl-C
        output, log = process.communicate()
    if process.returncode != 0:
        said = (log.strip().splitlines() or ["no output"])[-1].removeprefix("error: ")
        raise UserError(f"plan: the runs can't be measured: {said}")
    return {name: Cost(*values) for name, values in zip(plan.configs, json.loads(output.splitlines()[-1]), strict=True)}


def text(results: Results, costs: dict[str, Cost], jobs: int) -> str:
    """Return the plan as text: the runs, their time and disk, and the difference that can be shown."""
    plan, missing = results.plan, [run.condition for run in results.plan.runs if results.missing(run)]
    to_tune = tuning.missing(tuning.results(plan, results.workdir)) if plan.tuning else []
    missing += [plan.tuned[run.condition][0] for run in to_tune]
    planned = len(plan.runs) + len(plan.tuning.runs if plan.tuning else ())
    seconds = {name: cost.seconds(plan.configs[name].train.steps) for name, cost in costs.items()}
    rows = [
        {
            "condition": name,
            "runs": missing.count(name),
            "steps": plan.configs[name].train.steps,
            "ms per step": f"{1000 * cost.step_seconds:.1f}",
            "time of a run": clock(seconds[name]),
            "of which evaluation": clock(cost.evaluation_seconds),
            "MiB of a run": f"{cost.bytes / MIB:.1f}",
        }
        for name, cost in costs.items()
    ]
    total = sum(seconds[name] for name in missing)
    needed = sum(costs[name].bytes for name in missing)
    free = shutil.disk_usage(_existing(results.workdir)).free
    lines = [
        plan.study.question or plan.name,
        "",
        result_files.table(rows),
        "",
        f"{len(missing)} of {planned} runs are missing; {jobs} at a time: about {clock(total / jobs)}.",
        *([f"Of these, {len(to_tune)} tune."] if to_tune else []),
        f"Disk: {needed / MIB:,.0f} MiB at most, {free / MIB:,.0f} MiB are free in {_existing(results.workdir)}.",
        *(["Warning: the runs need more disk space than is free."] if needed > free else []),
        *can_show(plan),
    ]
    return "\n".join(lines)


def can_show(plan: Plan) -> list[str]:
    """Return what the seeds can show, with the expected spread."""
    study, comparisons, seeds = plan.study, len(plan.comparisons), len(plan.study.seeds)
    if not comparisons:
        return ["No contrasts: the report will have means and ranges, and no verdicts."]
    smallest, needed = statistics.smallest_p(seeds), statistics.seeds_needed(comparisons, study.level)
    lines = [
        f"{comparisons} comparisons at level {study.level:g} (Holm). {seeds} seeds: the smallest possible p of one "
        f"comparison is {smallest:.3g}; at least {needed} seeds are needed to show a difference."
    ]
    if statistics.too_few(study.seeds, plan.comparisons, study.level):
        lines.append(f"Warning: with {seeds} seeds, no difference can be shown. Give more seeds, or fewer contrasts.")
    elif study.expected_deviation is None:
        lines.append("expected_deviation is not given: the difference that can be shown is not known.")
    else:
        found = statistics.detectable_difference(seeds, study.expected_deviation, comparisons, study.level)
        assert found is not None
        lines.append(
            f"With the expected standard deviation of {study.expected_deviation:g} over seeds, a paired difference of "
            f"{found:.3g} is shown with a probability of {statistics.POWER:.0%}."
        )
    return lines


def _existing(path: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    return next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.exists())

"""Answer a question by training: plan, freeze, run and report a study.

    python -m mini_gpt.study plan FILE      what will run, how long, how much disk, and what it can show
    python -m mini_gpt.study freeze FILE    record the plan before the first run
    python -m mini_gpt.study run FILE       train and measure the missing runs, several at a time, then report
    python -m mini_gpt.study report FILE    write the report from the runs that are complete

FILE is a study such as configs/studies/positions.py. In place of it, --config, --vary, --seeds, --suite and --contrast
define a study for a quick look, and --config.FIELD=VALUE sets a field of all its runs. The command `run` resumes a
stopped study, and tries failed runs again. With --engine=ray it trains on a Ray cluster; with --engine=slurm it prints
a script for an array of Slurm jobs.

With --json, `run` and `report` print one JSON object: each contrast with its verdict, difference, interval and p. Their
exit status is then

    0    each contrast is shown
    1    an error, or a run failed (one line on stderr)
    3    each contrast has a verdict, but some claim is not shown
    4    a contrast has no verdict, such as for a missing run, or there is no contrast
    5    the plan was changed after it was frozen, or after a run was measured: no verdict counts as evidence
"""

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mini_gpt import suites
from mini_gpt.commands import command_line, suite_flags
from mini_gpt.config import loading
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.study import (
    definition,
    estimate,
    ledger,
    local,
    machine,
    new_runs,
    paper,
    ray,
    runner,
    slurm,
    statistics,
    syntax,
    tuning,
)
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.report import Report
from mini_gpt.study.results import Results
from mini_gpt.study.runner import Display, Engine, Job

OF_STUDY = ("vary", "contrast", "seeds", "suite", "split", "lengths", "strides")  # flags that a study file replaces
log = logging.getLogger("mini_gpt.study")


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m mini_gpt.study")
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("file", nargs="?", metavar="FILE", help="study file, such as configs/studies/positions.py")
    _run_action(parser)


@command_line.command
def sweep() -> None:
    """Run `study run` for a study that the flags define."""
    parser = command_line.parser(
        "Train and measure all combinations of field values: the short form of `python -m mini_gpt.study run`.\n\n"
        "python -m mini_gpt.sweep --config=configs/positions.py --suite=extrapolation --seeds=3 \\\n"
        "    --vary model.position=none,learned,sinusoidal,rope,alibi,t5\n\n"
        "--config.FIELD=VALUE sets a field of all runs.",
        prog="python -m mini_gpt.sweep",
    )
    parser.set_defaults(action=None, file=None)
    _run_action(parser)


def _run_action(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser)
    flags, rest = parser.parse_known_args()
    plan = _loaded(flags, command_line.config_overrides(rest))
    workdir = flags.workdir or Path("runs", "studies" if flags.file else "sweeps", plan.name)
    command_line.set_up()
    plan = tuning.frozen(plan, workdir)
    action = flags.action or "run"
    reports = action == "report" or (action == "run" and flags.engine != "slurm" and flags.shard is None)
    if flags.json and not reports:
        raise UserError(
            "--json: found a command that writes no report; give it to `run` without --shard, or to `report`"
        )
    if status := ACTIONS[action](plan, workdir, flags):
        sys.exit(status)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = "runs/studies/NAME, or runs/sweeps/NAME with --config"
    add("--workdir", type=command_line.directory, help=f"directory of the study; default: {default}")
    add("--engine", choices=("local", "slurm", "ray"), default="local", help="where `run` trains")
    add("--jobs", type=int, help="runs at a time, on each machine; default: one for each core or GPU (Slurm: one)")
    part = "train part I of N parts (from 0), and write no report; all share --workdir"
    add("--shard", metavar="I/N", help=part)
    add("--shards", type=int, help="with --engine=slurm: number of tasks; default: one for each run")
    add("--paper", action="store_true", help="with the report, write paper/: figures as PDF and SVG, tables for LaTeX")
    add("--changed", action="store_true", help="go on with a plan that was changed after results were seen")
    add(
        "--json",
        action="store_true",
        help="print the verdicts as one JSON object; the exit status tells them, see above",
    )
    command_line.add_cache_flag(parser)
    _add_study_flags(parser)


def _add_study_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and OF_STUDY. Those that are not given are None or []."""
    add = parser.add_argument
    add("--config", help="instead of FILE: the config file that all runs share")
    add("--vary", action="append", default=[], metavar="FIELD=VALUE,VALUE,…", help="a field's values; repeatable")
    add("--seeds", type=int, help="number of seeds, counted up from the seed of the config; default: 1")
    names = ", ".join(name for name, suite in suites.SUITES.items() if suite.values)
    add("--suite", help=f"what to measure: {names}; default: perplexity")
    claim = "claim that a metric is lower in A than in B; also 'A<B@METRIC,LENGTH'; repeatable"
    add("--contrast", action="append", default=[], metavar="'A<B'", help=claim)
    suite_flags.add(parser, ("split", "lengths", "strides"))
    parser.set_defaults(split=None)


def _quick_look(flags: argparse.Namespace, overrides: dict[str, str]) -> Plan:
    """Return the plan that the flags define: all combinations of field values."""
    if not flags.vary:
        raise UserError("--vary: give at least one, such as --vary=model.position=rope,alibi")
    conditions = syntax.conditions(flags.vary)
    fields, count = next(iter(conditions.values())), 1 if flags.seeds is None else flags.seeds
    require(count >= 1, "--seeds", count, "must be at least 1")
    options = {"split": flags.split or "validation", "lengths": flags.lengths, "strides": flags.strides}
    seed = loading.load(flags.config, overrides | fields).seed
    return Plan(
        command_line.run_name(flags.config, overrides, *fields),
        Study(
            question="",
            config=flags.config,
            conditions=flags.vary,
            seeds=range(seed, seed + count),
            suites={flags.suite or "perplexity": options},
            contrasts=flags.contrast,
            overrides={field: value for field, value in overrides.items() if field != "seed"},
        ),
    )


def _loaded(flags: argparse.Namespace, overrides: dict[str, str]) -> Plan:
    """Return the plan of FILE, or of a quick look."""
    if (flags.file is None) == (flags.config is None):
        raise UserError("study: name either a FILE, such as configs/studies/positions.py, or --config")
    if flags.file is None:
        return _quick_look(flags, overrides)
    for name in OF_STUDY:
        if getattr(flags, name) not in (None, []):
            remedy = f"set it in {flags.file}, or leave out the flag"
            raise UserError(f"--{name}: not allowed with a study file; {remedy}")
    return definition.load(flags.file, overrides)


def _plan(plan: Plan, workdir: Path, flags: argparse.Namespace) -> None:
    slots = machine.slots(flags.jobs)
    ledger.changes(workdir, plan)  # raises its errors
    machine.call_in(slots[0], new_runs.check, plan, workdir)
    print(estimate.text(Results(plan, workdir), estimate.measure(plan, slots[0]), len(slots)))


def _freeze(plan: Plan, workdir: Path, flags: argparse.Namespace) -> None:
    machine.call_in(machine.slots(flags.jobs)[0], new_runs.check, plan, workdir)
    digest = ledger.freeze(workdir, plan, new_runs.fingerprints(plan))
    print(f"Frozen: {plan.name}, SHA-256 {digest}, commit {ledger.commit()}, in {workdir / ledger.LEDGER}")
    print(*estimate.can_show(plan), sep="\n")


def _run(plan: Plan, workdir: Path, flags: argparse.Namespace) -> int | None:
    if flags.engine == "slurm":
        _print_script(plan, flags)
        return None
    is_local, shard = flags.engine == "local", _shard(flags.shard, len(plan.runs))
    slots = machine.slots(flags.jobs if is_local else None)
    changed = ledger.changes(workdir, plan)
    make_engine = lambda found: local.Local(found, slots) if is_local else ray.Ray(found, flags.jobs)
    found = Results(plan, workdir)
    first = tuning.results(plan, workdir) if plan.is_untuned else found
    engine = make_engine(first)  # before JAX: Ray forks
    measured = len({path.parents[1] for path in workdir.glob("**/eval/*.json")})  # also with other options
    seen = f"{measured} runs were measured" if measured else "it was frozen" if ledger.is_frozen(workdir) else None
    if changed and seen and (plan.comparisons or plan.tuning) and not flags.changed:
        raise UserError(
            f"study: the plan of {workdir} was changed after {seen} ({', '.join(changed[:4])}); "
            "restore it, or add --changed: the report will call the study exploratory"
        )
    ledger.check_corpora(workdir, plan, new_runs.fingerprints(plan))
    machine.call_in(slots[0], new_runs.check, plan, workdir)
    files.make_directory(workdir)
    command = f"python -m mini_gpt.{'study' if flags.action else 'sweep'} {shlex.join(sys.argv[1:])}"
    done = len(found.complete_runs)
    event = "changed" if changed else "run"
    ledger.append(workdir, event, plan, done, command=command, fields=changed, measured=measured)
    ledger.save(workdir, plan)
    if plan.is_untuned:
        plan = _tuned(plan, workdir, flags, first, engine)
        if plan.is_untuned:
            log.info("other shards still tune; when they have ended, the same command goes on with the comparison")
            return None
        log.info(f"tuned: {', '.join(f'{name} {value}' for name, value in (plan.chosen or {}).items())}")
        found = Results(plan, workdir)
        engine = make_engine(found)
    mine = plan.runs[shard]
    jobs = [Job(run, workdir / run.name) for run in mine if found.missing(run)]
    if jobs and plan.comparisons:
        too_few = statistics.too_few(plan.study.seeds, plan.comparisons, plan.study.level)
        level = logging.WARNING if too_few else logging.INFO
        log.log(level, "\n".join(estimate.can_show(plan)))
    log.info(f"{len(mine) - len(jobs)} of {len(mine)} runs are complete; {engine.count} at a time")
    try:
        runner.Runner(found, jobs, engine).run(Display(len(mine)))
    finally:
        runner.log_failures(jobs)
        status = _report(plan, workdir, flags, jobs) if flags.shard is None else None
    runner.check_all_complete(jobs, len(mine))
    return status


def _tuned(plan: Plan, workdir: Path, flags: argparse.Namespace, found: Results, engine: Engine) -> Plan:
    """Train the runs of the tuning, and return the plan with the best values; unchanged if other shards still tune."""
    mine = found.plan.runs[_shard(flags.shard, len(found.plan.runs))]
    jobs = [Job(run, found.workdir / run.name) for run in mine if tuning.loss(found, run) is None]
    log.info(f"tuning: {len(mine) - len(jobs)} of {len(mine)} runs are complete; {engine.count} at a time")
    try:
        runner.Runner(found, jobs, engine).run(Display(len(mine)))
        found = tuning.results(plan, workdir)
        missing = tuning.missing(found)
        jobs = [job for job in jobs if job.run in missing]  # not those that diverged
        runner.log_failures(jobs)
        runner.check_all_complete(jobs, len(mine))
        return plan if missing else tuning.freeze(plan, workdir, found)
    except BaseException:
        if flags.shard is None:
            _report(plan, workdir, flags)
        raise


def _report(plan: Plan, workdir: Path, flags: argparse.Namespace, jobs: Sequence[Job] = ()) -> int | None:
    """Write the report, and print its summary. Return the exit status with --json, else None."""
    ledger.changes(workdir, plan)  # raises its errors
    found = Report(Results(plan, workdir), runner.failures(jobs))
    found.write()
    if flags.paper:
        paper.write(found)
    print(json.dumps(found.to_dict(), allow_nan=False) if flags.json else found.summary())
    return found.status if flags.json else None


def _print_script(plan: Plan, flags: argparse.Namespace) -> None:
    """Print the script for Slurm. Its command has the arguments of this one, except those that the script sets."""
    most = max(len(plan.runs), len(plan.tuning.runs if plan.tuning else ()))
    shards = most if flags.shards is None else flags.shards
    require(1 <= shards <= most, "--shards", shards, f"must be in 1..{most}, the number of runs")
    jobs = 1 if flags.jobs is None else flags.jobs
    require(jobs >= 1, "--jobs", jobs, "must be at least 1")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--engine", "--shards", "--jobs"):
        parser.add_argument(name)
    _, arguments = parser.parse_known_args()
    if flags.action:
        arguments.remove(flags.action)
    print(slurm.script(plan, arguments, shards, jobs), end="")


def _shard(text: str | None, runs: int) -> slice:
    """Return the slice of the runs of shard I/N."""
    if text is None:
        return slice(None)
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    require(numbers is not None, "--shard", text, "must be I/N, such as 0/4")
    assert numbers is not None
    index, count = int(numbers[1]), int(numbers[2])
    require(index < count, "--shard", text, "I must be below N")
    return slice(index, None, count)


ACTIONS = {"plan": _plan, "freeze": _freeze, "run": _run, "report": _report}

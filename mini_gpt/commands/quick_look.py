"""A study that is defined by flags: all combinations of field values."""

import argparse

from mini_gpt import suites
from mini_gpt.commands import command_line, suite_flags
from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.study import syntax
from mini_gpt.study.definition import Plan, Study

FLAGS = ("vary", "contrast", "seeds", "suite", "split", "lengths", "strides")  # besides --config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and FLAGS. Those that are not given are None or []."""
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


def plan(flags: argparse.Namespace, overrides: dict[str, str]) -> Plan:
    """Return the plan that the flags define."""
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

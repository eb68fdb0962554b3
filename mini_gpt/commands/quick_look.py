"""A study that is defined by flags: all combinations of field values."""

import argparse
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from mini_gpt import suites
from mini_gpt.commands import command_line, run_flags
from mini_gpt.config import loading
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.study.definition import Contrast, Plan, Study
from mini_gpt.suites.base import SuiteOptions

FLAGS = ("vary", "contrast", "seeds", "suite", "split", "lengths", "strides")  # besides --config
CONTRAST = re.compile(r"(?P<first>.+?)(?P<claim>[<>])(?P<second>[^@]+)(@(?P<where>.+))?")
VALUES = re.compile(r",(?![^(\[]*[)\]])")  # the commas between values
WORD = re.compile(r"(?!(?i:true|false)$|None$)[A-Za-z]\w*", re.ASCII)  # a value that needs no field beside it


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
    run_flags.add_suite_flags(parser)
    parser.set_defaults(split=None)


def plan(flags: argparse.Namespace, overrides: dict[str, str]) -> Plan:
    """Return the plan that the flags define."""
    if not flags.vary:
        raise UserError("--vary: give at least one, such as --vary=model.position=rope,alibi")
    vary: dict[str, list[str]] = {}
    for name, values in map(parse_vary, flags.vary):
        if name in vary:
            raise UserError(f"--vary: found {name} twice; give all its values in one --vary")
        if name in overrides:
            raise UserError(f"--vary: found {name}, which --config.{name} sets as well; give it once")
        vary[name] = values
    count, suite = 1 if flags.seeds is None else flags.seeds, flags.suite or "perplexity"
    require(count >= 1, "--seeds", count, "must be at least 1")
    options = SuiteOptions(flags.split or "validation", flags.lengths, flags.strides)
    suites.check([suite], options)
    names = short_names(vary)
    combinations = itertools.product(*([(name, value) for value in vary[name]] for name in vary))
    conditions = {",".join(map(names.__getitem__, combined)): dict(combined) for combined in combinations}
    seed = loading.load(flags.config, overrides | next(iter(conditions.values()))).seed
    name, seeds = command_line.run_name(flags.config, overrides, *vary), range(seed, seed + count)
    shared = {field: value for field, value in overrides.items() if field != "seed"}
    study = Study("", flags.config, conditions, seeds, {suite: options}, overrides=shared)
    Plan(name, study)  # raises UserError for invalid conditions or suites, before the contrasts are read
    contrasts = [_contrast(text, study, suite) for text in flags.contrast]
    return Plan(name, dataclasses.replace(study, contrasts=contrasts))


def short_names(vary: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], str]:
    """Return {(field, value): its part of a condition's name}: rope for a word, num_layers=4 for another value.

    If two fields have the same last part or the same word, all names have the full fields.
    """
    both = [(name, value) for name, values in vary.items() for value in values]
    last = {name: name.rpartition(".")[2] for name in vary}
    short = {(name, value): value if WORD.fullmatch(value) else f"{last[name]}={value}" for name, value in both}
    if len(set(short.values())) == len(short) and len(set(last.values())) == len(last):
        return short
    return {(name, value): f"{name}={value}" for name, value in both}


def _contrast(text: str, study: Study, suite: str) -> Contrast:
    """Return the contrast of a text such as 'alibi<rope' or 'alibi<rope@nll,2x'."""
    parts = CONTRAST.fullmatch(text)
    if parts is None:
        raise UserError(f"--contrast: found {text!r}; must be 'A<B' or 'A>B', such as 'alibi<rope@nll,2x'")
    metric, _, lengths = (parts["where"] or suites.SUITES[suite].values[0]).partition(",")
    first, second = (_condition(parts[name].strip(), study) for name in ("first", "second"))
    config = loading.load(study.config, {**study.overrides, **study.conditions[first]})
    label = suites.SUITES[suite].compared(config, study.suites[suite])[0][0]
    claim = "lower" if parts["claim"] == "<" else "higher"
    return Contrast(first, claim, second, suite, metric, lengths or None, label)


def _condition(text: str, study: Study) -> str:
    """Return the name of a condition that is given by its name, its values, or all FIELD=VALUE."""
    known = {name: name for name in study.conditions}
    for name, fields in study.conditions.items():
        known[",".join(fields.values())] = known[",".join(f"{field}={value}" for field, value in fields.items())] = name
    if text not in known:
        raise UserError(f"--contrast: found {text!r}; must be one of {', '.join(study.conditions)}")
    return known[text]


def parse_vary(text: str) -> tuple[str, list[str]]:
    """Return the field and the values of FIELD=VALUE,VALUE,…; commas inside brackets do not separate values."""
    name, listed = loading.parse_override(text)
    loading.check_field(name)
    if name == "seed":
        raise UserError("--vary: found seed; give the number of seeds with --seeds")
    values = [value.strip() for value in VALUES.split(listed)]
    different = "" not in values and len(set(values)) == len(values)
    require(different, "--vary", text, "must be FIELD=VALUE,VALUE,… with different values")
    return name, values

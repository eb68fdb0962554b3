"""Evaluate a run with one or more suites, and write the results to its directory.

python eval.py --workdir=runs/tiny [--suite=perplexity,extrapolation] [--config.FIELD=VALUE ...]
"""

import argparse
import dataclasses

from mini_gpt import suites
from mini_gpt.commands import command_line, staging, suite_flags
from mini_gpt.training.run import Run


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    command_line.add_run_flags(parser)
    parser.add_argument("--suite", default="perplexity", help=f"comma-separated, from: {', '.join(suites.SUITES)}")
    suite_flags.add(parser)
    command_line.add_process_flags(parser)
    parser.add_argument("--override", action="append", default=[], help=argparse.SUPPRESS)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest, flags.override)
    names = [*dict.fromkeys(flags.suite.split(","))]
    options = suite_flags.options(flags)
    suites.check(names, options)
    names.sort(key=list(suites.SUITES).index)  # heads before explorer: explorer shows the labels of heads
    command_line.set_up(flags)
    which = flags.checkpoint
    with staging.reading(flags.workdir, which) as workdir, staging.reading(flags.beside, which) as beside:
        options = dataclasses.replace(options, beside=None if beside is None else str(beside))
        run = Run(workdir, checkpoint=flags.checkpoint, overrides=overrides)
        for name in names:  # check all suites before the first measurement
            suites.check_run(run, name, options)
        for name in names:
            suites.evaluate(run, name, options)

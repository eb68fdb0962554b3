"""Evaluates a run: python eval.py --workdir=runs/tiny [--suite=extrapolation] [--override=FIELD=VALUE ...]"""

import argparse

from mini_gpt.commands import command_line, suites
from mini_gpt.config import loading as config
from mini_gpt.data.corpora import SPLITS
from mini_gpt.runtime import errors
from mini_gpt.training.run import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workdir", type=command_line.directory, required=True, help="the run directory")
    parser.add_argument("--suite", default="perplexity", help=f"comma-separated, of: {', '.join(suites.SUITES)}")
    parser.add_argument("--split", default="validation", choices=SPLITS)
    parser.add_argument("--checkpoint", default="last", help="last, best, or a step")
    parser.add_argument("--override", action="append", default=[], metavar="FIELD=VALUE", help="a config field")
    parser.add_argument("--text", help="explorer, figures: the text whose attention is shown; default: of the split")
    command_line.add_suite_flags(parser)
    command_line.add_process_flags(parser)
    flags = parser.parse_args()
    names, request = flags.suite.split(","), suites.Request(flags.split, flags.lengths, flags.strides, flags.text)
    suites.check(names, request)
    overrides = dict(map(config.parse_override, flags.override))
    command_line.set_up(overrides.get("data.cache_dir"), flags)
    run = Run(flags.workdir, checkpoint=flags.checkpoint, overrides=overrides)
    for name in names:  # all, before the first is measured
        suites.check_run(run, name, request)
    for name in names:
        suites.evaluate(run, name, request)


if __name__ == "__main__":
    errors.run(main)

"""Measure a run with one suite or more, and write the results in its directory.

python eval.py --workdir=runs/tiny [--suite=perplexity,extrapolation] [--override=FIELD=VALUE ...]
"""

from mini_gpt.commands import command_line, suites
from mini_gpt.commands.suites.base import SuiteOptions
from mini_gpt.config import loading as configs
from mini_gpt.training.run import Run


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    command_line.add_run_flags(parser)
    add = parser.add_argument
    add("--suite", default="perplexity", help=f"comma-separated, of: {', '.join(suites.SUITES)}")
    add("--override", action="append", default=[], metavar="FIELD=VALUE", help="change a config field; repeatable")
    add("--text", help="of figures and explorer: the text that the model reads; default: the start of the split")
    command_line.add_suite_flags(parser)
    command_line.add_process_flags(parser)
    flags = parser.parse_args()
    names = flags.suite.split(",")
    options = SuiteOptions(flags.split, flags.lengths, flags.strides, flags.text)
    suites.check(names, options)
    overrides = dict(map(configs.parse_override, flags.override))
    command_line.set_up(overrides.get("data.cache_dir"), flags)
    run = Run(flags.workdir, checkpoint=flags.checkpoint, overrides=overrides)
    for name in names:  # all are checked before the first is measured
        suites.check_run(run, name, options)
    for name in names:
        suites.evaluate(run, name, options)

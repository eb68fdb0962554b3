"""Evaluate a run with one or more suites, and write the results to its directory.

python eval.py --workdir=runs/tiny [--suite=perplexity,extrapolation] [--config.FIELD=VALUE ...]
"""

import dataclasses

from mini_gpt import suites
from mini_gpt.commands import command_line, run_flags, staging
from mini_gpt.runtime.errors import require
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    run_flags.add_run_flags(parser)
    add = parser.add_argument
    add("--suite", default="perplexity", help=f"comma-separated, from: {', '.join(suites.SUITES)}")
    add(
        "--text",
        type=run_flags.utf8,
        help="for heads, figures, explorer, play, lens and patching: the input text; default: text of the split",
    )
    add("--other", type=run_flags.utf8, help="for patching and play: the second text, with as many tokens as --text")
    add("--pairs", metavar="FILE", help="for patching: a text, a tab and the other text in each line; prints means")
    add("--tokens", type=int, help="the most tokens of heads, lens, a pass of pruning, or targets of sliding windows")
    add(
        "--minutes",
        type=float,
        help="time of each suite: measures what fits; default: 5 above 20M parameters; inf: all",
    )
    add("--beside", type=command_line.place, metavar="RUN", help="for play: another run to show on the same text")
    add("--words", action="store_true", default=None, help="for figures and explorer: whole words instead of tokens")
    run_flags.add_override_flag(parser)
    run_flags.add_suite_flags(parser)
    command_line.add_process_flags(parser)
    flags, rest = parser.parse_known_args()
    overrides = command_line.config_overrides(rest, flags.override)
    names = [*dict.fromkeys(flags.suite.split(","))]
    given = flags.lengths, flags.strides, flags.text, flags.tokens, flags.other, flags.pairs, flags.beside
    options = SuiteOptions(flags.split, *given, flags.words)
    suites.check(names, options)
    require(flags.minutes is None or flags.minutes > 0, "--minutes", flags.minutes, "must be above 0")
    names.sort(key=list(suites.SUITES).index)  # heads before explorer: explorer shows the labels of heads
    command_line.set_up(flags)
    which = flags.checkpoint
    with staging.reading(flags.workdir, which) as workdir, staging.reading(flags.beside, which) as beside:
        options = dataclasses.replace(options, beside=None if beside is None else str(beside))
        run = Run(workdir, checkpoint=flags.checkpoint, overrides=overrides)
        for name in names:  # check all suites before the first measurement
            suites.check_run(run, name, options)
        for name in names:
            suites.evaluate(run, name, options, suites.minutes_of(run, flags.minutes))

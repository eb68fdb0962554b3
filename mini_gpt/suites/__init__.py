"""The suites of eval.py: one file per question to a run; JSON, tables and figures out. Imports all packages before."""

import dataclasses
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure

from mini_gpt.evaluation import items
from mini_gpt.insight import uncertainty
from mini_gpt.runtime import processes
from mini_gpt.runtime.errors import UserError, require, suggestion
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions, file_stem
from mini_gpt.suites.choices import Choices
from mini_gpt.suites.circuits import Circuits
from mini_gpt.suites.diagnose import Diagnose
from mini_gpt.suites.explorer import Explorer
from mini_gpt.suites.extrapolation import Extrapolation
from mini_gpt.suites.figures import Figures
from mini_gpt.suites.grammar import Grammar
from mini_gpt.suites.heads import Heads
from mini_gpt.suites.lens import Lens
from mini_gpt.suites.needles import Needles
from mini_gpt.suites.patching import Patching
from mini_gpt.suites.perplexity import Perplexity
from mini_gpt.suites.play import Play
from mini_gpt.suites.pruning import Pruning
from mini_gpt.suites.tasks import Tasks
from mini_gpt.suites.translation import Translation
from mini_gpt.training.run import Run

HEADS = Heads()
ALL = (
    Perplexity(),
    Extrapolation(),
    Tasks(),
    Translation(),
    Needles(),
    Choices(),
    Grammar(),
    HEADS,
    Pruning(),
    Lens(),
    Patching(),
    Circuits(),
    Figures(),
    Explorer(HEADS),
    Play(),
    Diagnose(),
)
WITHOUT_ATTENTION = [suite.name for suite in ALL if not suite.needs_attention]
FLAGS = [field.name for field in dataclasses.fields(SuiteOptions) if field.name != "split"]
SUITES: Mapping[str, Suite] = MappingProxyType({suite.name: suite for suite in ALL})

log = logging.getLogger(__name__)


def check(names: list[str], options: SuiteOptions) -> None:
    """Raise UserError for an unknown suite, or for an option that no given suite supports; log which do not use it."""
    for name in names:
        if name not in SUITES:
            hint = suggestion(name, SUITES)
            raise UserError(f"--suite: found {name!r}; must be one of {', '.join(SUITES)}{hint}")
    for flag in FLAGS:
        if getattr(options, flag) is None:
            continue
        without = [name for name in names if flag not in SUITES[name].flags]
        others = " or ".join(name for name, suite in SUITES.items() if flag in suite.flags)
        if without == names:
            raise UserError(f"--{flag} is not supported by --suite={','.join(names)}; use it with {others}")
        if without:
            log.warning(f"--{flag}: not used by --suite={','.join(without)}")
    require(options.tokens is None or options.tokens > 0, "--tokens", options.tokens, "must be at least 1")


def check_run(run: Run, name: str, options: SuiteOptions) -> None:
    """Raise UserError if the suite cannot measure the run."""
    suite = SUITES[name]
    if suite.needs_logits and run.trained.model.prediction_head is None:
        without = ",".join(other.name for other in ALL if not other.needs_logits)
        reason = f"the model has no prediction head, whose logits --suite={name} needs; use --suite={without}"
        raise UserError(f"{run.workdir}: {reason}")
    if run.trained.model.block != "attention" and name not in WITHOUT_ATTENTION:
        remedy = f"--suite={name} needs attention; use --suite={','.join(WITHOUT_ATTENTION)}"
        raise UserError(f"{run.workdir}: model.block: found {run.trained.model.block!r}; {remedy}")
    suite.check(run.trained, options)
    if suite.needs_text:
        suite.check_split(run.trained, options, len(run.store.tokens(options.split)))


def evaluate(run: Run, name: str, options: SuiteOptions) -> Result:
    """Measure a run, print the table, write the files, and return the result.

    All suites write eval/NAME.json. Some also write eval/NAME.csv, .png and other files, and figures and curves to
    tensorboard/NAME. The JSON is written last: if it exists, all files exist.
    """
    suite = SUITES[name]
    options = SuiteOptions(options.split, **{flag: getattr(options, flag) for flag in suite.flags})
    check_run(run, name, options)
    stem = file_stem(name, options, run.checkpoint, run.overrides)
    request = requested(name, options)
    run = base.whole_run(run) if suite.needs_attention and suite.puts_heads_back else run
    measured, other_files = suite.measure(run, options), suite.more_files(run, options)
    measured = measured if options.tokens is None else _with_errors(measured)
    result = {"checkpoint_step": run.step, "split": options.split, "overrides": run.overrides}
    result["dtype"] = run.model.dtype
    result |= {"request": request} if request else {}
    result |= measured
    if not processes.is_main_process():
        return result
    rows, figure = suite.rows(result), suite.figure(result)
    if figure is not None and figure.get_suptitle():
        figure.suptitle(f"{base.name_of(run)}: {figure.get_suptitle()}")
    contents: results.Contents = {".csv": results.csv_text(rows)} if rows else {}
    contents |= {} if figure is None else {".png": figure}
    contents |= other_files | {".json": results.json_text(result)}
    figures = {name + ending: each for ending, each in contents.items() if isinstance(each, Figure)}
    print(suite.printed(result))
    if figures:
        shown = {named.removesuffix(".png"): each for named, each in figures.items()}
        results.write_tensorboard(run.workdir / "tensorboard" / stem, suite.scalars(result), shown, run.step)
    print("\nWritten to", *results.write(run.workdir / "eval", stem, contents), sep="\n")
    return result


def _with_errors(measured: Result) -> Result:
    """Add the standard error of each metric with `items`, to the rows or to the result itself."""
    rows, found = measured.get("rows", [measured]), list[Row]()
    none = {f"{metric}_error": None for row in rows for metric in row.get("items", {})}
    for row in rows:
        of_metrics = {metric: items.unpacked(packed) for metric, packed in row.get("items", {}).items()}
        found.append(row | none | {f"{name}_error": uncertainty.of_ratio(*each) for name, each in of_metrics.items()})
    return measured | {"rows": found} if "rows" in measured else found[0]


def requested(name: str, options: SuiteOptions) -> dict[str, Any]:
    """Return the options and fingerprints that a result records. A sweep measures again if they have changed."""
    found = {flag: getattr(options, flag) for flag in SUITES[name].flags}
    found = {flag: value for flag, value in found.items() if flag != "tokens" or value is not None}  # as in old results
    return found | SUITES[name].fingerprints(options)

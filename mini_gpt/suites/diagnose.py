"""Check a checkpoint for known faults."""

import dataclasses
import math

from mini_gpt.config.schema import Config
from mini_gpt.insight.diagnosis import checks, pairs
from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training import run_directory, writers
from mini_gpt.training.run import Run

# Overrides after which no recorded loss is comparable.
OTHER_LOSS = ("data.", "context_length", "source_length", "train.mask_rate", "train.mean_span")


class Diagnose(Suite):
    name = "diagnose"
    flags = ("tokens",)
    supports_encoder = True
    puts_heads_back = False

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        if trained.data.is_task and not trained.model.has_encoder:
            corpus = trained.data.corpus
            raise UserError(f"--suite=diagnose needs text, and data.corpus is {corpus}; use --suite=tasks")

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        path = run.workdir / run_directory.METRICS
        history = writers.read(path)
        if any(name.startswith(OTHER_LOSS) for name in run.overrides):
            history = []
        elif options.split != "validation" or "eval.tokens" in run.overrides:
            history = [{key: row[key] for key in row if key != "validation/loss"} for row in history]
        if run.config.model.has_encoder:
            shown, train_examples = (base.examples_of(run, split, options.tokens) for split in (options.split, "train"))
            results = pairs.diagnose(run.model, shown, train_examples, history, run.step)
        else:
            tokens, train_tokens = (base.split_tokens(run, split) for split in (options.split, "train"))
            with progress.shown("checks", checks.cost(run.model, len(tokens), len(train_tokens), options.tokens)):
                results = checks.diagnose(run.model, tokens, train_tokens, history, run.step, options.tokens)
        return {
            "context_length": run.config.context_length,
            "found": [result.check for result in results if result.found],
            "rows": [_row(result) for result in results],
        }

    def rows(self, result: Result) -> list[Row]:
        return [row | {"causes": "; ".join(row["causes"])} for row in result["rows"]]

    def printed(self, result: Result) -> str:
        lines = []
        for row in result["rows"]:
            error = f" Standard error: {row['error']:.2g}." if row.get("error") else ""
            lines.append(f"{'FOUND' if row['found'] else 'ok':>5}  {row['check']}: {row['says']}{error}")
            if row["found"]:
                lines.append(f"         limit: {row['limit']}; possible causes:")
                lines += [f"           - {cause}" for cause in row["causes"]]
        if not result["found"]:
            return "\n".join([*lines, "", "Nothing found."])
        found = f"{len(result['found'])} of {len(result['rows'])} checks found something: {', '.join(result['found'])}."
        return "\n".join([*lines, "", found, "A finding may explain those after it."])


def _row(result: CheckResult) -> Row:
    value = result.value if math.isfinite(result.value) else None
    return dataclasses.asdict(result) | {"value": value, "causes": result.causes}

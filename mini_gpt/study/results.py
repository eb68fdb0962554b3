"""The results of a study's runs on disk: which are complete, and their values."""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np

from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import corpora, tokenizers
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import files
from mini_gpt.study.definition import Comparison, Plan, PlannedRun
from mini_gpt.suites import SUITES
from mini_gpt.suites.base import Result, Row
from mini_gpt.training import inputs, run_directory, train_state, writers

log = logging.getLogger("mini_gpt.study")


class Results:
    """The complete results of a plan's runs.

    by_run: {name of a run: {suite: result}}. Raises UserError if a run directory holds another run, or if the text of a
    run has changed since.
    """

    def __init__(self, plan: Plan, workdir: Path):
        self.plan, self.workdir = plan, workdir
        self._corpus = functools.cache(corpora.open_corpus)
        self.by_run = {run.name: self.of_run(run) for run in plan.runs}

    def of_run(self, run: PlannedRun) -> dict[str, Result]:
        """Read the complete results of one run; there are none before the tuning has ended."""
        workdir = self.workdir / run.name
        if self.plan.is_untuned or not (workdir / run_directory.CONFIG).exists():
            return {}
        run_directory.check_same_config(workdir, run.config)
        found = {suite: self._read(run, workdir, suite) for suite in self.plan.suites}
        complete = {suite: result for suite, result in found.items() if result is not None}
        if complete:
            same_text = dataclasses.replace(run.config.data, seed=0)  # so that the cache opens a corpus once
            run_directory.check_corpus(workdir, self._corpus(same_text))
        return complete

    def missing(self, run: PlannedRun) -> list[str]:
        """Return the suites that have no result of the run."""
        return [suite for suite in self.plan.suites if suite not in self.by_run[run.name]]

    def missing_now(self, run: PlannedRun) -> list[str]:
        """Read the results of the run again, and return the suites that have none."""
        self.by_run[run.name] = self.of_run(run)
        return self.missing(run)

    def worker_job(self, run: PlannedRun) -> dict[str, Any]:
        """Return the job of worker.py: train the run, and measure what is missing."""
        suites = {name: dataclasses.asdict(self.plan.suites[name]) for name in self.missing(run)}
        workdir = str((self.workdir / run.name).absolute())
        return {"workdir": workdir, "config": loading.to_dict(run.config), "suites": suites}

    @property
    def complete_runs(self) -> list[PlannedRun]:
        return [run for run in self.plan.runs if not self.missing(run)]

    def row(self, run: PlannedRun, suite: str, label: str, length: int) -> Row | None:
        """Return the row of a run's result; None if it is missing."""
        rows = SUITES[suite].compared_rows(self.by_run[run.name][suite]) if suite in self.by_run[run.name] else []
        return next((row for row in rows if row["length"] == length and SUITES[suite].label(row) == label), None)

    def parameters(self, condition: str) -> int | None:
        """Return how many parameters the model of a condition has; None before its first run."""
        for run in self.plan.runs:
            path = self.workdir / run.name / run_directory.TOKENIZER
            if run.condition == condition and path.exists():
                vocab_size = inputs.vocab_size(run.config, tokenizers.load(path))
                return model_parameters.count(train_state.parameter_shapes(run.config, vocab_size)[1])
        return None

    def rows(self, suite: str) -> dict[str, list[Row]]:
        """Return {condition: rows of all its complete seeds}."""
        found: dict[str, list[Row]] = {}
        for run in self.plan.runs:
            if suite in self.by_run[run.name]:
                rows = SUITES[suite].compared_rows(self.by_run[run.name][suite])
                found.setdefault(run.condition, []).extend(rows)
        return found

    def pairs(self, comparison: Comparison) -> dict[int, tuple[Row, Row]]:
        """Return {seed: rows of the first and the second condition} of the seeds that are complete in both."""
        rows = {
            (run.condition, run.seed): self.row(run, comparison.suite, comparison.label, comparison.length)
            for run in self.plan.runs
            if run.condition in (comparison.first, comparison.second)
        }
        both = {seed: (rows[comparison.first, seed], rows[comparison.second, seed]) for seed in self.plan.study.seeds}
        return {seed: (first, second) for seed, (first, second) in both.items() if first and second}

    def run_rows(self) -> list[Row]:
        """Return a row for each run and measured length, with its metrics, and whether the run has learned."""
        metrics = dict.fromkeys(value for suite in self.plan.suites for value in SUITES[suite].values)
        found = []
        for run in self.plan.runs:
            learned = self.has_learned(run)
            for suite, result in self.by_run[run.name].items():
                for row in SUITES[suite].compared_rows(result):
                    start = {"condition": run.condition, "seed": run.seed, "suite": suite, "learned": learned}
                    start |= {"measured": SUITES[suite].label(row), "length": row["length"]}
                    found.append(start | {metric: row.get(metric) for metric in metrics} | {"reason": row["reason"]})
        return found

    def training_losses(self, parts: int) -> dict[str, list[np.ndarray]]:
        """Return {condition: losses of each run that has started}: the means in equal parts of the training."""
        found: dict[str, list[np.ndarray]] = {}
        for run in self.plan.runs:
            losses = _training_loss(self.workdir / run.name / run_directory.METRICS, run.config.train.steps, parts)
            if np.isfinite(losses).any():
                found.setdefault(run.condition, []).append(losses)
        return found

    def has_learned(self, run: PlannedRun) -> bool | None:
        """Return whether a run meets the fit threshold; None without a threshold or a result."""
        fit = self.plan.fit
        if fit is None or fit.suite not in self.by_run[run.name]:
            return None
        row = self.row(run, fit.suite, fit.label, self.plan.fit_length(run.condition))
        return fit.holds(None if row is None else row[fit.metric])

    def _read(self, run: PlannedRun, workdir: Path, suite: str) -> Result | None:
        """Return a result; None if it is missing or damaged, or has another step or other options."""
        options = self.plan.suites[suite]
        path = workdir / "eval" / f"{suites.file_stem(suite, options)}.json"
        try:
            result = files.read_with_checksum(path, must=True)
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning(f"{path} counts as missing ({error}): `run` measures it again")
            return None
        measured = result.get("checkpoint_step"), result.get("request", {})
        return result if measured == (run.config.train.steps, suites.requested(suite, options)) else None


def _training_loss(path: Path, steps: int, parts: int) -> np.ndarray:
    """Return the mean training loss in equal parts of the training (suffix X); NaN for a part without a row."""
    sums_X, counts_X = np.zeros(parts), np.zeros(parts)
    for row in writers.read(path):
        if "train/loss" in row:
            place = min(parts - 1, (int(row["step"]) - 1) * parts // steps)
            sums_X[place] += row["train/loss"]
            counts_X[place] += 1
    return np.where(counts_X > 0, sums_X / np.maximum(counts_X, 1), np.nan)

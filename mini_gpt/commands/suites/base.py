"""The methods that all suites have."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from matplotlib.figure import Figure

from mini_gpt.commands import results
from mini_gpt.commands.suite_options import SuiteOptions
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run

Result = dict[str, Any]
Row = dict[str, Any]


class Suite:
    """A measurement of a run. `eval.py --suite=NAME` writes its result to eval/NAME.json.

    Its methods say what is checked before, what is measured, and what is written and printed beside the JSON.
    """

    name: str
    flags: tuple[str, ...] = ()  # the options that it takes besides the split: lengths, strides, text
    scores_split = False  # it scores a whole split of text, whose length `check_split` judges
    # Columns of `compared_rows` that depend on the length. A sweep compares them, and draws the first.
    values: tuple[str, ...] = ()
    x_label = "length (tokens)"
    y_label = "nats a token"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        """Raise UserError if no run of this config can be measured."""

    def check_split(self, trained: Config, options: SuiteOptions, num_tokens: int) -> None:
        """Raise UserError if a split of so many tokens cannot be measured."""

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        """Return the result that is written as JSON; by default, what was measured."""
        return {"checkpoint_step": run.step, "split": options.split, "overrides": run.overrides}

    def more_files(self, run: Run, options: SuiteOptions) -> dict[str, str | Figure]:
        """Return the content of more files by the ending of their names. All processes call it."""
        return {}

    def rows(self, result: Result) -> list[Row] | None:
        """Return the rows of the CSV file, or None for no such file."""
        return result.get("rows")

    def draw(self, result: Result) -> Figure | None:
        """Return the figure that is written as PNG and to TensorBoard, or None."""

    def scalars(self, result: Result) -> Iterator[tuple[str, float, int]]:
        """Yield (name, value, length) of the curves that TensorBoard shows beside the figure."""
        for label, rows in self.by_label(result["rows"] if self.values else ()).items():
            tag = "/".join(filter(None, [self.name, re.sub(r"\W+", "_", label)]))
            for row in rows:
                for value in self.values:
                    if row[value] is not None:
                        yield f"{tag}/{value}", row[value], row["length"]

    def printed(self, result: Result) -> str:
        """Return the text for the screen."""
        rows = self.rows(result)
        return results.table(rows) if rows else results.listing(result)

    def compared_rows(self, result: Result) -> list[Row]:
        """Return the rows that a sweep compares, with length, status (ok or undefined), reason and `values`."""
        return result["rows"]

    def label(self, row: Row) -> str:
        """Return what tells apart rows of one length."""
        return ""

    def by_label(self, rows: Iterable[Row]) -> dict[str, list[Row]]:
        """Return the rows that are not undefined, by their label."""
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row["status"] == "ok":
                groups.setdefault(self.label(row), []).append(row)
        return groups

    def require_text(self, trained: Config) -> None:
        """Raise UserError if the run was trained on a task."""
        if trained.data.is_task:
            raise UserError(
                f"--suite={self.name} needs text, and data.corpus is {trained.data.corpus}; use --suite=tasks"
            )

"""Measure the share of a task's problems that a model solves, by length."""

import textwrap

from matplotlib.figure import Figure

from mini_gpt.config.data import TASK
from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, tasks
from mini_gpt.data.tasks import published
from mini_gpt.evaluation import task_lengths
from mini_gpt.evaluation.task_accuracy import METRICS
from mini_gpt.insight import curves
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run

CURVES = {"exact_match": "problems solved", "token_accuracy": "tokens of the answers"}


class Tasks(Suite):
    name = "tasks"
    needs_attention = False
    supports_encoder = True
    flags = ("lengths",)
    values = (*METRICS, "nll")
    x_label = "length of the problem"
    y_label = "share of problems solved"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        corpus = trained.data.corpus
        if not trained.data.is_task:
            other = "translation" if trained.data.has_pairs else "perplexity"
            raise UserError(
                f"--suite=tasks needs a run of data.corpus=task:NAME, and this one has {corpus}; use --suite={other}"
            )
        _lengths(trained, options)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [("", length) for length in _lengths(trained, options)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        rows = (sum(task_batches.row_lengths(trained, n)) for n in _lengths(trained, options))
        return task_lengths.PROBLEMS * sum(rows)

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        task_batches.check_alphabet(run.config.data.corpus, run.tokenizer)
        lengths = _lengths(run.trained, options, run.config.data.corpus)
        costs = [task_lengths.PROBLEMS * sum(task_batches.row_lengths(run.config, length)) for length in lengths]
        lengths = base.lengths_within_budget(run, lengths, costs)
        return {
            "task": run.corpus.name,
            "train_length": run.trained.data.task_length,
            "published": [row._asdict() for row in published.of_task(run.corpus.name.removeprefix(TASK))],
            "rows": task_lengths.by_length(run.model, run.tokenizer, options.split, lengths),
        }

    def printed(self, result: Result) -> str:
        rows, parts = result["published"], [super().printed(result)]
        if rows:
            parts += [f"Published results of {result['task']}:", results.table(rows)]
            sources = dict.fromkeys(row["source"] for row in rows)
            parts += [textwrap.fill(f"{source}: {published.PROTOCOLS[source]}", 100) for source in sources]
        return "\n\n".join(parts)

    def figure(self, result: Result) -> Figure:
        solved = [row for row in result["rows"] if row["status"] == "ok"]
        lines = [base.curve(name, solved, value) for value, name in CURVES.items()]
        x = f"length ({tasks.find(result['task']).unit})"
        return curves.shares_figure(result["task"], lines, x=x, y="share correct", trained=result["train_length"])


def _lengths(trained: Config, options: SuiteOptions, corpus: str | None = None) -> tuple[int, ...]:
    """Return the lengths of the problems. corpus: None: that of the run."""
    return base.problem_lengths(corpus or trained.data.corpus, trained.data.task_length, options)

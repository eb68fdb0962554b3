"""The share of a task's problems that a model solves, for each length of the problems."""

import functools
import math
import re
import textwrap
from typing import Any

from matplotlib.figure import Figure

from mini_gpt.config.data import TASK
from mini_gpt.config.fields import Count, convert
from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, tasks
from mini_gpt.data.tasks import published
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import items, perplexity
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.task_accuracy import METRICS, accuracy, metrics
from mini_gpt.insight import curves
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base, results
from mini_gpt.suites.base import Result, Suite, SuiteOptions
from mini_gpt.training.run import Run

PROBLEMS = 512  # at most, of each length


def _longest_word(problems: list[tuple[str, str]]) -> int:
    """Return the length of the longest run of letters and digits, and so the largest of the position ids."""
    return max(len(word) for problem in problems for part in problem for word in re.findall(r"[^\W_]+", part))


def by_length(model: LoadedModel, tokenizer: Tokenizer, split: str, lengths: tuple[int, ...]) -> list[dict]:
    """Return a row for each length: the METRICS, nll in nats per token, and counts.

    The end of an answer counts in exact_match and nll, but not in token_accuracy, because it would be half of the
    tokens of a one-letter answer. For each length, up to PROBLEMS different problems of the split are scored, the same
    ones for every model and seed. `reason`: why a row is undefined, or None.
    """
    rows, config, lengths = [], model.config, tuple(convert("lengths", length, Count) for length in lengths)
    sources, needed = ({n: task_batches.row_lengths(config, n)[side] for n in lengths} for side in (0, 1))
    draw = functools.cache(lambda n: tasks.different(config.data.corpus, split, PROBLEMS, shortest=n, longest=n))
    in_sequence = config.data.position_ids == "sequence"
    most = {n: max(sources[n], needed[n]) if in_sequence else 1 + _longest_word(draw(n)) for n in lengths}
    reasons = {length: perplexity.why_undefined(config.model, most[length]) for length in lengths}
    problems = {length: draw(length) for length in lengths if reasons[length] is None}
    title = f"{sum(map(len, problems.values())):,} problems of {len(problems)} lengths"
    with progress.shown(title, sum(len(found) * needed[length] for length, found in problems.items())):
        for length, reason in reasons.items():
            row: dict[str, Any] = {"length": length, **dict.fromkeys(METRICS), "nll": None}
            row |= {"problems": 0, "answer_tokens": 0, "items": {}}
            if length in problems:
                score = accuracy(model, tokenizer, problems[length], needed[length])
                reason = None if math.isfinite(score.nll_sum) else perplexity.NOT_FINITE
            if reason is None:
                row |= {**metrics(score), "nll": score.nll}
                row |= {"problems": score.problems, "answer_tokens": score.tokens}
                row |= {"items": items.packed(score.items)}
            rows.append(row | {"status": "undefined" if reason else "ok", "reason": reason})
    return rows


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
        return PROBLEMS * sum(rows)

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        task_batches.check_alphabet(run.config.data.corpus, run.tokenizer)
        lengths = _lengths(run.trained, options, run.config.data.corpus)
        return {
            "task": run.corpus.name,
            "train_length": run.trained.data.task_length,
            "published": [row._asdict() for row in published.of_task(run.corpus.name.removeprefix(TASK))],
            "rows": by_length(run.model, run.tokenizer, options.split, lengths),
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

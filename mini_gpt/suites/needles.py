"""Ask for sentences and words in long texts."""

import dataclasses

from matplotlib.figure import Figure

from mini_gpt.config.schema import Config
from mini_gpt.evaluation import extrapolation, needles, perplexity
from mini_gpt.hugging_face import origin
from mini_gpt.insight import curves
from mini_gpt.runtime import progress
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run


class Needles(Suite):
    name = "needles"
    needs_attention = False
    flags = ("lengths",)
    needs_text = True
    needs_next_token = True
    values = ("exact_match", "token_accuracy", "nll")
    y_label = "share of questions answered"

    def check(self, trained: Config, options: SuiteOptions) -> None:
        super().check(trained, options)
        _lengths(trained, options)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [(kind, length) for kind in needles.KINDS for length in _lengths(trained, options)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        lengths = _lengths(trained, options)
        defined = [length for length in lengths if perplexity.why_undefined(trained.model, length - 1) is None]
        return needles.PROBLEMS * len(needles.KINDS) * sum(defined)

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        lengths, text = _lengths(run.trained, options), run.store.tokens(options.split)
        costs = [needles.PROBLEMS * len(needles.KINDS) * length for length in lengths]
        lengths = base.lengths_within_budget(run, lengths, costs)
        options = dataclasses.replace(options, lengths=",".join(map(str, lengths)))
        total = self.cost(run.trained, options, len(text))
        with progress.shown(f"{len(needles.KINDS)} kinds of questions", total):
            rows = needles.measure(run.model, run.tokenizer, text, lengths)
        return {"train_length": origin.trained_context(run), "rows": rows}

    def label(self, row: Row) -> str:
        return row["kind"]

    def figure(self, result: Result) -> Figure:
        lines = [base.curve(kind, rows, "exact_match") for kind, rows in self.by_label(result["rows"]).items()]
        trained = result["train_length"]
        return curves.shares_figure(self.name, lines, x="tokens of the text", y=self.y_label, trained=trained)


def _lengths(trained: Config, options: SuiteOptions) -> tuple[int, ...]:
    """Return lengths in tokens; by default powers of two from SHORTEST to twice the context, at most LONGEST."""
    if options.lengths is not None:
        return extrapolation.parse_lengths("--lengths", options.lengths, trained.context_length, 2)
    powers = (needles.SHORTEST * 2**i for i in range(6))
    most = min(needles.LONGEST, 2 * trained.context_length)
    return tuple(length for length in powers if length <= most) or (needles.SHORTEST,)

"""Measure the loss of a full split, in blocks of the context length."""

from mini_gpt.config.schema import Config
from mini_gpt.evaluation import perplexity, scoring
from mini_gpt.runtime import progress
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run


class Perplexity(Suite):
    name = "perplexity"
    needs_attention = False
    flags = ("tokens",)
    supports_spans = True
    needs_text = True
    values = ("nll", *scoring.METRICS)

    def check_split(self, trained: Config, options: SuiteOptions, num_tokens: int) -> None:
        perplexity.check_scorable(trained, _number(options, num_tokens))

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [("", trained.context_length)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        return perplexity.cost(trained, _number(options, num_tokens))

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        tokens, length = run.store.tokens(options.split), run.config.context_length
        tokens = tokens[-_number(options, len(tokens)) :]  # the end, as in extrapolation
        with progress.shown(f"blocks of {length}", perplexity.cost(run.config, len(tokens))):
            score = perplexity.score_split(run.model, tokens, run.tokenizer.token_bytes)
        base.check_finite(run, [score.nll_sum])
        return perplexity.result(score, run.model)

    def compared_rows(self, result: Result) -> list[Row]:
        return [result | {"length": result["context_length"], "status": "ok", "reason": None}]


def _number(options: SuiteOptions, num_tokens: int) -> int:
    """Return how many tokens of a split are read: all, or `--tokens` targets and the token before them."""
    return num_tokens if options.tokens is None else min(num_tokens, options.tokens + 1)

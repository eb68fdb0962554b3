"""Measure the loss of a full split, in blocks of the context length."""

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.evaluation import perplexity, scoring
from mini_gpt.insight import budget
from mini_gpt.runtime import progress
from mini_gpt.suites import base
from mini_gpt.suites.base import Result, Row, Suite, SuiteOptions
from mini_gpt.training.run import Run


class Perplexity(Suite):
    name = "perplexity"
    needs_attention = False
    supports_spans = True
    needs_text = True
    values = ("nll", *scoring.METRICS)

    def check_split(self, trained: Config, options: SuiteOptions, num_tokens: int) -> None:
        perplexity.check_scorable(trained, num_tokens)

    def compared(self, trained: Config, options: SuiteOptions) -> list[tuple[str, int]]:
        return [("", trained.context_length)]

    def cost(self, trained: Config, options: SuiteOptions, num_tokens: int) -> int:
        return perplexity.cost(trained, num_tokens)

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        tokens, length = run.store.tokens(options.split), run.config.context_length
        blocks = np.full(perplexity.cost(run.config, len(tokens)) // run.config.text_length, length)
        count = budget.fit(f"blocks of {length:,}", blocks, lambda: budget.forward_seconds(run.model, length))
        if count < len(blocks):
            tokens = tokens[-(count * run.config.text_length + 1) :]  # the end, as in extrapolation
        with progress.shown(f"blocks of {length}", perplexity.cost(run.config, len(tokens))):
            score = perplexity.score_split(run.model, tokens, run.tokenizer.token_bytes)
        base.check_finite(run, [score.nll_sum])
        return perplexity.result(score, run.model)

    def compared_rows(self, result: Result) -> list[Row]:
        return [result | {"length": result["context_length"], "status": "ok", "reason": None}]

"""The loss of a whole split, in blocks of the context length."""

import math

from mini_gpt.commands.suite_options import SuiteOptions
from mini_gpt.commands.suites.base import Result, Row, Suite
from mini_gpt.config.schema import Config
from mini_gpt.evaluation import perplexity, progress
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run


class Perplexity(Suite):
    name = "perplexity"
    scores_split = True
    values = ("nll", "bits_per_byte")

    def check(self, trained: Config, options: SuiteOptions) -> None:
        self.require_text(trained)

    def check_split(self, trained: Config, options: SuiteOptions, num_tokens: int) -> None:
        perplexity.check_scorable(trained, num_tokens)

    def measure(self, run: Run, options: SuiteOptions) -> Result:
        tokens, length = run.store.split(options.split).tokens, run.config.context_length
        with progress.shown(f"blocks of {length}", len(tokens)) as advance:
            score = perplexity.score_split(run.model, tokens, run.tokenizer.token_bytes, advance=advance)
        if not math.isfinite(score.nll_sum):
            raise UserError(f"{run.workdir}: the loss of step {run.step} is non-finite; see --suite=diagnose")
        return {
            "checkpoint_step": run.step,
            "split": options.split,
            "protocol": "masked blocks" if run.model.masked else "blocks",
            "context_length": length,
            "nll": score.nll,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte if score.bytes else None,
            "tokens_scored": score.tokens,
            "bytes_scored": score.bytes,
            "overrides": run.overrides,
        }

    def compared_rows(self, result: Result) -> list[Row]:
        return [result | {"length": result["context_length"], "status": "ok", "reason": None}]

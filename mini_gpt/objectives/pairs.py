"""Targets of pairs, given their sources."""

from collections.abc import Sequence
from typing import Any

from mini_gpt.data import tokenizers
from mini_gpt.data.pairs import Pair, PairBatches, StoredPairs, batch_of
from mini_gpt.evaluation import task_accuracy
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import decoding as generation
from mini_gpt.objectives.base import SAMPLE_PROBLEMS, Objective, ProbeRow, TokensOf, scalars


class PairObjective(Objective):
    """Scores targets of validation pairs, given their sources: a part of the pairs during training, all at the end."""

    suite_flag = " --suite=translation"
    sample_title = "Sources of the validation split, with the model's targets:"

    def prepare(self, tokens_of: TokensOf, rows: Sequence[int] | None) -> None:
        config, tokenizer = self.config, self.tokenizer
        self.separator = tokenizers.separator(tokenizer)
        trained = StoredPairs(tokens_of("train"), self.separator)
        self.train_batches = PairBatches(trained, config, self.separator, rows=rows)
        stored = StoredPairs(tokens_of("validation"), self.separator)
        self.pairs = stored.take(stored.fitting(config, "validation"))
        self.some_pairs = stored.spread(config, "validation")
        batch = batch_of([self.pairs[:1]], self.separator, (config.source_length, config.context_length))
        self.probe_row = ProbeRow(batch["inputs"], batch["weights"] > 0, batch["source"])
        self.prompt = tokenizer.decode(self.pairs[0].source)

    def score(self, model: LoadedModel, pairs: list[Pair]) -> task_accuracy.TaskScore:
        return task_accuracy.of_pairs(model, pairs, self.separator)

    def scalars(self, model: LoadedModel) -> dict[str, float]:
        score = self.score(model, self.some_pairs)
        return scalars(score.nll, task_accuracy.metrics(score))

    def sample(self, model: LoadedModel, length: int) -> str:
        pairs = self.pairs[:SAMPLE_PROBLEMS]
        length = min(length, self.config.context_length)
        written = generation.greedy_targets(model, [pair.source for pair in pairs], self.separator, length)
        decode = self.tokenizer.decode
        return "\n".join(f"{decode(pair.source)} → {decode(text)}" for pair, text in zip(pairs, written, strict=True))

    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        score = self.score(model, self.pairs)
        line = (
            f"Validation loss {score.nll:.4f} nats per token of the targets, {score.token_accuracy:.2%} of the tokens "
            f"right, given the true tokens before them ({score.problems:,} pairs)."
        )
        return line, {}

"""Next tokens and masked tokens of a text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mini_gpt.data import text_batches
from mini_gpt.evaluation import perplexity, scoring
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.scoring import Score
from mini_gpt.objectives.base import Objective, ProbeRow, scalars

PROMPT_TOKENS = 32  # tokens of validation text that a sample continues


class TextObjective(Objective):
    """Scores validation text in blocks of the context length: a part of it during training, all of it at the end."""

    sample_title = "The start of the validation text, continued by the model:"

    def prepare(self, tokens_of: Callable[[str], np.ndarray], rows: Sequence[int] | None) -> None:
        config, tokenizer = self.config, self.tokenizer
        vocab = text_batches.vocab_of(tokenizer)
        self.train_batches = text_batches.TextBatches(tokens_of("train"), config, vocab=vocab, rows=rows)
        self.tokens = tokens = tokens_of("validation")
        if self.has_sample:
            from mini_gpt.generation import cache

            self.has_sample = config.model.causal and not cache.without_cache(config.model)
        perplexity.check_scorable(config, len(tokens))
        start_BL = np.asarray(tokens[: config.context_length], np.int32)[None]
        self.probe_row = ProbeRow(start_BL, np.ones(start_BL.shape, bool))
        self.prompt = (tokenizer.decode(tokens[:PROMPT_TOKENS]).split() or [" "])[0]

    def score(self, model: LoadedModel, *, most_tokens: int | None = None) -> Score:
        return perplexity.score_split(model, self.tokens, self.tokenizer.token_bytes, most_tokens=most_tokens)

    def scalars(self, model: LoadedModel) -> dict[str, float]:
        score = self.score(model, most_tokens=self.config.eval.tokens)
        return scalars(score.nll, scoring.metrics(score))

    def sample(self, model: LoadedModel, length: int) -> str:
        from mini_gpt.generation import decoding, sampling

        context, drawn = self.config.context_length, sampling.Sampling(temperature=0.8, top_k=40)
        prompt = self.tokens[: min(PROMPT_TOKENS, (context + 1) // 2)]
        (generated,) = decoding.generate(
            model, [prompt], length=min(length, context - len(prompt)), sampling=drawn, seed=self.config.seed
        )
        return self.tokenizer.decode([*prompt, *generated])

    def conclusion(self, model: LoadedModel) -> tuple[str, dict[str, Any]]:
        score = self.score(model)
        kinds = {"next_token": "tokens", "masked": "masked tokens", "span_corruption": "tokens of spans"}
        kind = kinds[self.config.train.objective]
        bits = f", {score.bits_per_byte:.3f} bits per byte" if score.bytes else ""
        line = (
            f"Validation loss {score.nll:.4f} nats per token{bits} "
            f"({score.tokens:,} {kind}, the whole split, in blocks of {text_batches.text_length(self.config)})."
        )
        return line, perplexity.result(score, model)

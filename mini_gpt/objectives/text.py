"""Next tokens of a text, and the base of other objectives for texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import text_batches
from mini_gpt.data.batches import Batch, next_token_batch
from mini_gpt.data.text_batches import Vocab
from mini_gpt.evaluation import perplexity, scoring
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.scoring import Score
from mini_gpt.objectives.base import Objective, ProbeRow, TokensOf, scalars

PROMPT_TOKENS = 32  # tokens of validation text that a sample continues


class TextObjective(Objective):
    """Scores validation text in blocks of the context length: a part of it during training, all of it at the end.

    extra_tokens: the number of tokens that the objective adds to those of the tokenizer.
    masks: whether inputs are hidden behind the mask token; then the targets are the text itself.
    corrupts: whether a row is a corrupted text, of which only some targets count.
    length_field: the field that sets the length of a row.
    protocol: the name of the score in result files.
    scored: the name of what counts in the loss.
    """

    sample_title = "The start of the validation text, continued by the model:"
    extra_tokens = 0
    masks = False
    corrupts = False
    length_field = "context_length"
    protocol = "blocks"
    scored = "tokens"

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise UserError for fields that do not fit the objective."""
        if not config.model.causal:
            config.refuse("train.objective", "must be masked: with model.causal=False a token attends to its target")
        if config.model.has_encoder and not config.data.is_task and not config.data.has_pairs:
            remedy = "must be pairs, task:NAME, or tfds:NAME with data.pair, because model.encoder_layers needs pairs"
            config.refuse("data.corpus", remedy)

    @classmethod
    def added_tokens(cls, mask_id: int | None) -> int:
        """Return `extra_tokens`, or 0 if the tokenizer is of a model that has them. mask_id: the tokenizer's own."""
        return cls.extra_tokens if mask_id is None else 0

    @classmethod
    def text_length(cls, config: Config) -> int:
        """Return the tokens of text in one row."""
        return config.context_length

    @classmethod
    def batch_of(cls, windows_BM: np.ndarray, config: Config, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
        """Return the batch of windows of a text, M = text_length + 1. seeds: one per row, for random choices."""
        return next_token_batch(windows_BM)

    def prepare(self, tokens_of: TokensOf, rows: Sequence[int] | None) -> None:
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
        bits = f", {score.bits_per_byte:.3f} bits per byte" if score.bytes else ""
        line = (
            f"Validation loss {score.nll:.4f} nats per token{bits} "
            f"({score.tokens:,} {self.scored}, the whole split, in blocks of {self.config.text_length})."
        )
        return line, perplexity.result(score, model)


class CorruptedObjective(TextObjective):
    """The base of objectives that corrupt a text and predict a part of it."""

    corrupts = True

    @classmethod
    def batch_of(cls, windows_BM: np.ndarray, config: Config, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
        return cls.corrupted(windows_BM[:, :-1], config, vocab, seeds)

    @classmethod
    def corrupted(cls, texts_BL: np.ndarray, config: Config, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
        """Return the batch of texts of `text_length` tokens."""
        raise NotImplementedError

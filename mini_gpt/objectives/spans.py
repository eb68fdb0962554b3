"""Corrupted spans of a text (Raffel et al. 2020): the encoder reads the text without them, the decoder writes them."""

from collections.abc import Sequence

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import spans, text_batches, tokenizers
from mini_gpt.data.batches import Batch
from mini_gpt.data.text_batches import Vocab
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import decoding as generation
from mini_gpt.objectives.base import ProbeRow, TokensOf
from mini_gpt.objectives.text import CorruptedObjective


class SpanObjective(CorruptedObjective):
    """Scores the corrupted spans of validation text."""

    sample_title = "The start of the validation text without some spans, and the spans that the model writes:"

    extra_tokens = spans.SENTINELS
    length_field = "source_length"
    protocol = "corrupted blocks"
    scored = "tokens of spans"

    @classmethod
    def check(cls, config: Config) -> None:
        if not config.model.has_encoder:
            config.refuse("train.objective", "span_corruption needs an encoder: set model.encoder_layers")
        if config.data.is_task or config.data.has_pairs:
            config.refuse("data.corpus", "must be a text without pairs for train.objective=span_corruption")

    @classmethod
    def text_length(cls, config: Config) -> int:
        return spans.sizes(config).text

    @classmethod
    def corrupted(cls, texts_BL: np.ndarray, config: Config, vocab: Vocab, seeds: list[tuple[int, int]]) -> Batch:
        return spans.batch_of(texts_BL, config, vocab.size, seeds)

    def prepare(self, tokens_of: TokensOf, rows: Sequence[int] | None) -> None:
        config, tokenizer = self.config, self.tokenizer
        if tokenizer.separator_id is not None:
            remedy = "must be next_token: the imported model has no tokens for the places of spans"
            config.refuse("train.objective", remedy)
        super().prepare(tokens_of, rows)
        vocab = text_batches.vocab_of(tokenizer)
        blocks = text_batches.corrupted_blocks(self.tokens, config, vocab=vocab, batch_size=1, seed=0)
        _, batch = next(blocks)
        self.probe_row = ProbeRow(batch["inputs"], batch["weights"] > 0, batch["source"])
        source = spans.decode(batch["source"][0], tokenizer)
        self.prompt = source[: source.index("<0>") + len("<0>")].splitlines()[-1]

    def sample(self, model: LoadedModel, length: int) -> str:
        assert self.probe_row.source_BS is not None
        (source_S,), separator = self.probe_row.source_BS, tokenizers.separator(self.tokenizer)
        (written,) = generation.greedy_targets(model, [source_S], separator, min(length, self.config.context_length))
        return f"{spans.decode(source_S, self.tokenizer)}\n\n{spans.decode(written, self.tokenizer)}"

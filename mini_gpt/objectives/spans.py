"""Corrupted spans of a text (Raffel et al. 2020): the encoder reads the text without them, the decoder writes them."""

from collections.abc import Callable, Sequence

import numpy as np

from mini_gpt.data import spans, text_batches, tokenizers
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import decoding as generation
from mini_gpt.objectives.base import ProbeRow
from mini_gpt.objectives.text import TextObjective


class SpanObjective(TextObjective):
    """Scores the corrupted spans of validation text."""

    sample_title = "The start of the validation text without some spans, and the spans that the model writes:"

    def prepare(self, tokens_of: Callable[[str], np.ndarray], rows: Sequence[int] | None) -> None:
        super().prepare(tokens_of, rows)
        config, tokenizer = self.config, self.tokenizer
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

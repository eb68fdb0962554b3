"""Span corruption: sentinels replace spans of a text, and the target is the spans (Raffel et al. 2020, 3.1.4).

With the spans `red` and `on the` of `a red cat sat on the mat`, the source is `a <0> cat sat <1> mat`, and the target
`<0> red <1> on the`. The sentinels are the last tokens of the vocabulary; <0> is the very last, as in T5.
"""

import codecs
import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_gpt.config.schema import Config, TrainConfig
from mini_gpt.data import tokenizers
from mini_gpt.data.batches import PADDING, Batch, next_token_batch
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import require

SENTINELS = 100  # tokens that mark the spans, as in T5


class Sizes(NamedTuple):
    """The tokens of a text, its corrupted tokens, and the spans that they form."""

    text: int
    corrupted: int
    spans: int

    @property
    def source(self) -> int:
        return self.text - self.corrupted + self.spans

    @property
    def target(self) -> int:
        """The tokens to predict, with the end, which is a separator."""
        return self.corrupted + self.spans + 1


@functools.lru_cache(maxsize=4)
def sizes(config: Config) -> Sizes:
    """Return the largest sizes for which the source fits in `source_length`.

    Raises UserError if the target does not fit in `context_length`, or if there are too few sentinels.
    """
    require(config.source_length >= 2, "source_length", config.source_length, "must be at least 2 for span corruption")
    text = 2
    while _sizes_of(config.train, text + 1).source <= config.source_length:
        text += 1
    found, mean = _sizes_of(config.train, text), config.train.mean_span
    require(found.spans <= SENTINELS, "train.mean_span", mean, f"gives {found.spans} spans, more than {SENTINELS}")
    remedy = f"source_length={config.source_length} needs at least {found.target} to predict the spans"
    require(found.target <= config.context_length, "context_length", config.context_length, remedy)
    return found


def _sizes_of(config: TrainConfig, text: int) -> Sizes:
    corrupted = min(max(round(text * config.mask_rate), 1), text - 1)
    spans = min(max(round(corrupted / config.mean_span), 1), corrupted, text - corrupted)
    return Sizes(text, corrupted, spans)


def batch_of(texts_BN: np.ndarray, config: Config, vocab_size: int, seeds: list[tuple[int, int]]) -> Batch:
    """Return the batch of texts of `sizes(config).text` tokens.

    vocab_size: of the tokenizer.
    seeds: one per row.

    Rows of targets start with the separator, which is the last token of the tokenizer, and are padded with it.
    """
    size, separator = sizes(config), vocab_size - 1
    sentinels = vocab_size + SENTINELS - 1 - np.arange(size.spans)
    source_BS = np.full((len(texts_BN), config.source_length), PADDING, np.int32)
    rows_BM = np.full((len(texts_BN), config.context_length + 1), separator, np.int32)
    weights_BL = np.zeros((len(texts_BN), config.context_length), np.float32)
    weights_BL[:, : size.target] = 1
    for row, (text_N, seed) in enumerate(zip(texts_BN, seeds, strict=True)):
        kept, corrupted = _parts(text_N, size, np.random.default_rng(seed))
        source_BS[row, : size.source] = _joined(kept, sentinels)
        rows_BM[row, 1 : size.target] = _joined(sentinels, corrupted)
    return next_token_batch(rows_BM) | {"weights": weights_BL, "source": source_BS}


def _parts(text_N: np.ndarray, size: Sizes, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the parts that are kept, and the spans, each of which follows the kept part with the same index."""
    kept, corrupted = (_lengths(total, size.spans, rng) for total in (size.text - size.corrupted, size.corrupted))
    parts = np.split(text_N, np.cumsum(np.stack([kept, corrupted], axis=1).ravel())[:-1])
    return parts[::2], parts[1::2]


def _lengths(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` random lengths, at least 1 each, with the sum `total`; all are equally likely."""
    ends = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff([0, *ends, total])


def _joined(first, second) -> np.ndarray:
    """Return first[0], second[0], first[1], second[1], … in one array."""
    return np.concatenate([np.atleast_1d(part) for both in zip(first, second, strict=True) for part in both])


def encode(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a text with sentinels, such as `a <0> cat`, int32."""
    last = tokenizers.vocab_size(tokenizer) + SENTINELS - 1
    parts = re.split(r"<(\d{1,2})>", text)  # text, number, text, number, …
    tokens = [[last - int(part)] if place % 2 else tokenizer.encode(part) for place, part in enumerate(parts)]
    return np.concatenate(tokens).astype(np.int32)


def decode_each(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token, to be shown. A byte that is only a part of a character is hexadecimal: \\xc3."""
    is_text = lambda token: 0 <= token < len(tokenizer.texts)
    shown = lambda token: tokenizer.texts[token].decode(errors="backslashreplace")
    return [shown(token) if is_text(token) else decode([int(token)], tokenizer) for token in tokens]


def decode_in_turn(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """Return the whole characters that end in each token, so that all of them together are the text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(tokenizer.texts[token]) for token in tokens]


def decode(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of tokens with sentinels."""
    size = tokenizers.vocab_size(tokenizer)
    groups = itertools.groupby(tokens, key=lambda token: token if token >= size else None)
    return "".join(
        tokenizer.decode(list(group)) if sentinel is None else f"<{size + SENTINELS - 1 - sentinel}>"
        for sentinel, group in groups
    )

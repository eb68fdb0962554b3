"""Batches of a split of a text, of problems or of pairs, the loss of pairs, and how often tokens occur."""

from collections.abc import Iterator, Sequence

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import task_batches, text_batches, tokenizers
from mini_gpt.data.batches import Batch, in_full_batches, next_token_batch, windows
from mini_gpt.data.pairs import StoredPairs
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import memory, perplexity
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.examples import Example, batch_of, of_pair

OPENINGS = 64  # documents, of which the most typical is shown
MAX_COUNTED_TOKENS = 10_000_000  # enough to estimate the frequency of each token


def of_split(
    tokens: np.ndarray, split: str, config: Config, tokenizer: Tokenizer, num_tokens: int | None = None
) -> list[Example]:
    """Return examples that are spread over a split of pairs, or over a text that span corruption changes.

    num_tokens: at most this many tokens with padding, but at least one example; None: the examples of an evaluation
    during training. Raises UserError if no pair fits in a training row, or the text is shorter than a row.
    """
    if config.train.objective == "span_corruption":
        most = config.eval.tokens if num_tokens is None else num_tokens
        return list(_corrupted(tokens, config, text_batches.vocab_of(tokenizer), most))
    separator = tokenizers.separator(tokenizer)
    count = None if num_tokens is None else max(1, num_tokens // config.context_length)
    return [of_pair(pair, separator) for pair in StoredPairs(tokens, separator).spread(config, split, count)]


def _corrupted(tokens: np.ndarray, config: Config, vocab: text_batches.Vocab, most_tokens: int) -> Iterator[Example]:
    """Yield the blocks that `perplexity.score_split` scores."""
    perplexity.check_scorable(config, len(tokens))
    for number, piece in enumerate(perplexity.stretches(tokens, most_tokens, config.text_length)):
        blocks = text_batches.corrupted_blocks(piece, config, vocab=vocab, batch_size=1, seed=number)
        for _, batch in blocks:
            row = {name: array[0] for name, array in batch.items()}
            is_target_L = row["weights"] > 0
            yield Example(row["source"][row["source"] >= 0], row["inputs"][is_target_L], row["targets"][is_target_L])


def of_text(
    model: LoadedModel, tokens: np.ndarray, most: int, kept: memory.Kept = "losses"
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of windows that are spread over a stream, with the targets of the model's objective.

    most: about this many tokens, in at least one window.
    kept: see `LoadedModel.rows_at_a_time`.
    """
    config, length = model.config, model.config.context_length
    for number, piece in enumerate(perplexity.stretches(tokens, most, length)):
        rows = model.rows_at_a_time(length, kept, len(piece) // length)
        if model.masked:
            yield from text_batches.corrupted_blocks(piece, config, vocab=model.vocab, batch_size=rows, seed=number)
            continue
        for count, starts in in_full_batches(range(0, len(piece) - length, length), rows):
            yield count, next_token_batch(windows(piece, starts, length + 1, model.layout.first_id))


def of_problems(
    model: LoadedModel, tokenizer: Tokenizer, problems: list[tuple[str, str]], kept: memory.Kept = "losses"
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of a task's problems, which are pairs (question, answer). The model has no encoder."""
    config, length = model.config, model.config.context_length
    for count, part in in_full_batches(problems, model.rows_at_a_time(length, kept, len(problems))):
        yield count, task_batches.problem_batch(part, config, tokenizer, length)


def batches(
    model: LoadedModel, examples: Sequence[Example], kept: memory.Kept = "losses"
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of examples that fit in training rows, as `in_full_batches` does.

    kept: see `LoadedModel.rows_at_a_time`.
    """
    size = model.config.source_length, model.config.context_length
    for count, part in in_full_batches(examples, model.rows_at_a_time(max(size), kept, len(examples))):
        yield count, batch_of(part, size)


def loss(model: LoadedModel, examples: Sequence[Example]) -> float:
    """Return the mean loss in nats per token of the targets and their ends."""
    return perplexity.score_batches(model, batches(model, examples)).nll


def typical_start(tokens: np.ndarray, separator: int, length: int) -> int:
    """Return the start of the document whose first `length` tokens occur about as often as in all of the stream.

    Of the first OPENINGS documents that are this long; of shorter ones if there are none. The first document of several
    may begin inside a text, and is not taken.
    """
    part = np.asarray(tokens[:MAX_COUNTED_TOKENS])
    ends = np.append(np.flatnonzero(part == separator), len(part))
    starts = np.append(0, ends[:-1] + 1)
    sizes = (ends - starts) * (np.arange(len(starts)) > 0)
    starts = starts[sizes >= min(length, sizes.max())][:OPENINGS] if sizes.any() else starts[:1]
    share_V = np.bincount(part) / max(1, len(part))
    missing = [
        np.abs(np.bincount(part[s : s + length], minlength=len(share_V)) / length - share_V).sum() for s in starts
    ]
    return int(starts[np.argmin(missing)])


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return counts_V of the tokens in a stream, or in a sample of about MAX_COUNTED_TOKENS tokens."""
    pieces = perplexity.stretches(tokens, MAX_COUNTED_TOKENS, window=1)
    return np.sum([np.bincount(piece, minlength=vocab_size) for piece in pieces], axis=0)

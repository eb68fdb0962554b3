"""Sources and targets of a model with an encoder, with the tokens of both that belong together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import spans, task_batches, tasks, text_batches, tokenizers
from mini_gpt.data.batches import PADDING, Batch, in_full_batches
from mini_gpt.data.pairs import Pair, StoredPairs
from mini_gpt.data.tasks.base import Link, Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity
from mini_gpt.evaluation.progress import Advance, silent
from mini_gpt.model.loaded import LoadedModel

Alignment = Sequence[Link]  # in tokens of a text with a token per character


class Example(NamedTuple):
    """One source with its target, in int32 tokens without padding.

    source: the encoder's tokens: a separator, then the source; with span corruption, no separator. inputs: those of the
    decoder: a separator, then the target. written: the tokens that the decoder must write at these places: the target
    and its end. alignment: the true one of source and target, or () if it is not known.
    """

    source: np.ndarray
    inputs: np.ndarray
    written: np.ndarray
    alignment: Alignment = ()


def of_problem(problem: Problem, config: Config, tokenizer: Tokenizer, alignment: Alignment | None = None) -> Example:
    """Return the example of a (question, answer) problem. alignment: None: that of the task, if it is known."""
    if alignment is None:
        align = tasks.find(config.data.corpus).align
        alignment = align(*problem) if align else ()
    return _of_pair(task_batches.pair_of(tokenizer, problem), tokenizers.separator(tokenizer), alignment)


def of_texts(source: str, target: str, config: Config, tokenizer: Tokenizer) -> Example:
    """Return the example of two texts, in the tokens of a run. With span corruption, they may have sentinels."""
    separator = tokenizers.separator(tokenizer)
    if config.train.objective != "span_corruption":
        return _of_pair(Pair(tokenizer.encode(source), tokenizer.encode(target)), separator)
    source_S, target_L = (spans.encode(text, tokenizer) for text in (source, target))
    return _of_pair(Pair(source_S, target_L), separator)._replace(source=source_S)


def of_split(
    tokens: np.ndarray, split: str, config: Config, tokenizer: Tokenizer, num_tokens: int | None = None
) -> list[Example]:
    """Return examples that are spread over a split of pairs, or over a text that span corruption changes.

    num_tokens: at most this many tokens with padding, but at least one example; None: the examples of an evaluation
    during training. Raises UserError if no pair fits in a training row, or the text is shorter than a row.
    """
    if config.train.objective == "span_corruption":
        most = config.eval.tokens if num_tokens is None else num_tokens
        return list(_corrupted(tokens, config, tokenizers.vocab_size(tokenizer), most))
    separator = tokenizers.separator(tokenizer)
    count = None if num_tokens is None else max(1, num_tokens // config.context_length)
    return [_of_pair(pair, separator) for pair in StoredPairs(tokens, separator).spread(config, split, count)]


def _of_pair(pair: Pair, separator: int, alignment: Alignment = ()) -> Example:
    joined = lambda *parts: np.concatenate(parts).astype(np.int32)
    before = [separator]
    return Example(joined(before, pair.source), joined(before, pair.target), joined(pair.target, before), alignment)


def _corrupted(tokens: np.ndarray, config: Config, vocab_size: int, most_tokens: int) -> Iterator[Example]:
    """Yield the blocks that `perplexity.score_split` scores."""
    perplexity.check_scorable(config, len(tokens))
    for number, piece in enumerate(perplexity.stretches(tokens, most_tokens, text_batches.text_length(config))):
        blocks = text_batches.corrupted_blocks(piece, config, vocab_size=vocab_size, batch_size=1, seed=number)
        for _, batch in blocks:
            row = {name: array[0] for name, array in batch.items()}
            is_target_L = row["weights"] > 0
            yield Example(row["source"][row["source"] >= 0], row["inputs"][is_target_L], row["targets"][is_target_L])


def batch_of(examples: Sequence[Example], size: tuple[int, int]) -> Batch:
    """Return a batch with one example in each row. size: tokens of a row of sources, and of a row of targets."""
    rows, separator = range(len(examples)), examples[0].inputs[0]
    source_BS = np.full((len(rows), size[0]), PADDING, np.int32)
    inputs_BL = np.full((len(rows), size[1]), separator, np.int32)
    targets_BL = inputs_BL.copy()
    for row, example in zip(rows, examples, strict=True):
        source_BS[row, : len(example.source)] = example.source
        inputs_BL[row, : len(example.inputs)] = example.inputs
        targets_BL[row, : len(example.written)] = example.written
    lengths_B1 = np.array([[len(example.inputs)] for example in examples])
    weights_BL = (np.arange(size[1]) < lengths_B1).astype(np.float32)
    return {"inputs": inputs_BL, "targets": targets_BL, "weights": weights_BL, "source": source_BS}


def batches(model: LoadedModel, examples: Sequence[Example]) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of examples that fit in training rows, as `in_full_batches` does."""
    size = model.config.source_length, model.config.context_length
    for count, part in in_full_batches(examples, model.rows_at_a_time(max(size))):
        yield count, batch_of(part, size)


def loss(model: LoadedModel, examples: Sequence[Example], *, advance: Advance = silent) -> float:
    """Return the mean loss in nats per token of the targets and their ends. advance: called with numbers of tokens."""
    count_tokens = lambda rows: advance(rows * model.config.context_length)
    return perplexity.score_batches(model, batches(model, examples), advance=count_tokens).nll


def cells(alignment: Alignment, shape: tuple[int, int]) -> np.ndarray:
    """Return is_aligned_LS, bool: whether query L, which writes target token L, belongs to source token S.

    The first source token is the separator before the question.
    """
    is_aligned_LS = np.zeros(shape, bool)
    for (first, end), (first_query, end_query) in alignment:
        is_aligned_LS[first_query:end_query, 1 + first : 1 + end] = True
    return is_aligned_LS

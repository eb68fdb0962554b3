"""Sources and targets of a model with an encoder, with the tokens of both that belong together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import spans, task_batches, tasks, tokenizers
from mini_gpt.data.batches import PADDING, Batch
from mini_gpt.data.pairs import Pair
from mini_gpt.data.tasks.base import Link, Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError

ENGLISH = (
    "Anna has a small dog and an old cat. The dog sleeps near the door, but the cat likes the garden. Every morning "
    "Anna opens the door, and the small dog runs to the old cat."
)  # of no corpus, for models that know English
Alignment = Sequence[Link]  # in tokens of a text with a token per character


def fits_english(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of an English text hold all its letters, as those of a model of proteins do not."""
    letters = lambda text: [*filter(str.isalpha, text.lower())]
    try:
        return letters(tokenizer.decode(tokenizer.encode(ENGLISH))) == letters(ENGLISH)
    except UserError:  # a character that is not in the vocabulary
        return False


class Example(NamedTuple):
    """One source with its target, in int32 tokens without padding.

    source: the encoder's tokens: a separator, then the source; with span corruption, no separator.
    inputs: those of the decoder: a separator, then the target.
    written: the tokens that the decoder must write at these places: the target and its end.
    alignment: the true one of source and target, or () if it is not known.
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
    return of_pair(task_batches.pair_of(tokenizer, problem), tokenizers.separator(tokenizer), alignment)


def of_texts(source: str, target: str, config: Config, tokenizer: Tokenizer) -> Example:
    """Return the example of two texts, in the tokens of a run. With span corruption, they may have sentinels."""
    separator = tokenizers.separator(tokenizer)
    if config.train.objective != "span_corruption":
        return of_pair(Pair(tokenizer.encode(source), tokenizer.encode(target)), separator)
    source_S, target_L = (spans.encode(text, tokenizer) for text in (source, target))
    return of_pair(Pair(source_S, target_L), separator)._replace(source=source_S)


def of_pair(pair: Pair, separator: int, alignment: Alignment = ()) -> Example:
    """Return the example of a pair, with a separator before both sides."""
    source_S, inputs_L = (np.array([separator, *side], np.int32) for side in (pair.source, pair.target))
    return Example(source_S, inputs_L, np.array([*pair.target, separator], np.int32), alignment)


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


def cells(alignment: Alignment, shape: tuple[int, int]) -> np.ndarray:
    """Return is_aligned_LS, bool: whether query L, which writes target token L, belongs to source token S.

    The first source token is the separator before the question.
    """
    is_aligned_LS = np.zeros(shape, bool)
    for (first, end), (first_query, end_query) in alignment:
        is_aligned_LS[first_query:end_query, 1 + first : 1 + end] = True
    return is_aligned_LS

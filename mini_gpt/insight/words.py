"""Attention between whole words, from the attention between their tokens."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mini_gpt.insight.observing import AttentionMaps

WORD = re.compile(r"\s*(?:\w+(?:[-'’]\w+)*|[^\w\s]|\s$)")  # a hyphen or an apostrophe inside a word belongs to it


class Words(NamedTuple):
    """The tokens of a text that is to be shown by whole words."""

    tokens: np.ndarray


def of_tokens(texts: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Return the number of each token's word, [L], and the words, with the spaces before them.

    A token that contains parts of several words belongs to the first of them.
    """
    ends = [found.end() for found in WORD.finditer("".join(texts))]
    starts = itertools.accumulate((len(text) for text in texts[:-1]), initial=0)
    first_L = [start + len(text) - len(text.lstrip()) for start, text in zip(starts, texts, strict=True)]
    _, word_L = np.unique(np.searchsorted(ends, first_L, side="right"), return_inverse=True)
    words = [""] * (word_L[-1] + 1)
    for word, text in zip(word_L, texts, strict=True):
        words[word] += text
    return word_L, words


def grouped(layers: Sequence[AttentionMaps], word_L: np.ndarray) -> list[AttentionMaps]:
    """Return the maps of words: the sum of the weights on a word's tokens, in the mean over those of the query.

    The logits are the logs of these weights. A word sees another one if one of its tokens sees one of the other's.
    """
    is_word_WL = np.arange(word_L[-1] + 1)[:, None] == word_L
    share_WL = is_word_WL / is_word_WL.sum(axis=1, keepdims=True)
    found = []
    for layer in layers:
        weights_BHWW = share_WL @ np.asarray(layer.weights_BHLS) @ is_word_WL.T
        visible_BWW = is_word_WL @ np.asarray(layer.visible_BLS) @ is_word_WL.T
        found.append(AttentionMaps(np.log(np.maximum(weights_BHWW, 1e-30)), weights_BHWW, visible_BWW))
    return found

"""The texts that a head report reads, and what it knows of their tokens: delimiters, rare tokens, Python's syntax."""

import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity
from mini_gpt.insight.heads import python_source

TOKENS = 65_536  # in all rows together
RARE = 0.05  # share of the text that the rarest tokens make up


class Inputs(NamedTuple):
    """Rows of tokens to measure attention on.

    counts_BL: which queries count; padding does not. relations(rows): templates_BLS by kind, for a slice of the rows:
    which keys belong to a query by Python's syntax.
    """

    tokens_BL: np.ndarray
    counts_BL: np.ndarray
    relations: Callable[[slice], dict[str, np.ndarray]]


def of_text(tokens: np.ndarray, tokenizer: Tokenizer, length: int) -> Inputs:
    """Return windows at even distances over a split, with the relations of documents that parse as Python."""
    starts = window_starts(tokens, length)
    tokens_BL = np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)
    template = relation_templates(tokens, tokenizer, starts, length)
    relations = lambda rows: {kind: template(kind, starts[rows]) for kind in python_source.KINDS}
    return Inputs(tokens_BL, np.ones(tokens_BL.shape, bool), relations)


def of_problems(inputs_BL: np.ndarray, tokenizer: Tokenizer) -> Inputs:
    """Return the problems of a task as the model reads them; their padding does not count."""
    return Inputs(inputs_BL, inputs_BL != tokenizers.separator(tokenizer), lambda rows: {})


def window_starts(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the starts of windows at even distances, which have about TOKENS tokens in all."""
    count = max(1, min(TOKENS // length, len(tokens) // length))
    return np.linspace(0, len(tokens) - length, count).astype(int)


def delimiters(tokenizer: Tokenizer) -> np.ndarray:
    """Return for each token whether it is a separator, or only punctuation and line ends; False for the mask token."""
    texts = (tokenizer.decode([token]) for token in range(tokenizers.separator(tokenizer)))
    return np.array([*map(_is_delimiter, texts), True, False])


def _is_delimiter(text: str) -> bool:
    inner = text.strip(" \t")
    return bool(inner) and all(c in "\r\n" or (c != "_" and unicodedata.category(c)[0] == "P") for c in inner)


def rare(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return for each token whether it is among the rarest, which together make up RARE of a text.

    The last entry is False, for the mask token.
    """
    counts_V = perplexity.token_counts(tokens, vocab_size)
    order = np.argsort(counts_V, kind="stable")
    is_rare_V = np.zeros(vocab_size + 1, bool)
    is_rare_V[order] = np.cumsum(counts_V[order]) <= RARE * counts_V.sum()
    return is_rare_V


def relation_templates(
    tokens: np.ndarray, tokenizer: Tokenizer, starts: np.ndarray, length: int
) -> Callable[[str, np.ndarray], np.ndarray]:
    """Return a function from a kind of `python_source.KINDS` and some of the windows' starts to template_BLS."""
    pairs: dict[str, list[tuple[int, int]]] = {kind: [] for kind in python_source.KINDS}
    reach = length * int(tokenizer.token_bytes.max())
    for begin, document in _documents(tokens, tokenizers.separator(tokenizer), starts, length):
        ends = np.cumsum(tokenizer.token_bytes[document])
        text = tokenizer.decode(document)
        if not len(ends) or len(text.encode()) != ends[-1]:
            continue  # the document is cut inside a character
        for relation in python_source.relations(text, reach):
            query = begin + int(np.searchsorted(ends, relation.query, side="right"))
            start = int(starts[max(0, int(np.searchsorted(starts, query, side="right")) - 1)])  # of the query's window
            if not start <= query < start + length:
                continue
            for span in relation.keys:
                first, last = np.searchsorted(ends, (span[0], span[1] - 1), side="right")
                keys = range(max(begin + first, start), begin + last + 1)
                pairs[relation.kind] += [(query, key) for key in keys if key != query]
    sorted_pairs = {kind: np.array(sorted(found), int).reshape(-1, 2) for kind, found in pairs.items()}

    def template(kind: str, starts: np.ndarray) -> np.ndarray:
        template_BLS = np.zeros((len(starts), length, length), bool)
        for row, start in enumerate(starts):
            first, last = np.searchsorted(sorted_pairs[kind][:, 0], (start, start + length))
            inside = sorted_pairs[kind][first:last] - start
            inside = inside[inside[:, 1] >= 0]
            template_BLS[row, inside[:, 0], inside[:, 1]] = True
        return template_BLS

    return template


def _documents(tokens: np.ndarray, separator: int, starts: np.ndarray, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (begin, tokens) of each document that overlaps a window."""
    separators = np.flatnonzero(tokens == separator)
    begins, ends = np.append(0, separators + 1), np.append(separators, len(tokens))
    first, last = np.searchsorted(ends, starts), np.searchsorted(ends, starts + length - 1)
    overlapping = {number for pair in zip(first, last, strict=True) for number in range(pair[0], pair[1] + 1)}
    for number in sorted(overlapping):
        if number < len(ends):
            yield int(begins[number]), np.asarray(tokens[begins[number] : ends[number]])

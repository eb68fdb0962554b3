"""The texts of a head report, and the properties of their tokens: delimiters, letters, relations of the text."""

import collections
import itertools
import logging
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from mini_gpt.data import batches, tokenizers
from mini_gpt.data.spans import SENTINELS
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.insight import samples
from mini_gpt.insight.heads import english_stories, python_source
from mini_gpt.insight.heads.templates import Templates, Vocabulary
from mini_gpt.runtime.errors import UserError

TOKENS = 65_536  # in all rows together
RARE = 0.05  # share of the text that the rarest tokens make up

log = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """Rows of tokens to measure attention on.

    is_query_BL: False for tokens to ignore as queries, such as padding.
    relations: a function from row numbers to the templates of the text's grammar.
    """

    tokens_BL: np.ndarray
    is_query_BL: np.ndarray
    relations: Callable[[Sequence[int]], Templates] = lambda rows: {}


def of_text(tokens: np.ndarray, tokenizer: Tokenizer, length: int, most: int | None = None) -> Inputs:
    """Return evenly spaced windows of a split, with the relations of documents that can be parsed.

    most: tokens in all windows; None: TOKENS.
    """
    starts = window_starts(tokens, length, most)
    tokens_BL = batches.windows(tokens, starts, length, tokenizer.first)
    relations, error = parsed_relations(tokens, tokenizer, starts, length)
    if error is not None:
        log.warning(f"{', '.join(relations([]))}: not measured, since no document can be parsed ({error})")
    return Inputs(tokens_BL, np.ones(tokens_BL.shape, bool), relations)


def of_problems(inputs_BL: np.ndarray, tokenizer: Tokenizer) -> Inputs:
    """Return a task's problems as inputs; padding is ignored."""
    return Inputs(inputs_BL, inputs_BL != tokenizers.separator(tokenizer))


def window_starts(tokens: np.ndarray, length: int, most: int | None = None) -> np.ndarray:
    """Return the starts of evenly spaced windows, with up to about `most` tokens in all, or TOKENS."""
    return batches.evenly_spaced(len(tokens), length, max(1, min(most or TOKENS, len(tokens)) // length))


def vocabulary(tokenizer: Tokenizer, train_tokens: np.ndarray) -> Vocabulary:
    """Return the properties of each token; rare tokens are counted in `train_tokens`.

    Delimiters are the separator and tokens of only symbols, punctuation and line ends. Bytes of non-ASCII characters
    are letters. Ids above those of the tokenizer, of masks and sentinels, have no property.
    """
    texts = [tokenizer.decode([token]) for token in range(tokenizers.vocab_size(tokenizer))]
    texts[tokenizers.separator(tokenizer)] = "\n"
    size, texts = len(texts), texts + [""] * SENTINELS
    first_V, last_V = ([_is_letter(text[place:][:1]) for text in texts] for place in (0, -1))
    is_delimiter_V = np.array([*map(_is_delimiter, texts)])
    return Vocabulary(is_delimiter_V, rare(train_tokens, size), np.array(first_V), np.array(last_V))


def _is_letter(character: str) -> bool:
    return character.isalnum() or (character != "" and character in "_\ufffd")


def _is_delimiter(text: str) -> bool:
    inner = text.strip(" \t")
    return inner != "" and all(map(_delimits, inner))


def _delimits(character: str) -> bool:
    is_symbol = character not in "_\ufffd" and unicodedata.category(character)[0] in "PS"
    return is_symbol or character in "\r\n"


def rare(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return for each token whether it is one of the rarest, which together make up RARE of a text.

    The entries of ids above `vocab_size` are False.
    """
    counts_V = samples.token_counts(tokens, vocab_size + SENTINELS)[:vocab_size]
    order = np.argsort(counts_V, kind="stable")
    is_rare_V = np.zeros(vocab_size + SENTINELS, bool)
    is_rare_V[order] = np.cumsum(counts_V[order]) <= RARE * counts_V.sum()
    return is_rare_V


def parsed_relations(
    tokens: np.ndarray, tokenizer: Tokenizer, starts: np.ndarray, length: int
) -> tuple[Callable[[Sequence[int]], Templates], UserError | None]:
    """Return the function `Inputs.relations` for the windows at `starts`, which must not overlap, and an error or None.

    Documents are read as English stories if the tokens are words or the first document is one, otherwise as Python
    source. Others have no relations; the error is that of the first document, if this is true of all documents.
    """
    documents = list(_documents(tokens, tokenizers.separator(tokenizer), starts, length))
    begins_with = tokenizer.first is not None
    first = next((document for _, document in documents if len(document)), tokens[:0])
    parser = _parser(tokenizer, tokenizer.decode(first))
    pairs: dict[str, dict[int, list[tuple[int, int]]]]  # {kind: {window: its (query, key)}}
    pairs = {kind: collections.defaultdict(list) for kind in parser.KINDS}
    reach, parsed, errors = length * int(tokenizer.token_bytes.max()), 0, list[UserError]()
    for begin, document in documents:
        ends = np.cumsum(tokenizer.token_bytes[document])
        text = tokenizer.decode(document)
        if not len(ends) or len(text.encode()) != ends[-1]:
            continue  # the document is cut inside a character
        try:
            found = parser.relations(text, reach)
        except UserError as error:
            errors.append(error)
            continue
        parsed += 1
        for relation in found:
            query = begin + int(np.searchsorted(ends, relation.query, side="right"))
            window = int(np.searchsorted(starts, query, side="right")) - 1
            start = int(starts[window])
            if not start + begins_with <= query < start + length:
                continue  # the query is between two windows, or the first token of a row is in its place
            for span in relation.keys:
                first, last = begin + np.searchsorted(ends, (span[0], span[1] - 1), side="right")
                keys = range(max(first, start + begins_with), last + 1)
                pairs[relation.kind][window] += [(query - start, key - start) for key in keys if key != query]

    def relations(rows: Sequence[int]) -> Templates:
        templates = {kind: np.zeros((len(rows), length, length), bool) for kind in pairs}
        for kind, (row, window) in itertools.product(pairs, enumerate(rows)):
            queries, keys = np.array(pairs[kind].get(window, []), int).reshape(-1, 2).T
            templates[kind][row, queries, keys] = True
        return templates

    return relations, errors[0] if errors and not parsed else None


def _parser(tokenizer: Tokenizer, text: str) -> ModuleType:
    """Return the module that reads the documents. text: the first of them."""
    if tokenizer.kind == "words":
        return english_stories
    try:
        english_stories.relations(text, reach=0)
    except UserError:
        return python_source
    return english_stories if text.strip() else python_source


def _documents(tokens: np.ndarray, separator: int, starts: np.ndarray, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (begin, tokens) of each document that overlaps a window."""
    separators = np.flatnonzero(tokens == separator)
    begins, ends = np.append(0, separators + 1), np.append(separators, len(tokens))
    first, last = np.searchsorted(ends, starts), np.searchsorted(ends, starts + length - 1)
    for number in sorted(set(itertools.chain.from_iterable(map(range, first, last + 1)))):
        yield int(begins[number]), np.asarray(tokens[begins[number] : ends[number]])

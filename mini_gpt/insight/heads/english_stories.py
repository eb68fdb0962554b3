"""Relations between words of the English stories, found by reading them with their grammar."""

import itertools
from collections.abc import Iterator

from mini_gpt.data import english
from mini_gpt.insight.heads.python_source import Relation

KINDS = (
    "subject of the verb",
    "subject of the next verb",
    "object of the verb",
    "verb of the object",
    "antecedent of the pronoun",
    "determiner of the noun",
    "answer to the question",
)


def relations(text: str, reach: int) -> list[Relation]:
    """Return the relations of a story, or of its beginning. Raises UserError if the grammar does not allow the text.

    Keys are at most `reach` bytes back. object of the verb: in relative clauses, such as "the box that the dog sees".
    verb of the object: for objects after their verbs. subject of the next verb: from the word before a verb, where the
    verb is predicted. answer to the question: from the word before the noun of the answer to the noun in the story.
    """
    story = english.read(text)
    ends = list(itertools.accumulate(len(token.encode()) for token in story.tokens))
    starts = [end - len(word.text.encode()) for end, word in zip(ends, story.words, strict=True)]
    pairs = ((kind, query, key) for link in story.links for kind, query, key in _directed(link))
    return [
        Relation(kind, ends[query] - 1, ((starts[key], ends[key]),))
        for kind, query, key in pairs
        if key < query and starts[key] >= ends[query] - 1 - reach
    ]


def _directed(link: english.Link) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, query, key) of a link."""
    match link.kind:
        case "subject":
            yield KINDS[0], link.word, link.other
            yield KINDS[1], link.word - 1, link.other
        case "object":
            yield KINDS[2], link.word, link.other
            yield KINDS[3], link.other, link.word
        case "antecedent":
            yield KINDS[4], link.word, link.other
        case "determiner":
            yield KINDS[5], link.word, link.other
        case "answer":
            yield KINDS[6], link.word - 1, link.other

"""Relations between words of the English stories, found by reading them with their grammar."""

import itertools
from collections.abc import Iterator

import numpy as np

from mini_gpt.data import english
from mini_gpt.data.english.grammar import NOUNS
from mini_gpt.insight.heads.kinds import OF_STORIES
from mini_gpt.insight.heads.python_source import Relation
from mini_gpt.insight.heads.templates import Templates

KINDS = tuple(OF_STORIES)
CLASSES = {form: (kind, noun) for kind, nouns in NOUNS.items() for noun in nouns for form in noun}


def relations(text: str, reach: int) -> list[Relation]:
    """Return the relations of a story, or of its beginning. Raises UserError if the grammar does not allow the text.

    Keys are at most `reach` bytes back. object of the verb: in relative clauses, such as "the box that the dog sees".
    verb of the object: for objects after their verbs. subject of the next verb: from the word before a verb, where the
    verb is predicted. answer to the question: from the word before the noun of the answer to the noun in the story.
    noun of the adjective: from "heavy" in "the box is heavy" to "box". adjective of the noun: from "box" to "big" in
    "the big box". earlier person, animal, thing: from a noun to all other nouns of the class. noun of the same class:
    those of its own class.
    """
    story = english.read(text)
    ends = list(itertools.accumulate(len(token.encode()) for token in story.tokens))
    starts = [end - len(word.text.encode()) for end, word in zip(ends, story.words, strict=True)]
    directed = (pair for link in story.links for pair in _directed(link))
    pairs = itertools.chain(directed, _of_adjectives(story), _of_classes(story))
    return [
        Relation(kind, ends[query] - 1, ((starts[key], ends[key]),))
        for kind, query, key in pairs
        if key < query and starts[key] >= ends[query] - 1 - reach
    ]


def wider(templates: Templates) -> np.ndarray | None:
    """Return wider_BNWLS of `scores.measure` for the last two of KINDS; None for other texts.

    For "adjective of the noun", the keys of all nouns, also of those without an adjective: an adjective is always the
    previous word. For "noun of the same class", the earlier nouns of each class.
    """
    if "noun of the same class" not in templates:
        return None
    by_class = [templates[f"earlier {kind}"] for kind in NOUNS]
    is_noun_BL1 = (templates["determiner of the noun"] | templates["adjective of the noun"]).any(-1, keepdims=True)
    of_nouns = np.broadcast_to(is_noun_BL1, by_class[0].shape)
    none = np.zeros_like(by_class[0])
    return np.stack([np.stack([of_nouns, none, none], axis=1), np.stack(by_class, axis=1)], axis=1)


def _directed(link: english.Link) -> Iterator[tuple[str, int, int]]:
    match link.kind:
        case "subject":
            yield "subject of the verb", link.word, link.other
            yield "subject of the next verb", link.word - 1, link.other
        case "object":
            yield "object of the verb", link.word, link.other
            yield "verb of the object", link.other, link.word
        case "antecedent":
            yield "antecedent of the pronoun", link.word, link.other
        case "determiner":
            yield "determiner of the noun", link.word, link.other
        case "answer":
            yield "answer to the question", link.word - 1, link.other


def _of_adjectives(story: english.Story) -> Iterator[tuple[str, int, int]]:
    for link in story.links:
        if link.kind == "subject" and [word.role for word in story.words[link.word + 1 :][:1]] == ["predicate"]:
            yield "noun of the adjective", link.word + 1, link.other
        elif link.kind == "determiner" and story.words[link.word - 1].role == "adjective":
            yield "adjective of the noun", link.word, link.word - 1


def _of_classes(story: english.Story) -> Iterator[tuple[str, int, int]]:
    """Yield pairs of a noun and an earlier one. The same noun, and its other number, is a duplicate and no pair."""
    nouns = [(place, *CLASSES[word.text]) for place, word in enumerate(story.words) if word.text in CLASSES]
    for (key, of_key, other), (query, of_query, noun) in itertools.combinations(nouns, 2):
        if noun != other:
            yield f"earlier {of_key}", query, key
            if of_key == of_query:
                yield "noun of the same class", query, key

"""English sentences of a small grammar, and their German translations, with the alignment of their words.

German articles, adjectives and verbs agree with nouns, and verbs move: to the second place after an adverb, to the end
after `dass` and as a participle.
"""

from typing import NamedTuple

from mini_gpt.data.tasks.base import Link, Problem, Rng, Span, word_spans


class Noun(NamedTuple):
    """gender: of the German noun, m, f or n. The plurals are those of both languages."""

    english: str
    plural: str
    german: str
    german_plural: str
    gender: str


class Verb(NamedTuple):
    """The third person of both languages in the present, and the participles."""

    english: str
    plural: str
    participle: str
    german: str
    german_plural: str
    german_participle: str


NOUNS = (
    Noun("man", "men", "Mann", "Männer", "m"),
    Noun("dog", "dogs", "Hund", "Hunde", "m"),
    Noun("teacher", "teachers", "Lehrer", "Lehrer", "m"),
    Noun("tree", "trees", "Baum", "Bäume", "m"),
    Noun("woman", "women", "Frau", "Frauen", "f"),
    Noun("cat", "cats", "Katze", "Katzen", "f"),
    Noun("doctor", "doctors", "Ärztin", "Ärztinnen", "f"),
    Noun("child", "children", "Kind", "Kinder", "n"),
    Noun("horse", "horses", "Pferd", "Pferde", "n"),
    Noun("house", "houses", "Haus", "Häuser", "n"),
)
ADJECTIVES = (
    ("old", "alt"),
    ("small", "klein"),
    ("big", "groß"),
    ("young", "jung"),
    ("new", "neu"),
    ("beautiful", "schön"),
)
VERBS = (
    Verb("sees", "see", "seen", "sieht", "sehen", "gesehen"),
    Verb("finds", "find", "found", "findet", "finden", "gefunden"),
    Verb("loves", "love", "loved", "liebt", "lieben", "geliebt"),
    Verb("hears", "hear", "heard", "hört", "hören", "gehört"),
    Verb("seeks", "seek", "sought", "sucht", "suchen", "gesucht"),
    Verb("draws", "draw", "drawn", "zeichnet", "zeichnen", "gezeichnet"),
)
ADVERBS = (("today", "heute"), ("often", "oft"), ("now", "jetzt"), ("here", "hier"))
ARTICLES = {"nominative": {"m": "der", "f": "die", "n": "das"}, "accusative": {"m": "den", "f": "die", "n": "das"}}
ENDINGS_OF_EIN = {"nominative": {"m": "", "f": "e", "n": ""}, "accusative": {"m": "en", "f": "e", "n": ""}}
ENDINGS_AFTER_EIN = {"nominative": {"m": "er", "f": "e", "n": "es"}, "accusative": {"m": "en", "f": "e", "n": "es"}}


def _noun_phrase(rng: Rng, case: str) -> tuple[str, str, bool]:
    """Return an article, perhaps an adjective, and a noun in both languages; and whether it is plural."""
    noun, is_plural = NOUNS[rng.integers(len(NOUNS))], bool(rng.integers(2))
    is_definite = is_plural or bool(rng.integers(2))
    gender = noun.gender
    if is_plural:
        article, ending = "die", "en"
    elif is_definite:
        article = ARTICLES[case][gender]
        ending = "en" if (case, gender) == ("accusative", "m") else "e"
    else:
        article, ending = f"ein{ENDINGS_OF_EIN[case][gender]}", ENDINGS_AFTER_EIN[case][gender]
    english = ["the" if is_definite else "a"]
    german = [article]
    if rng.integers(2):
        adjective, stem = ADJECTIVES[rng.integers(len(ADJECTIVES))]
        english.append(adjective)
        german.append(stem + ending)
        if english[0] == "a" and adjective[0] in "aeiou":
            english[0] = "an"
    english.append(noun.plural if is_plural else noun.english)
    german.append(noun.german_plural if is_plural else noun.german)
    return " ".join(english), " ".join(german), is_plural


def sentence(rng: Rng) -> Problem:
    """Return a sentence in both languages: plain, with an adverb first, in the perfect, or a clause with `that`."""
    subject, subjekt, is_plural = _noun_phrase(rng, "nominative")
    object_, objekt, _ = _noun_phrase(rng, "accusative")
    verb, form = VERBS[rng.integers(len(VERBS))], rng.integers(4)
    finite = verb.plural if is_plural else verb.english
    german_finite = verb.german_plural if is_plural else verb.german
    if form == 1:
        adverb, german_adverb = ADVERBS[rng.integers(len(ADVERBS))]
        return f"{adverb} {subject} {finite} {object_}", f"{german_adverb} {german_finite} {subjekt} {objekt}"
    if form == 2:
        have, haben = ("have", "haben") if is_plural else ("has", "hat")
        return f"{subject} {have} {verb.participle} {object_}", f"{subjekt} {haben} {objekt} {verb.german_participle}"
    if form == 3:
        return f"I know that {subject} {finite} {object_}", f"ich weiß, dass {subjekt} {objekt} {german_finite}"
    return f"{subject} {finite} {object_}", f"{subjekt} {german_finite} {objekt}"


def align(english: str, german: str) -> list[Link]:
    """Return the aligned words of a sentence. The subject is before the object in both languages."""
    sides = [_keys(text) for text in (english, german)]
    return [(span, other) for key, span in sides[0].items() for name, other in sides[1].items() if key == name]


def _keys(text: str) -> dict[tuple[str, int], Span]:
    """Return {role of a word, number of earlier nouns: word}; the number is 0 for words outside of noun phrases."""
    found, nouns = {}, 0
    for first, last in word_spans(text):
        role = ROLES.get(text[first:last], "adjective")
        in_noun_phrase = role in ("article", "adjective", "noun")
        found[role, nouns if in_noun_phrase else 0] = (first, last)
        nouns += role == "noun"
    return found


def _roles() -> dict[str, str]:
    """Return {word of either language: its role}, of all words but adjectives."""
    german_articles = ("der", "die", "das", "den", "ein", "eine", "einen")
    roles = dict.fromkeys(("a", "an", "the", *german_articles), "article")
    roles |= {word: "noun" for noun in NOUNS for word in noun[:4]} | {word: "verb" for verb in VERBS for word in verb}
    roles |= {word: "adverb" for pair in ADVERBS for word in pair}
    roles |= dict.fromkeys(("has", "have", "hat", "haben"), "auxiliary")
    return roles | {"I": "I", "ich": "I", "know": "know", "weiß,": "know", "that": "that", "dass": "that"}


ROLES = _roles()

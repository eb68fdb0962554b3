"""English sentences of a small grammar, and their German translations, with the alignment of their words.

German articles, adjectives and verbs agree with nouns, and verbs move: to the second place after an adverb, to the end
after `dass` and as a participle.
"""

from typing import NamedTuple

from mini_gpt.data.tasks.base import Problem, Rng


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

Words = list[tuple[str, int]]  # words with keys; words of both languages with the same key are aligned


class Pair(NamedTuple):
    """A sentence in both languages."""

    english: Words
    german: Words

    def texts(self) -> Problem:
        """Return both sentences."""
        english, german = (" ".join(word for word, _ in words) for words in self)
        return english, german

    def alignment(self) -> set[tuple[int, int]]:
        """Return the aligned pairs (index of the English word, index of the German word)."""
        english, german = (list(enumerate(key for _, key in words)) for words in self)
        return {(i, j) for i, key in english for j, other in german if key == other}


def _noun_phrase(rng: Rng, case: str, first_key: int) -> tuple[Pair, bool]:
    """Return an article, perhaps an adjective, and a noun; and whether it is plural. Uses the next three keys."""
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
    english = [("the" if is_definite else "a", first_key)]
    german = [(article, first_key)]
    if rng.integers(2):
        adjective, stem = ADJECTIVES[rng.integers(len(ADJECTIVES))]
        english.append((adjective, first_key + 1))
        german.append((stem + ending, first_key + 1))
        if english[0][0] == "a" and adjective[0] in "aeiou":
            english[0] = ("an", first_key)
    english.append((noun.plural if is_plural else noun.english, first_key + 2))
    german.append((noun.german_plural if is_plural else noun.german, first_key + 2))
    return Pair(english, german), is_plural


def sentence(rng: Rng) -> Pair:
    """Return a sentence: plain, with an adverb first, in the perfect, or a clause with `that`."""
    subject, is_plural = _noun_phrase(rng, "nominative", 0)
    object_, _ = _noun_phrase(rng, "accusative", 3)
    verb, form = VERBS[rng.integers(len(VERBS))], rng.integers(4)
    english_verb = [(verb.plural if is_plural else verb.english, 6)]
    german_verb = [(verb.german_plural if is_plural else verb.german, 6)]
    if form == 1:
        adverb, german_adverb = ADVERBS[rng.integers(len(ADVERBS))]
        english = [(adverb, 7), *subject.english, *english_verb, *object_.english]
        return Pair(english, [(german_adverb, 7), *german_verb, *subject.german, *object_.german])
    if form == 2:
        auxiliary = [("have" if is_plural else "has", 7)], [("haben" if is_plural else "hat", 7)]
        english = [*subject.english, *auxiliary[0], (verb.participle, 6), *object_.english]
        return Pair(english, [*subject.german, *auxiliary[1], *object_.german, (verb.german_participle, 6)])
    if form == 3:
        clause = [("I", 7), ("know", 8), ("that", 9)], [("ich", 7), ("weiß,", 8), ("dass", 9)]
        english = [*clause[0], *subject.english, *english_verb, *object_.english]
        return Pair(english, [*clause[1], *subject.german, *object_.german, *german_verb])
    return Pair([*subject.english, *english_verb, *object_.english], [*subject.german, *german_verb, *object_.german])

"""The words and the grammar of the stories. `Teller` writes and reads them: it asks for one word after the other.

It knows the probability of each possible word, so the surprisal of each word under the grammar is exact.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Options = dict[str, float]  # {possible word: its probability}
END = ""  # the word that ends a story; its token is the separator
# Nouns by class, verbs and adjectives. Verbs agree in number with their subjects.
SINGULAR, PLURAL = 0, 1
PRONOUNS = {"he": "him", "she": "her", "it": "it", "they": "them"}  # {subject: object}
NOUNS = {  # {class: {(singular, plural): pronoun of the singular}}
    "person": {
        ("man", "men"): "he",
        ("boy", "boys"): "he",
        ("king", "kings"): "he",
        ("woman", "women"): "she",
        ("girl", "girls"): "she",
        ("queen", "queens"): "she",
    },
    "animal": {("cat", "cats"): "it", ("dog", "dogs"): "it", ("bird", "birds"): "it", ("horse", "horses"): "it"},
    "thing": {("box", "boxes"): "it", ("ball", "balls"): "it", ("book", "books"): "it", ("cup", "cups"): "it"},
}
TRANSITIVE = (("sees", "see"), ("likes", "like"), ("finds", "find"), ("chases", "chase"), ("follows", "follow"))
TO_BE = ("is", "are")
INTRANSITIVE = {
    "person": (("laughs", "laugh"), ("sings", "sing")),
    "animal": (("eats", "eat"), ("hides", "hide")),
    "thing": (("falls", "fall"), ("breaks", "break")),
}
PREDICATES = {"person": ("polite", "clever"), "animal": ("hungry", "wild"), "thing": ("heavy", "empty")}
ADJECTIVES = ("big", "small", "black", "white")
DETERMINERS = {"the": (SINGULAR, PLURAL), "a": (SINGULAR,), "two": (PLURAL,), "some": (PLURAL,)}
VERBS = (*TRANSITIVE, TO_BE, *(verb for verbs in INTRANSITIVE.values() for verb in verbs))
OTHER_NUMBER = {verb[number]: verb[1 - number] for verb in VERBS for number in (SINGULAR, PLURAL)}
ALL_CLASSES, ANIMATE = tuple(NOUNS), ("person", "animal")


class Word(NamedTuple):
    """A word of a story, or a punctuation mark.

    role: determiner, adjective, subject, object, verb, predicate, preposition, relative, question, punctuation or end;
      pronouns are subjects or objects, and the noun after a preposition is an object.
    options: the words that the grammar allows here, with their probabilities.
    """

    text: str
    role: str
    options: Mapping[str, float]

    @property
    def nats(self) -> float:
        """The surprisal of the word if the grammar and all words before it are known."""
        return -math.log(self.options[self.text])


class Link(NamedTuple):
    """A relation of two words.

    kind: subject or object (of a verb), antecedent (of a pronoun), determiner (of a noun), or answer (the noun of an
      answer and the earlier noun).
    word, other: indices of words.
    """

    kind: str
    word: int
    other: int


class Story(NamedTuple):
    """A story, or the beginning of one. following: the options of the next word, {} after the end of a story."""

    words: tuple[Word, ...]
    links: tuple[Link, ...]
    following: Mapping[str, float]

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def tokens(self) -> list[str]:
        """The words as tokens: with the space before them."""
        return [as_token(word.text, place) for place, word in enumerate(self.words)]


class TextEnds(Exception):
    """The text that is read has no more words. following: the options at its end."""

    def __init__(self, following: Options):
        super().__init__()
        self.following = following


class _Entity(NamedTuple):
    """Whom or what a noun phrase is about.

    place: the index of its noun.
    pronoun: he, she, it or they.
    """

    noun: tuple[str, str]
    kind: str
    number: int
    place: int

    @property
    def pronoun(self) -> str:
        return "they" if self.number == PLURAL else NOUNS[self.kind][self.noun]


class Teller:
    """The grammar. choose: returns one of the options."""

    def __init__(self, choose: Callable[[Options], str]):
        self.choose = choose
        self.words: list[Word] = []
        self.links: list[Link] = []
        self.used: list[tuple[str, str]] = []  # a noun is drawn once in a story
        self.before: list[_Entity] = []  # those of the sentence before
        self.now: list[_Entity] = []
        self.facts: list[tuple[tuple[str, str], _Entity, _Entity]] = []  # (verb, subject, object)

    def tell(self) -> Story:
        following: Options = {}
        try:
            self._sentences()
        except TextEnds as end:
            following = end.following
        return Story(tuple(self.words), tuple(self.links), following)

    def _sentences(self) -> None:
        opening = _even(_capital(DETERMINERS))
        self._sentence(self._word(opening, "determiner"))
        for number in (2, 3, 4):
            pronouns = _even(_capital(self._pronouns()))
            sentence = _mix((0.7, pronouns), (0.3, opening)) if number < 4 else {}
            question = {"Who": 1.0} if self._questions() else {}
            share = {2: (1.0, 0.0, 0.0), 3: (0.5, 0.25, 0.25), 4: (0.0, 0.5, 0.5)}[number]
            first = self._word(_mix(*zip(share, (sentence, question, {END: 1.0}), strict=True)), "determiner")
            if first == END:
                return self._name("end")
            if first == "Who":
                self._name("question")
                return self._question()
            self._sentence(first)

    def _sentence(self, first: str) -> None:
        """Tell a sentence after its first word."""
        self.before, self.now, is_opening = self.now, [], not self.now
        if first.lower() in PRONOUNS:
            subject = self._antecedent(first.lower(), "subject")
        else:
            subject = self._noun(first.lower(), ALL_CLASSES, "subject")
        place = len(self.words) - 1  # of the subject
        verbs = _verbs(subject.kind, subject.number)
        if first.lower() not in PRONOUNS:
            self._word(_mix((0.35, {"that": 1.0}), (0.2, {"near": 1.0}), (0.45, verbs)), "verb")
            if self.words[-1].text in ("that", "near"):
                self._modifier(subject, place)
                self._word(verbs, "verb")
        else:
            self._word(verbs, "verb")
        self._link("subject", place)
        verb, verb_place = self.words[-1].text, len(self.words) - 1
        if verb in TO_BE:
            self._word(_even(PREDICATES[subject.kind]), "predicate")
            self._word({".": 1.0}, "punctuation")
        elif verb in _forms(TRANSITIVE, subject.number):
            self._object(verb, subject, verb_place, is_opening)
        else:
            self._word({".": 1.0}, "punctuation")

    def _object(self, verb: str, subject: _Entity, verb_place: int, is_opening: bool) -> None:
        """Tell the object of a main verb, and the end of the sentence."""
        free = [pronoun for pronoun in self._pronouns(self.before) if self._referent(pronoun).noun != subject.noun]
        pronouns = _even([PRONOUNS[pronoun] for pronoun in free])
        word = self._word(_mix((0.4, pronouns), (0.6, _even(DETERMINERS))), "determiner")
        if word in PRONOUNS.values():
            thing = self._antecedent(next(name for name in free if PRONOUNS[name] == word), "object")
        else:
            thing = self._noun(word, ALL_CLASSES, "object")
        self.links.append(Link("object", verb_place, len(self.words) - 1))
        self._fact(verb, subject, thing)
        more = 0.3 if is_opening else 0.0
        if self._word(_mix((1 - more, {".": 1.0}), (more, {"that": 1.0})), "punctuation") == "that":
            self._modifier(thing, thing.place)
            self._word({".": 1.0}, "punctuation")

    def _modifier(self, noun: _Entity, place: int) -> None:
        """Tell the rest of a relative clause, or of a phrase with a preposition."""
        if self.words[-1].text == "near":
            self._name("preposition")
            self._noun(self._word(_even(DETERMINERS), "determiner"), ALL_CLASSES, "object")
            return
        self._name("relative")
        transitive = _even(_forms(TRANSITIVE, noun.number)) if noun.kind in ANIMATE else {}
        word = self._word(_mix((0.5, transitive), (0.5, _even(DETERMINERS))), "verb")
        if word in DETERMINERS:  # that the dogs see
            self._name("determiner")
            other = self._noun(word, ANIMATE, "subject")
            subject_place = len(self.words) - 1
            verb = self._word(_even(_forms(TRANSITIVE, other.number)), "verb")
            self._link("subject", subject_place)
            self._link("object", place)
            self._fact(verb, other, noun)
        else:  # that sees the dogs
            self._link("subject", place)
            verb_place = len(self.words) - 1
            other = self._noun(self._word(_even(DETERMINERS), "determiner"), ALL_CLASSES, "object")
            self.links.append(Link("object", verb_place, len(self.words) - 1))
            self._fact(word, noun, other)

    def _noun(self, determiner: str, classes: tuple[str, ...], role: str) -> _Entity:
        """Tell the words after a determiner: perhaps an adjective, and a noun that is new in the story."""
        place, numbers = len(self.words) - 1, DETERMINERS[determiner]
        of_class = {kind: [noun for noun in NOUNS[kind] if noun not in self.used] for kind in classes}
        found = {noun[n]: (noun, kind, n) for kind, nouns in of_class.items() for noun in nouns for n in numbers}
        if self._word(_mix((0.25, _even(ADJECTIVES)), (0.75, _even(found))), "adjective") in ADJECTIVES:
            self._word(_even(found), role)
        self._name(role)
        self._link("determiner", place)
        entity = _Entity(*found[self.words[-1].text], len(self.words) - 1)
        self.used.append(entity.noun)
        self.now.append(entity)
        return entity

    def _antecedent(self, pronoun: str, role: str) -> _Entity:
        """Link the pronoun that was told last, and return its antecedent."""
        entity = self._referent(pronoun)
        self._name(role)
        self._link("antecedent", entity.place)
        self.now.append(entity)
        return entity

    def _pronouns(self, entities: list[_Entity] | None = None) -> list[str]:
        """Return the pronouns with exactly one antecedent. entities: None for those of this sentence."""
        all_of_them = [entity.pronoun for entity in (self.now if entities is None else entities)]
        return [pronoun for pronoun in PRONOUNS if all_of_them.count(pronoun) == 1]

    def _referent(self, pronoun: str) -> _Entity:
        return next(entity for entity in self.before if entity.pronoun == pronoun)

    def _questions(self) -> list[tuple[str, str, str]]:
        """Return (verb, object, subject) of the facts that a question can ask for: those with one answer."""
        facts = [(verb[SINGULAR], told.noun[told.number], who.noun[who.number]) for verb, who, told in self.facts]
        return [fact for fact in facts if sum(fact[:2] == other[:2] for other in facts) == 1]

    def _question(self) -> None:
        """Tell a question after its first word, and its answer."""
        place, facts = len(self.words) - 1, self._questions()
        verb = self._word(_even([fact[0] for fact in facts]), "verb")
        self._link("subject", place)
        self._word({"the": 1.0}, "determiner")
        noun = self._word(_even([fact[1] for fact in facts if fact[0] == verb]), "object")
        self._link("determiner", place + 2)
        self.links.append(Link("object", place + 1, place + 3))
        (answer,) = (fact[2] for fact in facts if fact[:2] == (verb, noun))
        self._word({"?": 1.0}, "punctuation")
        self._word({"The": 1.0}, "determiner")
        self._word({answer: 1.0}, "subject")
        self._link("determiner", place + 5)
        self._link("answer", next(who.place for _, who, _ in self.facts if who.noun[who.number] == answer))
        self._word({".": 1.0}, "punctuation")
        self._word({END: 1.0}, "end")

    def _word(self, options: Options, role: str) -> str:
        word = self.choose(options)
        self.words.append(Word(word, role, options))
        return word

    def _name(self, role: str) -> None:
        """Set the role of the last word, where its options have several roles."""
        self.words[-1] = self.words[-1]._replace(role=role)

    def _link(self, kind: str, other: int) -> None:
        self.links.append(Link(kind, len(self.words) - 1, other))

    def _fact(self, verb: str, subject: _Entity, thing: _Entity) -> None:
        self.facts.append((next(pair for pair in TRANSITIVE if verb in pair), subject, thing))


def as_token(word: str, place: int) -> str:
    """Return the token of a word at a place of a story: with a space before it, except symbols and the first word."""
    return f" {word}" if place and word.isalpha() else word


def _even(words: Iterable[str]) -> Options:
    """Return equal probabilities; a word that is listed twice has twice the probability."""
    listed = list(words)
    return {word: listed.count(word) / len(listed) for word in listed}


def _mix(*parts: tuple[float, Options]) -> Options:
    """Return a mixture of options, which share no word. Parts without options are left out."""
    used = [(weight, options) for weight, options in parts if weight and options]
    total = sum(weight for weight, _ in used)
    return {word: weight / total * share for weight, options in used for word, share in options.items()}


def _capital(words: Iterable[str]) -> list[str]:
    return [word.capitalize() for word in words]


@functools.cache
def _forms(verbs: tuple[tuple[str, str], ...], number: int) -> tuple[str, ...]:
    return tuple(verb[number] for verb in verbs)


@functools.cache
def _verbs(kind: str, number: int) -> Options:
    """Return the options of a main verb. Things only fall, break or are."""
    transitive = _even(_forms(TRANSITIVE, number)) if kind in ANIMATE else {}
    return _mix((0.5, transitive), (0.3, {TO_BE[number]: 1.0}), (0.2, _even(_forms(INTRANSITIVE[kind], number))))

"""The English stories: their grammar, the links between their words, and the probabilities of the words."""

import collections
import hashlib
import itertools
import re

import numpy as np
import pytest

from mini_gpt.data import corpora, english, splits, token_store, tokenizers
from mini_gpt.data.english import grammar as lexicon
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY

STORIES = [english.write(seed) for seed in range(400)]
SINGULAR = {form for nouns in lexicon.NOUNS.values() for form, _ in nouns}
PLURAL = {form for nouns in lexicon.NOUNS.values() for _, form in nouns}
PERSONS = {"he": {"man", "boy", "king"}, "she": {"woman", "girl", "queen"}}
SAID_OF = {"polite": PERSONS["he"] | PERSONS["she"], "hungry": {"cat", "dog", "bird", "horse"}}
SAID_OF |= {"clever": SAID_OF["polite"], "wild": SAID_OF["hungry"], "empty": {"box", "ball", "book", "cup"}}
SAID_OF["heavy"] = SAID_OF["empty"]
STEM = {"men": "man", "women": "woman", "boxes": "box"}


def stem(noun):
    return STEM.get(noun, noun if noun in SINGULAR else noun.removesuffix("s"))


def linked(text):
    """Return {kind: [(word, other word)]} of a text."""
    story = english.read(text)
    found = collections.defaultdict(list)
    for link in story.links:
        found[link.kind].append((story.words[link.word].text, story.words[link.other].text))
    return dict(found)


def test_links_are_those_that_a_reader_finds():
    text = "The cats near two dogs see a box that the girl likes. It is heavy."
    assert linked(text) == {
        "determiner": [("cats", "The"), ("dogs", "two"), ("box", "a"), ("girl", "the")],
        "subject": [("see", "cats"), ("likes", "girl"), ("is", "It")],
        "object": [("see", "box"), ("likes", "box")],
        "antecedent": [("It", "box")],
    }


def test_a_question_is_linked_to_its_answer():
    found = linked("The king that sees two birds laughs. They hide. Who sees the birds? The king.")
    assert found["answer"] == [("king", "king")]
    assert found["object"] == [("sees", "birds"), ("sees", "birds")]
    assert found["subject"] == [("sees", "king"), ("laughs", "king"), ("hide", "They"), ("sees", "Who")]


def test_a_pronoun_stands_for_the_noun_behind_a_pronoun():
    found = linked("A queen sees some cups. She follows them. They fall.")
    assert found["antecedent"] == [("She", "queen"), ("them", "cups"), ("They", "cups")]


def test_reading_finds_the_links_and_options_of_writing():
    for story in STORIES:
        assert english.read(story.text)[:2] == (story.words[:-1], story.links)
        assert english.read(story.text).following == {"": 1.0} or story.words[-1].options.keys() > {""}


def test_verbs_agree_with_their_subjects():
    others = 0
    for story in STORIES:
        for link in story.links:
            subject, verb = story.words[link.other].text, story.words[link.word].text
            if link.kind == "subject" and subject.lower() not in ("he", "she", "it", "they", "who"):
                assert (subject in PLURAL) == (verb == "are" or not verb.endswith("s")), story.text
                between = {word.text for word in story.words[link.other + 1 : link.word]}
                others += bool(between & (SINGULAR if subject in PLURAL else PLURAL))
    assert others > 50, "agreement over a noun of the other number must occur"


def test_a_pronoun_has_one_antecedent_in_the_sentence_before():
    checked = 0
    for story in STORIES:
        sentences = [re.findall(r"\w+", sentence) for sentence in story.text.split(".")]
        for before, sentence in itertools.pairwise(sentences):
            if not sentence or sentence[0] not in ("He", "She", "It", "They"):
                continue
            if any(word.lower() in ("he", "him", "she", "her", "it", "they", "them") for word in before):
                continue  # its antecedents are further back
            nouns = [word for word in before if word in SINGULAR | PLURAL]
            fits = {
                "They": lambda noun: noun in PLURAL,
                "He": lambda noun: noun in PERSONS["he"],
                "She": lambda noun: noun in PERSONS["she"],
                "It": lambda noun: noun in SINGULAR - PERSONS["he"] - PERSONS["she"],
            }[sentence[0]]
            (antecedent,) = filter(fits, nouns)
            checked += 1
            if sentence[1] in ("is", "are"):
                assert stem(antecedent) in SAID_OF[sentence[2]], story.text
    assert checked > 100


def test_probabilities_sum_to_one_and_fit_the_frequencies():
    expected, seen = collections.Counter(), collections.Counter()
    for story in STORIES:
        for word in story.words:
            assert sum(word.options.values()) == pytest.approx(1) and word.text in word.options
            expected.update(word.options)
            seen[word.text] += 1
    for word, count in expected.items():
        assert abs(seen[word] - count) < 4.5 * np.sqrt(count) + 3, word


def test_the_probability_of_a_story_is_that_of_its_words():
    """Count a whole story, of the shortest kind, among many."""
    text = "Two cats hide. They eat."
    nats = sum(word.nats for word in english.read(text).words)
    by_hand = 1 / 4 * (0.75 / 14) * (0.45 * 0.2 / 2) * (0.7 * 1.0) * (0.2 / 2)
    assert np.exp(-nats) == pytest.approx(by_hand)


def test_a_wrong_word_is_refused_with_its_place():
    with pytest.raises(UserError, match=r"found 'see' after 'The cat near the dogs'; .* sees, likes"):
        english.read("The cat near the dogs see a box.")
    with pytest.raises(UserError, match=r"found 'He' after 'The queen laughs \.'; .* She"):
        english.read("The queen laughs. He sings.")
    assert english.read("The cats that see a").following.keys() > {"boy", "big"}


def test_stories_stay_the_same_and_their_splits_share_no_first_sentence():
    first = [english.write(seed).text for seed in range(50)]
    assert hashlib.sha256("\n".join(first).encode()).hexdigest()[:12] == "85b33e3e7b98", "increase english.VERSION"
    found = {split: list(itertools.islice(english.stories(split), 100)) for split in splits.SPLITS}
    openings = {split: {story.text.split(".")[0] for story in stories} for split, stories in found.items()}
    assert not openings["train"] & openings["validation"] and not openings["train"] & openings["test"]
    shares = collections.Counter(english.split_of(story) for story in STORIES)
    assert shares["train"] / len(STORIES) == pytest.approx(0.75, abs=0.1)


def test_the_tokens_of_the_corpus_are_its_words(small, monkeypatch):
    monkeypatch.setattr(english, "STORIES", 300)
    english._texts.cache_clear()
    data = small(data__corpus="english", data__tokenizer="words", data__path=None).data
    corpus = corpora.open_corpus(data)
    tokenizer = token_store.fit_tokenizer(corpus, data)
    store = token_store.open_store(corpus, data, tokenizer)
    for split in splits.SPLITS:
        expected = []
        for story in english.stories(split):
            assert [tokenizer.texts[token].decode() for token in tokenizer.encode(story.text)] == story.tokens[:-1]
            expected += [*tokenizer.encode(story.text), tokenizers.separator(tokenizer)]
        np.testing.assert_array_equal(store.tokens(split), expected[:-1])
    english._texts.cache_clear()


def test_stories_in_the_docs_follow_the_grammar():
    guide = (REPOSITORY / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> (.+)$", guide, re.MULTILINE) + re.findall(r'english\.read\("(.+)"\)', guide)
    quoted += re.findall(r'^"(The cats.+?)"', english.__doc__, re.MULTILINE)
    assert len(quoted) == 5
    for text in quoted:
        assert english.read(text).text == text

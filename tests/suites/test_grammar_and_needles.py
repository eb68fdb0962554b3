"""Suites of texts with known answers: grammar and needles."""

import itertools
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.data import english, tokenizers
from mini_gpt.evaluation import task_accuracy
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import grammar, needles
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.grammar import Grammar
from mini_gpt.suites.needles import Needles
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.random_models import random_model

# The measure of the grammar: a model that knows it, one that knows only words, and the kinds of words by hand.

STORIES = list(itertools.islice(english.stories("validation"), 40))
TOKENIZER = tokenizers.WordTokenizer.of_texts(english.write(seed).text for seed in range(800))
SEPARATOR = tokenizers.separator(TOKENIZER)


class FakeModel:
    """A model whose logits a function of (words before, options) determines."""

    def __init__(self, logits_of):
        self.logits_of, self.mesh = logits_of, sharding.make_mesh(1, 1, 1)
        self.config = SimpleNamespace(model=SimpleNamespace(check_length=lambda length: None))

    def rows_at_a_time(self, length, count):
        return 16

    def logits(self, tokens_BL):
        rows = [[token for token in row if token != SEPARATOR] for row in np.asarray(tokens_BL).tolist()]
        out_BLV = np.full((*tokens_BL.shape, SEPARATOR + 1), -50.0)
        for row, tokens in enumerate(rows):
            for place in range(len(tokens) + 1):
                options = english.read(TOKENIZER.decode(tokens[:place])).following
                for word, value in self.logits_of(options).items():
                    space = "" if word in "?." or not place else " "
                    token = int(TOKENIZER.encode(space + word)[0]) if word else SEPARATOR
                    out_BLV[row, place, token] = value
        return out_BLV


def measured(logits_of):
    return {row.pop("kind"): row for row in grammar.measure(FakeModel(logits_of), TOKENIZER, STORIES)}


def test_the_grammar_itself_makes_no_error_and_has_its_own_loss():
    rows = measured(lambda options: {word: np.log(share) for word, share in options.items()})
    assert rows["every word"]["words"] == sum(len(story.words) for story in STORIES)
    for kind, row in rows.items():
        assert row["accuracy"] == (None if kind == "every word" else 1)
        assert row["possible"] == pytest.approx(1) and row["nll"] == pytest.approx(row["grammar_nll"])
    assert rows["answer"]["grammar_nll"] == 0


def test_the_wrong_number_of_a_verb_is_counted_as_an_error():
    swapped = lambda options: {grammar.OTHER_NUMBER.get(word, word): np.log(share) for word, share in options.items()}
    rows = measured(swapped)
    assert rows["verb after its subject"]["accuracy"] == 0 and rows["pronoun"]["accuracy"] == 1
    assert rows["verb after a noun of the other number"] | {"words": 0, "nll": 0} == {
        "words": 0,
        "accuracy": 0,
        "possible": pytest.approx(0, abs=1e-9),
        "nll": 0,
        "grammar_nll": rows["verb after a noun of the other number"]["grammar_nll"],
    }


@pytest.mark.parametrize(
    "text, word, kind, wrong",
    [
        ("The cats hide.", 2, "verb after its subject", {"hides"}),
        ("The cats near the dogs hide.", 5, "verb after another noun of the same number", {"hides"}),
        ("The cats near the dog are wild.", 5, "verb after a noun of the other number", {"is"}),
        ("The cats that the dog sees are wild.", 5, "verb after its subject", {"see"}),
        ("The cats that the dog sees are wild.", 6, "verb after a noun of the other number", {"is"}),
        ("The king sees a box. It is empty.", 6, "pronoun", {"She", "They"}),
        ("The king sees a box. It is empty.", 8, "predicate of a pronoun", {"polite", "clever", "hungry", "wild"}),
        ("The king sees a box. He likes it.", 8, "pronoun", {"him", "her", "them"}),
    ],
)
def test_words_have_their_kinds_and_wrong_words(text, word, kind, wrong):
    assert grammar.wrong_words(english.read(text), word)[0] == kind
    assert set(grammar.wrong_words(english.read(text), word)[1]) == wrong


def test_the_suite_refuses_runs_on_other_text(small):
    with pytest.raises(UserError, match=r"data\.corpus: found 'text'; must be english for this suite"):
        Grammar().check(small(), SuiteOptions())
    masked = small(data__corpus="english", data__path=None, train__objective="masked", model__causal=False)
    with pytest.raises(UserError, match=r"grammar needs train\.objective=next_token, and this run has masked; use"):
        Grammar().check(masked, SuiteOptions())


@pytest.mark.slow
def test_the_suite_measures_a_run_on_the_stories(small, tmp_path, monkeypatch):
    monkeypatch.setattr(english, "STORIES", 800)
    english._texts.cache_clear()
    config = small(data__corpus="english", data__path=None, data__tokenizer="words", context_length=64)
    loop.train(config, tmp_path / "run", conclude=False)
    result = suites.evaluate(Run(tmp_path / "run"), "grammar", SuiteOptions())
    english._texts.cache_clear()
    rows = {row["kind"]: row for row in result["rows"]}
    assert list(rows) == list(grammar.KINDS) and all(row["words"] > 0 for row in rows.values())
    assert rows["every word"]["nll"] > 2 * rows["every word"]["grammar_nll"], "eight steps teach little"
    assert (tmp_path / "run" / "eval" / "grammar.csv").is_file()


# Needle tests: prompts, which a separate reader answers, and their scores.

BYTES = tokenizers.ByteTokenizer()
TEXT = BYTES.encode("The quick brown fox jumps over the lazy dog. " * 200)


def read(kind, text):
    """Answer a question from its text."""
    if kind in ("common", "frequent"):
        words = text.split(" What is the most")[0].split()
        (first, most), (_, second) = Counter(words).most_common(2)
        assert most > second, "one word is the most frequent"
        return f" {first}."
    if kind == "variables":
        values = dict(re.findall(r" VAR ([A-Z]{4}) = (?:VAR )?(\w+)\.", text))
        (name,) = re.findall(r"VAR ([A-Z]{4}) =$", text)
        while name in values:
            name = values[name]
        return f" {name}."
    (key,) = re.findall(r"The special magic number for ([a-z ]+) is:$", text)
    (number,) = re.findall(rf"for {key} is: (\d{{5}})\.", text)
    return f" {number}."


@pytest.mark.parametrize("kind", needles.KINDS)
@pytest.mark.parametrize("length", [512, 2000])
def test_prompts_have_the_length_and_one_right_answer(kind, length):
    texts = set()
    for index in range(20):
        prompt, answer = needles.prompt(kind, index, length, TEXT, BYTES)
        text = BYTES.decode(prompt)
        assert BYTES.decode(answer) == read(kind, text)
        total = len(prompt) + len(answer)
        assert total == length or (kind in needles.LISTS and length - 15 < total <= length)
        texts.add(text)
        again = needles.prompt(kind, index, length, TEXT, BYTES)
        np.testing.assert_array_equal(np.concatenate(again), np.concatenate([prompt, answer]))
    assert len(texts) == 20
    sentences = {"single": 1, "keys": 4}
    if kind in sentences:
        assert text.count("One of the special magic numbers") == sentences[kind]


def test_no_question_fits_a_length_that_is_too_short():
    for kind in needles.KINDS:
        with pytest.raises(
            needles.NoQuestion, match=r"^too short: (no list of words fits|a question .* has \d+ tokens)$"
        ):
            needles.prompt(kind, 0, 60, TEXT, BYTES)


def test_only_the_answers_have_weight():
    prompts = [needles.prompt("keys", index, 600, TEXT, BYTES) for index in range(3)]
    batch = task_accuracy.prompt_batch(prompts, 640, 256, [2, 0])
    assert batch["inputs"].shape == (2, 639)
    for row, index in enumerate([2, 0]):
        scored = batch["targets"][row][batch["weights"][row] > 0]
        assert BYTES.decode(scored) == BYTES.decode(prompts[index].answer)


def test_the_suite_reports_each_kind_and_length(small, monkeypatch):
    monkeypatch.setattr(needles, "PROBLEMS", 3)
    config = small(model__position="learned", model__max_positions=1000, context_length=600)
    model = random_model(config, BYTES.token_bytes)
    rows = needles.measure(model, BYTES, TEXT, (60, 600, 1100))
    assert [(row["kind"], row["length"]) for row in rows] == [(k, n) for k in needles.KINDS for n in (60, 600, 1100)]
    assert all(row["reason"].startswith("too short") for row in rows if row["length"] == 60)
    for row in rows:
        assert row["status"] == ("ok" if row["length"] == 600 else "undefined")
        assert (row["problems"], row["exact_match"]) == ((3, 0) if row["length"] == 600 else (0, None))
    suite = Needles()
    assert suite.compared(config, SuiteOptions()) == [(k, n) for k in needles.KINDS for n in (128, 256, 512, 1024)]
    assert {suite.label(row) for row in rows} == set(needles.KINDS)

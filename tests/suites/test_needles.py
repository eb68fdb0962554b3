"""Needle tests: prompts, which a separate reader answers, and their scores."""

import re
from collections import Counter

import numpy as np
import pytest

from mini_gpt.data import tokenizers
from mini_gpt.evaluation import task_accuracy
from mini_gpt.suites import needles
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.needles import Needles
from tests.random_models import random_model

TOKENIZER = tokenizers.ByteTokenizer()
TEXT = TOKENIZER.encode("The quick brown fox jumps over the lazy dog. " * 200)


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
        prompt, answer = needles.prompt(kind, index, length, TEXT, TOKENIZER)
        text = TOKENIZER.decode(prompt)
        assert TOKENIZER.decode(answer) == read(kind, text)
        total = len(prompt) + len(answer)
        assert total == length or (kind in needles.LISTS and length - 15 < total <= length)
        texts.add(text)
        again = needles.prompt(kind, index, length, TEXT, TOKENIZER)
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
            needles.prompt(kind, 0, 60, TEXT, TOKENIZER)


def test_only_the_answers_have_weight():
    prompts = [needles.prompt("keys", index, 600, TEXT, TOKENIZER) for index in range(3)]
    batch = task_accuracy.prompt_batch(prompts, 640, 256, [2, 0])
    assert batch["inputs"].shape == (2, 639)
    for row, index in enumerate([2, 0]):
        scored = batch["targets"][row][batch["weights"][row] > 0]
        assert TOKENIZER.decode(scored) == TOKENIZER.decode(prompts[index].answer)


def test_the_suite_reports_each_kind_and_length(small, monkeypatch):
    monkeypatch.setattr(needles, "PROBLEMS", 3)
    config = small(model__position="learned", model__max_positions=1000, context_length=600)
    model = random_model(config, TOKENIZER.token_bytes)
    rows = needles.measure(model, TOKENIZER, TEXT, (60, 600, 1100))
    assert [(row["kind"], row["length"]) for row in rows] == [(k, n) for k in needles.KINDS for n in (60, 600, 1100)]
    assert all(row["reason"].startswith("too short") for row in rows if row["length"] == 60)
    for row in rows:
        assert row["status"] == ("ok" if row["length"] == 600 else "undefined")
        assert (row["problems"], row["exact_match"]) == ((3, 0) if row["length"] == 600 else (0, None))
    suite = Needles()
    assert suite.compared(config, SuiteOptions()) == [(k, n) for k in needles.KINDS for n in (128, 256, 512, 1024)]
    assert {suite.label(row) for row in rows} == set(needles.KINDS)

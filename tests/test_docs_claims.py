"""Sentences of the docs agree with the intervals that they cite."""

import re

import pytest

from tests.conftest import REPOSITORY
from tests.test_docs import PAGES_AND_README, prose, relative

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
INTERVAL = re.compile(rf"\(([+−-]?{NUMBER}) to ([+−-]?{NUMBER})\)")
BOUND = re.compile(rf"\b(more|less) than ({NUMBER})(?!\w)")
SIZE = re.compile(rf"\b(?:better|worse|lower|higher|above|below|rises|raises|falls|lowers)\b[^.]{{0,20}} by ({NUMBER})")
SMALLEST = re.compile(r"\bless than the smallest effect\b")
UNDECIDED = re.compile(r"\(undecided, [+−]")  # as docs/figures/study_tables.py writes it
DECIDED = re.compile(r"\b(?:better|worse|lower|higher|more|less) than |\b(?:raises|lowers) the\b")
COMPARED = re.compile(rf"\bby (?:more|less) than {NUMBER}|\b(?:more|less) than {NUMBER} (?:below|above|lower|higher)\b")


def number(text):
    return float(text.replace("−", "-").replace(",", ""))


def sentences(text):
    """Return the sentences outside tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = ["" if re.match(r"\s*[|#]", line) else line for line in text.splitlines()]
    blocks = re.split(r"\n\s*\n|\n(?=\s*- )", "\n".join(lines))
    return [one for block in blocks for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", " ".join(block.split())) if one]


def wrong_words(sentence):
    """Return the words of a sentence that the intervals in it do not support: each must hold for each interval."""
    intervals = [(number(low), number(high)) for low, high in INTERVAL.findall(sentence)]
    wrong = []
    for low, high in intervals:
        largest, smallest = max(abs(low), abs(high)), 0.0 if low <= 0 <= high else min(abs(low), abs(high))
        for found in BOUND.finditer(sentence):
            limit = number(found[2])
            wrong += [found[0]] if (smallest <= limit if found[1] == "more" else largest >= limit) else []
        wrong += [found[0] for found in SIZE.finditer(sentence) if not smallest <= number(found[1]) <= largest]
    if intervals and SMALLEST.search(sentence) and "equivalent" not in sentence:
        wrong.append("less than the smallest effect")
    if UNDECIDED.search(sentence) and "claim" not in sentence:
        wrong += DECIDED.findall(sentence)
    return wrong


@pytest.mark.parametrize(
    "sentence, wrong",
    [
        ("A (shown, −0.026 (−0.037 to −0.016)) is more than 0.02 below B.", ["more than 0.02"]),
        ("A is more than 0.02 below B: −0.038 (−0.053 to −0.023).", []),
        ("A and B, −0.03 (−0.05 to −0.03) and +0.03 (+0.01 to +0.05), differ by more than 0.02.", ["more than 0.02"]),
        ("A differs by less than 0.02, +0.010 (+0.005 to +0.016).", []),
        ("A differs by less than 0.02, −0.010 (−0.022 to −0.002).", ["less than 0.02"]),
        ("A differs by more than 0.001, +0.008 (−0.002 to +0.017).", ["more than 0.001"]),
        ("A is better by 0.03, −0.030 (−0.05 to −0.02).", []),
        ("A is better than B by 0.3, −0.030 (−0.05 to −0.02).", ["better than B by 0.3"]),
        ("A is less than the smallest effect off, −0.01 (−0.02 to −0.01).", ["less than the smallest effect"]),
        ("A is less than the smallest effect from B (equivalent, −0.001 (−0.008 to +0.006)).", []),
        ("A is better than B (undecided, −0.084 (−0.162 to −0.007)).", ["better than "]),
        ("A against B is undecided (undecided, −0.084 (−0.162 to −0.007)).", []),
        ("A takes less than 0.7 of the time, 0.62 (0.61 to 0.63).", []),
        ("A has more than 2,000 tokens.", []),
    ],
)  # fmt: skip
def test_a_word_that_the_interval_does_not_support_is_found(sentence, wrong):
    assert wrong_words(sentence) == wrong


@pytest.mark.parametrize("page", PAGES_AND_README, ids=relative)
def test_words_agree_with_the_intervals_beside_them(page):
    found = {sentence: wrong for sentence in sentences(prose(page)) if (wrong := wrong_words(sentence))}
    assert not found


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("results/*.md")), ids=relative)
def test_a_bound_on_a_found_difference_cites_its_interval(page):
    for sentence in sentences(re.sub(r"^- \*\*Expected.*?(?=^- |^$)", "", prose(page), flags=re.DOTALL | re.MULTILINE)):
        if COMPARED.search(sentence) or SMALLEST.search(sentence):
            assert INTERVAL.search(sentence), sentence

"""The announced cost of an evaluation equals the tokens that it reports as processed."""

import contextlib

import numpy as np
import pytest

from mini_gpt.data import tasks, tokenizers
from mini_gpt.evaluation import extrapolation, perplexity
from mini_gpt.runtime import progress
from mini_gpt.suites import tasks as task_suite
from tests.random_models import random_model

TOKEN_BYTES = np.array([1] * 256 + [0])
TOKENS = np.random.default_rng(0).integers(256, size=300)


@pytest.fixture
def announced(monkeypatch):
    """Return a list of [cost, tokens processed] of each evaluation that shows progress."""
    found = []

    def shown(title, cost):
        found.append([cost, 0])
        return contextlib.nullcontext()

    def advance(tokens):
        found[-1][1] += tokens

    monkeypatch.setattr(progress, "shown", shown)
    monkeypatch.setattr(progress, "advance", advance)
    return found


@pytest.mark.parametrize(
    "fields, cost", [({}, 10 * 32), ({"train__objective": "masked", "model__causal": False}, 9 * 32)], ids=str
)
def test_padding_rows_of_a_split_are_not_counted(small, fields, cost, monkeypatch):
    model, seen = random_model(small(**fields), TOKEN_BYTES), []
    assert model.rows_at_a_time(32) == 8, "the second batch has padding"
    monkeypatch.setattr(progress, "advance", seen.append)
    perplexity.score_split(model, TOKENS, TOKEN_BYTES)
    assert sum(seen) == perplexity.cost(model.config, len(TOKENS)) == cost and len(seen) == 2


def test_padding_rows_of_windows_are_not_counted(small, announced, monkeypatch):
    monkeypatch.setattr(extrapolation, "SLIDING_TARGETS", 40)
    model = random_model(small(context_length=8, model__position="learned"), TOKEN_BYTES)
    windowings = extrapolation.plan(len(TOKENS), "validation", (4, 8, 16), (2,))
    extrapolation.extrapolation(model, TOKENS, TOKEN_BYTES, windowings)
    # Blocks of 299 targets; windows of 40 targets, the first with all of its targets; 16 exceeds the learned table.
    assert announced == [[75 * 4 + 20 * 4 + 38 * 8 + 20 * 8] * 2]


@pytest.mark.slow
def test_short_and_undefined_lengths_of_a_task_are_not_counted(small, announced):
    fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}
    tokenizer = tokenizers.CharacterTokenizer(tasks.ALPHABET)
    model = random_model(small(context_length=10, model__position="learned", **fields), tokenizer.token_bytes)
    rows = task_suite.by_length(model, tokenizer, "test", (2, 4, 9))
    assert [row["status"] for row in rows] == ["ok", "ok", "undefined"]
    assert rows[0]["problems"] < 26**2 / 4 and rows[1]["problems"] == 512
    assert announced == [[rows[0]["problems"] * 5 + 512 * 9] * 2]


def test_only_progress_that_is_shown_is_counted(monkeypatch, caplog):
    caplog.set_level("INFO", "mini_gpt")
    bars, bar = [], progress.bar
    monkeypatch.setattr(progress, "bar", lambda *given: bars.append(bar(*given)) or bars[0])
    progress.advance(7)
    with progress.shown("title", 50):
        for _ in range(6):
            progress.advance(10)
    progress.advance(7)
    assert bars[0].n == 50 and caplog.messages == ["title: 50 tokens go through the model"]

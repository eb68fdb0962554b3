"""The accuracy in tasks, and the progress that evaluations report."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation import extrapolation, perplexity, task_accuracy
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.model import loss as losses
from mini_gpt.runtime import progress
from mini_gpt.suites import base
from mini_gpt.suites import tasks as task_suite
from tests.conftest import slow
from tests.random_models import random_model

# Task accuracy, against greedy decoding and against answers with known errors.

TOKENIZER = tokenizers.CharacterTokenizer(tasks.ALPHABET)


@pytest.fixture
def config(small):
    def make(name="copy", length=6, **overrides):
        base = {"data__corpus": f"task:{name}", "data__tokenizer": "characters", "data__task_length": length}
        base |= {"model__num_layers": 2}
        return small(**(base | {"context_length": tasks.known()[name].size(length)} | overrides))

    return make


def model_of(config, **options):
    return random_model(config, TOKENIZER.token_bytes, **options)


def problems_of(config, count, length=5):
    corpus = config.data.corpus
    return [tasks.problem(corpus, "test", 0, index, shortest=length, longest=length) for index in range(count)]


@pytest.mark.parametrize("fields", [{"mesh__data": 4}, *slow({})], ids=str)
def test_exact_match_agrees_with_greedy_decoding(config, fields):
    """Two of three problems take the output of the random model as their answer, so that some are solved."""
    config = config("missing_duplicate", **fields)
    model = model_of(config, noise=0.3, seed=3)
    params = model.parameters
    end = int(TOKENIZER.encode(tasks.END)[0])
    params["embedding"] = params["embedding"].at[end].set(1.1 * params["embedding"][46])  # else the end is rare
    problems = problems_of(config, 21)
    length, written = config.context_length, []
    for question, _ in problems:
        prompt = TOKENIZER.encode(question + tasks.ANSWER)
        options = {"length": 2, "sampling": Sampling(temperature=0.0)}
        written.append(generation.generate(model, [prompt], **options)[0])
    given = [
        (question, TOKENIZER.decode(tokens[:1]) if row % 3 else answer)
        for row, ((question, answer), tokens) in enumerate(zip(problems, written, strict=True))
    ]
    score = task_accuracy.accuracy(model, TOKENIZER, given, length)
    first = [
        int(tokens[0]) == int(TOKENIZER.encode(answer)[0]) for (_, answer), tokens in zip(given, written, strict=True)
    ]
    assert sum(first) >= 14 and score.problems == score.tokens == 21 and score.right == sum(first)
    assert score.solved == sum(ok and int(tokens[1]) == end for ok, tokens in zip(first, written, strict=True))
    assert 0 < score.solved < 21
    assert [int(answer[0]) for answer in score.answers] == [int(tokens[0]) for tokens in written]


def test_known_errors_in_answers_are_counted(config, monkeypatch):
    config = config("reverse", train__batch_size=4)
    problems = problems_of(config, 10)
    wrong = {2: [0], 5: [0, 3], 9: [5]}  # {answer: its wrong tokens}; token 5 is the end

    def predict(model, batch):
        predicted = np.array(batch["targets"])
        for row, tokens in enumerate(predicted):
            text = TOKENIZER.decode([*np.asarray(batch["inputs"])[row, :1], *tokens])
            number = [question for question, _ in problems].index(text.split(tasks.ANSWER)[0])
            for fault in wrong.get(number, []):
                tokens[text.index(tasks.ANSWER) + fault] += 1
            tokens[: text.index(tasks.ANSWER)] = 0  # predictions within the question do not count
        half_BL = jnp.full(predicted.shape, 0.5)
        return predicted, half_BL, half_BL

    monkeypatch.setattr(task_accuracy, "_predict", predict)
    model = model_of(config)
    score = task_accuracy.accuracy(model, TOKENIZER, problems, config.context_length)
    assert (score.problems, score.solved, score.tokens, score.right) == (10, 7, 50, 47)
    assert score.nll_sum == pytest.approx(30)
    monkeypatch.setattr(task_suite, "PROBLEMS", 10)
    monkeypatch.setattr(task_suite.tasks, "different", lambda *args, **kwargs: problems)
    (row,) = task_suite.by_length(model, TOKENIZER, "test", (5,))
    assert (row["exact_match"], row["token_accuracy"], row["nll"]) == (0.7, pytest.approx(47 / 50), 0.5)
    assert (row["length"], row["problems"], row["answer_tokens"], row["status"]) == (5, 10, 50, "ok")


@pytest.mark.slow
def test_each_problem_draws_its_own_random_positions(config):
    config = config(model__position="rope", model__random_positions=40, train__batch_size=3)
    loaded = model_of(config, noise=0.3)
    problems = problems_of(config, 8)
    length = config.context_length
    score = task_accuracy.accuracy(loaded, TOKENIZER, problems, length)
    model, nll_sum = loaded.merge(), 0.0
    for number, problem in enumerate(problems):
        batch = task_batches.problem_batch([problem], config, TOKENIZER, length)
        key = jax.random.fold_in(jax.random.key(0), number)
        positions_BL, _ = PLAIN.positions_and_segments(config.model, jnp.array(batch["inputs"]), key[None])
        logits_BLV = model(jnp.array(batch["inputs"]), positions_BL)
        nll_sum += float((losses.nll(logits_BLV, jnp.array(batch["targets"])) * batch["weights"]).sum())
        np.testing.assert_array_equal(np.argmax(logits_BLV, -1)[batch["weights"] > 0], score.answers[number])
    assert score.nll_sum == pytest.approx(nll_sum, rel=1e-5)


def test_a_non_finite_loss_is_undefined(config):
    config = config()
    model = model_of(config)
    model.parameters["embedding"] *= np.nan
    (row,) = task_suite.by_length(model, TOKENIZER, "test", (4,))
    assert (row["status"], row["exact_match"], row["nll"]) == ("undefined", None, None)


@pytest.mark.slow
def test_masked_answers_are_scored_at_their_masks(config):
    masked = {"train__objective": "masked", "model__causal": False, "data__isolate_documents": True}
    config = config("reverse", **masked)
    model = model_of(config)
    problems = problems_of(config, 3)
    score = task_accuracy.accuracy(model, TOKENIZER, problems, config.context_length)
    assert score.tokens == 15
    # One row without padding. In longer rows, isolated documents hide the padding.
    batch = task_batches.problem_batch(problems[:1], config, TOKENIZER, 12)
    logits_BLV = model.merge()(jnp.array(batch["inputs"]))
    np.testing.assert_array_equal(np.argmax(logits_BLV, -1)[0, 6:], score.answers[0])
    nll_BL = losses.nll(logits_BLV, jnp.array(batch["targets"]))
    padded = task_accuracy.accuracy(model, TOKENIZER, problems[:1], 60)
    assert padded.nll_sum == pytest.approx(float(nll_BL[0, 6:].sum()), rel=1e-6)


def test_lengths_have_defaults_and_may_be_undefined(config):
    assert base.default_lengths("task:copy", 20) == (5, 10, 15, 20, 25, 30, 35, 40)
    assert base.default_lengths("task:associative_recall", 30) == (8, 15, 22, 30, 38, 45, 52)
    config = config(model__position="learned")
    rows = task_suite.by_length(model_of(config), TOKENIZER, "test", (4, 8))
    assert [row["status"] for row in rows] == ["ok", "undefined"]
    assert rows[1]["exact_match"] is None and "the learned table has 14 positions" in rows[1]["reason"]


# The announced cost of an evaluation equals the tokens that it reports as processed.

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

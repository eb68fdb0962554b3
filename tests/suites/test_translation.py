"""Scores of pairs: predictions, calibration, written targets, the alignment of heads, and the suite."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.data import task_batches, tasks, tokenizers
from mini_gpt.data.layout import Layout
from mini_gpt.data.pairs import Pair
from mini_gpt.evaluation import task_accuracy
from mini_gpt.generation import decoding
from mini_gpt.insight import alignment, observing
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import translation
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.random_models import random_model

PAIRS = {
    "model__encoder_layers": 1,
    "data__corpus": "task:reverse_words",
    "data__tokenizer": "characters",
    "data__task_length": 2,
    "context_length": 32,
    "source_length": 32,
}
TOKENIZER = tokenizers.CharacterTokenizer(tasks.known()["reverse_words"].alphabet)
SEPARATOR = tokenizers.separator(TOKENIZER)


@pytest.fixture
def model(small):
    """Return a function that makes a random model, whose texts start with a separator."""

    def make(**fields):
        made = random_model(small(**PAIRS | fields), TOKENIZER.token_bytes)
        return dataclasses.replace(made, layout=Layout(SEPARATOR))

    return make


def drawn(count, length=2):
    return tasks.different("task:reverse_words", "validation", count, shortest=length, longest=length)


def pairs_of(problems):
    return [task_batches.pair_of(TOKENIZER, problem) for problem in problems]


def log_probabilities(model, pair):
    """Return log_probabilities_LV of a pair alone, in a plain forward pass, in float64."""
    inputs_BL, source_BS = (jnp.array([[SEPARATOR, *side]]) for side in (pair.target, pair.source))
    logits_LV = np.asarray(model.merge()(inputs_BL, source_BS=source_BS)[0], np.float64)
    return logits_LV - np.log(np.exp(logits_LV).sum(axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", *slow("learned", "t5", "alibi")])
def test_predictions_in_shared_rows_are_those_of_each_pair_alone(model, position):
    made = model(model__position=position)
    pairs = [*pairs_of(drawn(3)), *pairs_of([("ab cd", ""), ("", "x y"), ("abcdef abcdefg abcdefg abcdefgh", "z")])]
    found = task_accuracy.predict_pairs(made, pairs, SEPARATOR)
    for pair, predicted, confidence, nll, right in zip(pairs, *found, strict=True):
        true_LV, answer = log_probabilities(made, pair), [*pair.target, SEPARATOR]
        np.testing.assert_array_equal(predicted, true_LV.argmax(axis=-1))
        np.testing.assert_array_equal(right, predicted == answer)
        np.testing.assert_allclose(confidence, np.exp(true_LV.max(axis=-1)), rtol=1e-4)
        np.testing.assert_allclose(nll, -true_LV[np.arange(len(answer)), answer], rtol=1e-4, atol=1e-5)


def test_longer_pairs_than_in_training_have_longer_rows(model):
    long = Pair(np.zeros(50, np.int32), np.zeros(3, np.int32))
    assert task_accuracy.row_lengths(model(), [long]) == (64, 32)
    made = model(model__position="learned", model__max_positions=55)
    assert task_accuracy.row_lengths(made, [long]) == (55, 32)
    with pytest.raises(UserError, match=r"^a length of 64 exceeds|model\.max_positions"):
        task_accuracy.predict_pairs(made, [Pair(np.zeros(60, np.int32), np.zeros(3, np.int32))], SEPARATOR)


def test_the_score_of_problems_counts_the_end_in_the_loss_but_not_in_the_tokens(model):
    made, problems = model(), drawn(5)
    score = task_accuracy.accuracy(made, TOKENIZER, problems, 32)
    assert score.problems == 5 and score.tokens == sum(len(answer) for _, answer in problems)
    predicted, _, nll, _ = task_accuracy.predict_pairs(made, pairs_of(problems), SEPARATOR)
    assert score.nll == pytest.approx(np.concatenate(nll).mean(), rel=1e-6)
    right = [tokens[:-1] == TOKENIZER.encode(answer) for tokens, (_, answer) in zip(predicted, problems, strict=True)]
    assert score.right == np.concatenate(right).sum()


def test_the_calibration_error_is_the_mean_gap_of_fifteen_intervals():
    confidence = np.array([0.01, 0.05, 0.95, 0.99, 1.0, 0.5])
    right = np.array([False, True, True, False, True, True])
    gaps = [2 / 6 * abs(1 / 2 - 0.03), 3 / 6 * abs(2 / 3 - (0.95 + 0.99 + 1) / 3), 1 / 6 * abs(1 - 0.5)]
    assert translation.calibration_error(confidence, right) == pytest.approx(sum(gaps))
    rng = np.random.default_rng(0)
    confidence = rng.random(200_000)
    assert translation.calibration_error(confidence, rng.random(200_000) < confidence) < 0.01
    assert translation.calibration_error(confidence, np.zeros(200_000, bool)) == pytest.approx(confidence.mean())


def test_written_targets_are_compared_with_the_references():
    references = ["the cat sat on the mat", "a dog"]
    scores = translation.written_scores(references, references)
    assert (scores["exact_match"], scores["chrf"], round(scores["bleu"], 9)) == (1, 100, 100)
    worse = translation.written_scores(["the cat sat on a mat", "a dog"], references)
    assert worse["exact_match"] == 0.5 and 50 < worse["chrf"] < 100 and 40 < worse["bleu"] < 100
    # Four orders of n-grams, with counts by hand: 7 of 8, 4 of 6, 2 of 4, 1 of 3; the brevity penalty is 1.
    assert worse["bleu"] == pytest.approx(100 * np.prod([7 / 8, 4 / 6, 2 / 4, 1 / 3]) ** 0.25)
    assert translation.written_scores(["ab cd"], ["ab cd"])["bleu"] is None, "two words"
    assert "|tok:13a|" in worse["bleu_signature"]


@pytest.mark.parametrize(
    ("written", "reference", "tokenizer"),
    [
        ("我们今天去学院", "我们今天去学校", "zh"),
        ("我们今天去学院", "GPT 我们今天去学校", "zh"),
        ("わたしは日本へ", "わたしは日本に", "char"),
        ("Это мой новый дом", "Это мой новый друг", "13a"),
        ("12 34", "12 34", "13a"),
    ],
)
def test_bleu_counts_characters_of_scripts_without_spaces(written, reference, tokenizer):
    scores = translation.written_scores([written], [reference])
    assert f"|tok:{tokenizer}|" in scores["bleu_signature"]
    if reference == "我们今天去学校":  # six of seven characters, and so on
        assert scores["bleu"] == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25)


def not_finite(model):
    return dataclasses.replace(model, parameters=jax.tree.map(lambda leaf: leaf * np.nan, model.parameters))


@pytest.mark.slow
def test_greedy_targets_are_those_of_full_forward_passes(model):
    made = model()
    sources = [pair.source for pair in pairs_of([*drawn(2), *drawn(1, 1)])]
    written = decoding.greedy_targets(made, sources, SEPARATOR, 7)
    for source, tokens in zip(sources, written, strict=True):
        expected: list[int] = []
        while len(expected) < 7:
            best = log_probabilities(made, Pair(source, np.array(expected, np.int32)))[-1].argmax()
            if best == SEPARATOR:
                break
            expected.append(int(best))
        assert tokens.tolist() == expected
    assert len({tuple(tokens) for tokens in written}) > 1


def test_a_target_ends_before_its_separator(model, monkeypatch):
    """Each source gives its own target, also if batches are sorted by length."""

    def stream(model, prompts, *, length, sampling, sources):
        rows = [[*source, SEPARATOR, 5, 5, 5][:4] for source in sources]
        yield np.array(rows)[:, :1]
        yield np.array(rows)[:, 1:]

    monkeypatch.setattr(decoding, "stream", stream)
    monkeypatch.setattr(decoding, "ROWS", 2)
    sources = [np.array(source, np.int32) for source in ([1, 2, 3], [], [4], [1, 2, 3, 4, 6])]
    written = decoding.greedy_targets(model(), sources, SEPARATOR, 4)
    assert [tokens.tolist() for tokens in written] == [[1, 2, 3], [], [4], [1, 2, 3, 4]]


def literal_rates(maps_NBHLS, problems, shift, *, first_only=False):
    """Return the error rate of each head, written as in Och and Ney: 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|), S = P."""
    rates = np.zeros((maps_NBHLS.shape[0], maps_NBHLS.shape[2]))
    for layer, head in np.ndindex(*rates.shape):
        found, true = set(), set()
        for number, problem in enumerate(problems):
            links = tasks.known()["reverse_words"].align(*problem)
            true |= {(number, *link) for link in links}
            for _, target in links:
                weights = {}
                for source, _ in links:
                    queries = range(target[0] + shift, (target[0] + 1 if first_only else target[1]) + shift)
                    keys = range(source[0] + 1, source[1] + 1)
                    weights[source] = np.mean(
                        [sum(maps_NBHLS[layer, number, head, query, key] for key in keys) for query in queries]
                    )
                found.add((number, max(weights, key=weights.get), target))
        rates[layer, head] = 1 - 2 * len(found & true) / (len(found) + len(true))
    return rates


def test_alignment_errors_equal_a_literal_count(model, monkeypatch):
    problems, made = drawn(6, 3), model(data__task_length=3)
    maps_NBHLS = np.random.default_rng(0).random((2, 6, 4, 40, 40)) ** 4
    monkeypatch.setattr(alignment, "_cross_attention", lambda model, *arrays: maps_NBHLS)
    heads = alignment.error_rates(made, TOKENIZER, problems)
    assert [(head.layer, head.head) for head in heads] == [(n, h) for n in range(2) for h in range(4)]
    for name, options in (("predicting", (0, False)), ("starting", (0, True)), ("reading", (1, False))):
        rates = lambda of, which, options=options: literal_rates(of, which, options[0], first_only=options[1]).ravel()
        expected = [rates(maps_NBHLS, problems)]
        expected += [rates(maps_NBHLS[:, half::2], problems[half::2]) for half in (0, 1)]
        np.testing.assert_allclose([head.rates[name] for head in heads], np.transpose(expected))
        assert len(set(expected[0])) > 2, "the heads differ"
        assert alignment.chosen_rate(heads, name) == pytest.approx(expected[2][int(np.argmin(expected[1]))])


@pytest.mark.slow
def test_the_maps_of_the_alignment_are_those_of_the_model(model):
    made = model()
    (question, answer), *_ = drawn(1)
    batch = task_batches.problem_batch([(question, answer)], made.config, TOKENIZER, 20)
    found = np.asarray(alignment._cross_attention(made, jnp.array(batch["inputs"]), jnp.array(batch["source"])))
    target_BL, source_BS = (jnp.array([[SEPARATOR, *TOKENIZER.encode(text)]]) for text in (answer, question))
    layers = observing.layers(made.merge(), (target_BL, None, None, source_BS))
    wanted_BHLS = layers[0].cross_attention.weights_BHLS
    size = wanted_BHLS.shape
    np.testing.assert_allclose(found[0, :, :, : size[2], : size[3]], wanted_BHLS, atol=1e-5)
    np.testing.assert_allclose(found[0, 0, :, : size[2], size[3] :], 0, atol=1e-9)


@pytest.mark.slow
def test_the_suite_measures_a_task_and_files_of_pairs(small, tmp_path):
    short = {"train__steps": 2, "eval__sample_tokens": 0, "eval__tokens": 64}
    loop.train(small(**PAIRS | short), tmp_path / "task", conclude=False)
    result = suites.evaluate(Run(tmp_path / "task"), "translation", SuiteOptions(lengths="1x,2x"))
    assert [row["status"] for row in result["rows"]] == ["ok", "ok"] and "|tok:13a|" in result["bleu_signature"]
    for row in result["rows"]:
        assert 0 <= row["exact_match"] <= 1 and 0 <= row["chrf"] <= 100 and row["nll"] > 0
        assert 0 <= row["alignment_error"] <= 1 and 0 <= row["calibration_error"] <= 1
    assert len(result["heads"]) == 2 * 2 * 2  # lengths × layers × heads
    written = json.loads((tmp_path / "task" / "eval" / "translation.json").read_text())
    assert written["heads"] == result["heads"]
    run = Run(tmp_path / "task")
    run.model = not_finite(run.model)
    result = suites.evaluate(run, "translation", SuiteOptions(lengths="1x"))
    (row,) = result["rows"]
    assert row["status"] == "undefined" and row["nll"] is None and result["bleu_signature"] is None
    (tmp_path / "pairs.tsv").write_text("".join(f"source {i}\ttarget {i}\n" for i in range(400)))
    files = {"data__corpus": "pairs", "data__tokenizer": "bytes", "data__path": str(tmp_path / "pairs.tsv")}
    loop.train(small(**PAIRS | short | files, model__position="learned"), tmp_path / "pairs", conclude=False)
    result = suites.evaluate(Run(tmp_path / "pairs"), "translation", SuiteOptions(split="test"))
    (row,) = result["rows"]
    assert row["status"] == "ok" and row["alignment_error"] is None and row["bleu"] is None and row["pairs"] > 5
    with pytest.raises(UserError, match=r"^--lengths is for tasks"):
        suites.SUITES["translation"].check(Run(tmp_path / "pairs").config, SuiteOptions(lengths="2x"))
    with pytest.raises(
        UserError, match=r"^--suite=translation needs a run that was trained on pairs; use --suite=extrapolation"
    ):
        suites.SUITES["translation"].check(small(), SuiteOptions())

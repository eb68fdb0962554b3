"""The head report of a model with an encoder, against sums over single pairs of tokens without padding."""

import csv
import json

import jax
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import attention, examples
from mini_gpt.insight.heads import cross, inputs, report, scores
from mini_gpt.insight.observing import AttentionMaps, Layer
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.insight.test_maps import PAIRS, exact_weights
from tests.random_models import random_model

TOKENIZER = CharacterTokenizer(tasks.ALPHABET)
PROBLEMS = [("ab a?", "xab"), ("cc", "c a"), ("b", "bb"), ("a.bc ab", "bcab")]
ALIGNMENTS = [[((0, 2), (1, 3))], [], [((0, 1), (0, 2))], [((2, 4), (0, 2)), ((0, 7), (2, 3))]]
PLACES = [[1.0], [0, 1 / 2, 1], [0, 1 / 3, 2 / 3, 1], [0, 1 / 4, 1 / 2, 3 / 4, 1]]


def made(small, **fields):
    config = small(**PAIRS | {"model__encoder_layers": 1, "train__batch_size": 3} | fields)
    texts = zip(PROBLEMS, ALIGNMENTS, strict=True)
    of = [examples.of_problem(problem, config, TOKENIZER, alignment) for problem, alignment in texts]
    return random_model(config, TOKENIZER.token_bytes, noise=0.3), of


def is_kind(kind, pair, place, key, shift):
    """Return whether a source token is of a kind for the token to write at a place."""
    source, last = "\0" + TOKENIZER.decode(pair.source), len(pair.source) - 1  # the first one is the separator
    written = TOKENIZER.decode(pair.written) + "\0"
    spans = [(s, t) for s, t in pair.alignment if t[0] <= place < t[1] and s[0] < key <= s[1]]
    return {
        "source separator": key == 0,
        "last source token": key == last,
        "source delimiter": source[key] in ".?",
        "diagonal": abs(key - 1 - shift * (last - 1)) <= 1,
        "token read": source[key] == written[place - 1] if place else key == 0,
        "token to write": source[key] == written[place],
        "aligned": bool(spans),
    }[kind]


@pytest.mark.slow
def test_cross_scores_equal_sums_over_single_pairs(small, monkeypatch):
    at_a_time = 3  # the last batch is filled with copies
    monkeypatch.setattr(report, "_rows_at_a_time", lambda *_: at_a_time)
    model, of = made(small)
    rows = report.pair_report(model, TOKENIZER, of, of)
    weights = [exact_weights(model, pair.inputs, pair.source)["cross"] for pair in of]
    sources = [len(pair.source) for pair in of]
    # The strongest pairs are from the longest sources of a batch.
    longest = [max(sources[row // at_a_time * at_a_time :][:at_a_time]) for row in range(len(of))]
    found = {(row["layer"], row["head"]): row for row in rows if row["attention"] == "cross"}
    assert sorted(found) == list(np.ndindex(2, 4))
    for (layer, head), row in found.items():
        entropies, slopes, strongest = [], [], 0.0
        sums = {kind: [0.0, 0.0, 0] for kind in row["kinds"] if row["kinds"][kind]["queries"]}
        assert list(sums) == list(cross.templates(of[:1], np.zeros((1, 9), int), np.zeros((1, 9), int), NONE))
        for pair, of_pair, most in zip(of, weights, longest, strict=True):
            weights_LS, (L, S) = of_pair[layer, head], of_pair.shape[2:]
            if S < 2:
                continue  # nothing to choose
            if most == S:
                strongest = max(strongest, weights_LS.max())
            entropies += [-sum(w * np.log(w) for w in weights_S) / np.log(S) for weights_S in weights_LS]
            at_L = np.arange(L) / (L - 1)
            slopes.append(np.polyfit(at_L, weights_LS @ (np.arange(S) / (S - 1)), 1)[0])
            for kind, place in np.ndindex(len(sums), L):
                name = list(sums)[kind]
                keys = [key for key in range(S) if is_kind(name, pair, place, key, at_L[place])]
                if 0 < len(keys) < S:
                    new = (sum(weights_LS[place, keys]), len(keys) / S, 1)
                    sums[name] = [a + b for a, b in zip(sums[name], new, strict=True)]
        assert row["entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)
        assert row["slope"] == pytest.approx(np.mean(slopes), abs=1e-5)
        assert row["pair"]["weight"] == pytest.approx(strongest, rel=1e-4) and scores.MANY > 7
        assert row["distance"] is row["offset"] is row["pair"]["distance"] is None
        for kind, (mass, uniform, queries) in sums.items():
            values = row["kinds"][kind]
            assert values["queries"] == queries > 0, kind
            assert values["score"] == pytest.approx(mass / queries, rel=1e-4)
            assert values["chance"] == pytest.approx(uniform / queries, rel=1e-5)
            assert values["strength"] == pytest.approx((mass - uniform) / (queries - uniform), abs=1e-4)


NONE = inputs.vocabulary(TOKENIZER, np.zeros(1, int))


def test_self_attention_of_both_stacks_is_measured_without_padding(small):
    model, of = made(small)
    rows = report.pair_report(model, TOKENIZER, of, of)
    weights = [exact_weights(model, pair.inputs, pair.source) for pair in of]
    assert [row["attention"] for row in rows] == ["encoder"] * 4 + ["decoder"] * 8 + ["cross"] * 8
    for row in rows[:12]:
        before, after, first, entropies, distances = [], [], [], [], []
        for of_pair in weights:
            weights_LS = of_pair[row["attention"]][row["layer"], row["head"]]
            length, causal = len(weights_LS), row["attention"] == "decoder"
            for i in range(1 if causal else 0, length):
                keys = i + 1 if causal else length
                if keys < 2:
                    continue
                weights_S = weights_LS[i, :keys]
                before += [weights_S[i - 1]] * (i > 0)
                after += [weights_S[i + 1]] if i + 1 < keys else []
                first.append(weights_S[0])
                entropies.append(-sum(weights_S * np.log(weights_S)) / np.log(keys))
                distances.append(sum(weights_S * abs(np.arange(keys) - i)))
        assert row["entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)
        assert row["distance"] == pytest.approx(np.mean(distances), rel=1e-4)
        for kind, found in {"previous token": before, "next token": after, "first token": first}.items():
            assert row["kinds"][kind]["queries"] == len(found)
            assert row["kinds"][kind]["score"] == (pytest.approx(np.mean(found), rel=1e-4) if found else None)
        assert row["kinds"]["induction"]["queries"] == row["kinds"]["diagonal"]["queries"] == 0
        assert row["slope"] is None


@pytest.mark.parametrize(("order", "slope"), [(1, 1.0), (-1, -1.0), (0, 0.0)])
def test_a_head_in_order_has_slope_one_and_its_label(order, slope):
    source = np.arange(8)
    of = [examples.Example(source, np.array([20, *source[:-1]]), source[::order] if order else source)] * 10
    weights_LS = np.eye(8)[::order] if order else np.full((8, 8), 1 / 8)
    maps = AttentionMaps(np.zeros((10, 1, 8, 8)), np.stack([[weights_LS]] * 10), np.ones((10, 8, 8), bool))
    inputs_BL, source_BS = (np.stack([pair[place] for pair in of]) for place in (1, 0))
    templates = cross.templates(of, inputs_BL, source_BS, NONE)
    stacked = np.stack(list(templates.values()), axis=1)
    sums, _ = jax.jit(scores.measure_cross)(Layer(maps, *[None] * 7), stacked, np.ones((10, 8), bool))
    sums = jax.tree.map(np.asarray, sums)
    assert sums.slope_H[0] / sums.rows == pytest.approx(slope, abs=1e-6)
    strength = {kind: values["strength"] for kind, values in scores.of_kinds(tuple(templates), sums, 0).items()}
    copies = pytest.approx(1.0 if order else 0.0, abs=1e-6)
    assert strength["token to write"] == copies
    assert (strength["diagonal"] == pytest.approx(1, abs=1e-6)) == (order == 1)


@pytest.mark.slow
def test_the_suite_has_a_row_for_each_head_and_takes_a_pair(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inputs, "TOKENS", 400)
    loop.train(small(**PAIRS, train__steps=1, eval__tokens=64), tmp_path, conclude=False)
    run = Run(tmp_path)
    result = suites.evaluate(run, "heads", SuiteOptions())
    assert "attention" in capsys.readouterr().out
    table = list(csv.DictReader((tmp_path / "eval" / "heads.csv").open()))
    order = [(kind, str(layer), str(head)) for kind in attention.KINDS for layer, head in np.ndindex(2, 4)]
    assert [(row["attention"], row["layer"], row["head"]) for row in table] == order
    assert json.loads((tmp_path / "eval" / "heads.json").read_text())["heads"] == result["heads"]
    places = [(kind, layer) for kind in attention.KINDS for layer in (0, 1)]
    assert [(row["attention"], row["layer"]) for row in result["by_depth"]] == places
    axes = suites.SUITES["heads"].figure(result).axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == [f"{kind} {layer}" for kind, layer in places]
    (row,) = suites.SUITES["heads"].compared_rows(result)
    first = [head["kinds"]["first token"]["score"] for head in result["heads"][:16]]
    assert row["first_token"] == pytest.approx(np.mean(first)) and row["status"] == "ok"
    own = suites.evaluate(run, "heads", SuiteOptions(text="abc=cba"))["heads"]
    assert {head["kinds"]["source separator"]["queries"] for head in own} == {0, 4}

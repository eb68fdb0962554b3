"""The report labels heads whose weights are set by hand, and finds the relations of Python source in tokens."""

import csv
import dataclasses
import json

import jax
import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.data import tokenizers
from mini_gpt.data.layout import PLAIN
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import observing
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.heads import inputs as head_inputs
from mini_gpt.insight.heads import report as head_report
from mini_gpt.insight.heads import templates as head_templates
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.random_models import random_model

V, L = 9, 16  # vocabulary: eight letters and the separator; context length
D = V + L + V + 1  # dimensions of a head: one-hot token, position, one-hot previous token; one unused


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(head_inputs, "TOKENS", 6144)


@pytest.fixture
def by_hand(small):
    """Return a model with an induction head.

    Head 3 of layer 0 copies the previous token into other dimensions. Head 1 of layer 1 attends to the positions after
    earlier copies of the query's token.
    """
    config = small(
        context_length=L,
        model__position="learned",
        model__max_positions=L,
        model__num_layers=2,
        model__d_model=5 * D,
        model__num_heads=5,
        model__norm="rmsnorm",
        model__use_bias=False,
        model__tie_embeddings=False,
    )
    model = random_model(config, CharacterTokenizer("abcdefgh").token_bytes)
    parameters = jax.tree.map(np.zeros_like, model.parameters)
    for block in parameters["blocks"].values():
        for norm in ("attention_norm", "mlp_norm"):
            block[norm] = jax.tree.map(np.ones_like, block[norm])
    token, place, before = slice(0, V), slice(V, V + L), slice(V + L, V + L + V)
    parameters["embedding"][:, token] = np.eye(V)
    parameters["positions"]["learned"]["embedding"][:, place] = np.eye(L)

    def head(layer, number, query, key, value, out):
        """Set the matrices of one head; each is (dimensions of the residual stream, matrix)."""
        attention = parameters["blocks"][layer]["attention"]
        width = slice(number * D, (number + 1) * D)
        for name, matrix in (("query", query), ("key", key), ("value", value)):
            attention[name]["kernel"][:, width][matrix[0], : matrix[1].shape[1]] = matrix[1]
        attention["out"]["kernel"][width][: out[1].shape[0], out[0]] = out[1]

    head(
        0,
        3,
        query=(place, 50 * np.eye(L, k=-1)),  # the query of position i matches the key of position i - 1
        key=(place, np.eye(L)),
        value=(token, np.eye(V)),
        out=(before, np.eye(V)),
    )
    head(1, 1, query=(token, 50 * np.eye(V)), key=(before, np.eye(V)), value=(token, np.eye(V)), out=(token, np.eye(V)))
    return dataclasses.replace(model, parameters=parameters)


@pytest.mark.slow
def test_a_handmade_induction_head_is_found(by_hand):
    tokenizer = CharacterTokenizer("abcdefgh")
    tokens = np.random.default_rng(0).integers(0, V - 1, 4000).astype(np.uint16)
    rows = head_report.head_report(by_hand, tokenizer, head_inputs.of_text(tokens, tokenizer, L), tokens)
    labels = {(row["layer"], row["head"]): row["label"] for row in rows}
    assert len(labels) == 10 and labels.pop((0, 3)) == "previous token" and labels.pop((1, 1)) == "induction"
    assert set(labels.values()) == {"global"}
    found = {(row["layer"], row["head"]): row["kinds"] for row in rows}
    assert found[0, 3]["previous token"]["strength"] == pytest.approx(1, abs=0.01)
    # In layer 0, position 0 attends to itself. So in layer 1, queries with its token also attend to it.
    _, period_B = head_templates.repeated_tokens(np.arange(V - 1), L, head_report.INDUCTION_ROWS, seed=0)
    queries = [(place, period) for period in period_B for place in range(period, L)]
    score = np.mean([1 if place % period else 1 - 1 / (place // period + 1) for place, period in queries])
    assert found[1, 1]["induction"]["score"] == pytest.approx(score, abs=0.01) and score > 0.9
    assert found[0, 3]["induction"]["strength"] == pytest.approx(0, abs=0.02)
    assert found[0, 0]["induction"]["strength"] == pytest.approx(0, abs=1e-4)
    assert found[1, 1]["induction"]["queries"] == len(queries)
    summary = head_report.by_depth(rows)
    assert [layer["labels"] for layer in summary] == [{"global": 4, "previous token": 1}, {"global": 4, "induction": 1}]
    assert summary[0]["strengths"]["previous token"] == pytest.approx(0.2, abs=0.01)


SOURCE = '''def größe(wert):
    """Says how large."""
    return (wert, [wert + größe(1)])
'''


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_relations_of_python_source_are_found_in_tokens(small, tmp_path, kind):
    for number in range(120):
        (tmp_path / f"{number:03}.py").write_text(SOURCE.replace("wert", "abcdefghij"[number % 10] * (1 + number % 4)))
    paths = {"data__path": str(tmp_path / "*.py"), "train__steps": 1}
    loop.train(small(data__tokenizer=kind, data__vocab_size=300, **paths), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    tokens, length = run.store.tokens("validation"), 128
    starts = head_inputs.window_starts(tokens, length)
    related, _ = head_inputs.parsed_relations(tokens, run.tokenizer, starts, length)
    for name, template_BLS in related(range(len(starts))).items():
        pairs = [
            (tokens[starts[row] :][query], tokens[starts[row] :][key]) for row, query, key in np.argwhere(template_BLS)
        ]
        assert pairs, name
        for query, key in pairs[:200]:
            query_text, key_text = run.tokenizer.decode([query]), run.tokenizer.decode([key])
            if name == "matching bracket":
                assert any(c in query_text for c in ")]") and any(c in key_text for c in "(["), (query_text, key_text)
            elif name == "definition of a call" and kind == "characters":
                assert query_text == "e" and key_text in "größe"


@pytest.mark.slow
def test_the_suite_writes_a_figure_a_table_and_all_results(small, tmp_path, capsys):
    workdir = tmp_path / "run"
    loop.train(small(model__num_layers=2, model__position="rope"), workdir, conclude=False)
    result = suites.evaluate(Run(workdir), "heads", SuiteOptions())
    assert result == files.read_with_checksum(workdir / "eval" / "heads.json", must=True)
    printed = capsys.readouterr().out
    assert printed.count("\n") >= 9 and "label" in printed
    rows = list(csv.DictReader((workdir / "eval" / "heads.csv").open()))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [(n, h) for n in range(2) for h in range(4)]
    assert (workdir / "eval" / "heads.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("length", "12345")
def test_the_shortest_contexts_have_no_induction_score(small, tmp_path, length):
    workdir = tmp_path / "run"
    loop.train(small(train__steps=1, model__position="rope"), workdir, conclude=False)
    run = Run(workdir, overrides={"context_length": length})
    for suite in ("heads", "diagnose"):
        result = suites.evaluate(run, suite, SuiteOptions())
    assert "finite" not in result["found"]
    heads = json.loads((workdir / "eval" / f"heads,context_length={length}.json").read_text())["heads"]
    assert {head["kinds"]["induction"]["queries"] for head in heads} == {0}


@pytest.mark.slow
def test_short_splits_and_non_finite_models_are_refused(small, tmp_path):
    workdir = tmp_path / "run"
    loop.train(small(train__steps=1, model__position="rope"), workdir, conclude=False)
    for suite in ("heads", "pruning", "diagnose"):
        with pytest.raises(UserError, match=r"--split=validation: found \d+ tokens; needs more than .* 999999"):
            suites.evaluate(Run(workdir, overrides={"context_length": "999999"}), suite, SuiteOptions())
    run = Run(workdir)
    run.model.parameters["embedding"] = run.model.parameters["embedding"].at[ord("t")].set(np.nan)
    unread = Run(workdir)
    embedding = unread.model.parameters["embedding"]
    unread.model.parameters["embedding"] = embedding.at[5].set(np.nan)  # a token that is in no text, but in the softmax
    for suite, broken in (("heads", run), ("pruning", run), ("pruning", unread)):
        with pytest.raises(UserError, match="the model of step 1 gives non-finite numbers; see --suite=diagnose"):
            suites.evaluate(broken, suite, SuiteOptions())
    assert not (workdir / "eval").exists()
    result = suites.evaluate(run, "diagnose", SuiteOptions())
    assert result["found"][0] == "finite"


TASK = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None, "data__task_length": 4}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["next_token", "masked"])
def test_the_padding_of_problems_does_not_count(small, tmp_path, objective):
    fields = {"train__objective": objective, "model__causal": objective == "next_token", "context_length": 12}
    fields |= {"data__isolate_documents": objective == "masked"}
    loop.train(small(train__steps=1, model__position="rope", **TASK, **fields), tmp_path, conclude=False)
    run = Run(tmp_path)
    found = suites.evaluate(run, "heads", SuiteOptions())["heads"][1]
    problems = [f"{question}={answer}\n" for question, answer in run.problems("validation", head_inputs.TOKENS // 12)]
    tokens_BL = np.full((len(problems), 12), tokenizers.separator(run.tokenizer), np.int32)
    for row, text in enumerate(problems):
        kept = text if objective == "next_token" else text.split("=")[0] + "="
        tokens_BL[row, : len(kept)] = run.tokenizer.encode(kept)
        if objective == "masked":
            tokens_BL[row, len(kept) : len(text)] = len(run.tokenizer.token_bytes)
    (maps,) = attention_maps(run.model, tokens_BL)
    weights_BLS = maps.weights_BHLS[:, 1]
    before, queries, distance, choosing = 0.0, 0, 0.0, 0
    for weights_LS, text in zip(weights_BLS, problems, strict=True):
        for query in range(1 if objective == "next_token" else 0, len(text)):
            distance += sum(abs(query - key) * weights_LS[query, key] for key in range(12))
            choosing += 1
            if query:
                before += weights_LS[query, query - 1]
                queries += 1
    assert len(problems) == len(weights_BLS) == 512
    assert found["kinds"]["previous token"]["queries"] == queries
    assert found["kinds"]["previous token"]["score"] == pytest.approx(before / queries, rel=1e-4)
    assert found["distance"] == pytest.approx(distance / choosing, rel=1e-4)
    assert "matching bracket" not in found["kinds"]


@pytest.mark.slow
def test_each_row_draws_its_own_random_positions(small):
    tokenizer = CharacterTokenizer("=abcd")
    config = small(context_length=12, model__position="rope", model__random_positions=60, train__batch_size=3)
    model = random_model(config, tokenizer.token_bytes, noise=0.3)
    tokens_BL = np.stack([tokenizer.encode(text) for text in ("abcdabcd=abc", "abcaabca=aaa") * 4]).astype(np.int32)
    inputs = head_inputs.of_problems(tokens_BL, tokenizer)
    found = head_report.head_report(model, tokenizer, inputs, tokens_BL.ravel())[0]
    module, before = model.merge(), []
    for number, tokens_L in enumerate(tokens_BL):
        key = jax.random.fold_in(jax.random.key(0), number)
        positions_BL, _ = PLAIN.positions_and_segments(config.model, tokens_L[None], key[None])
        maps = observing.layers(module, (tokens_L[None], positions_BL))[0].attention
        before += [maps.weights_BHLS[0, 0, query, query - 1] for query in range(1, 12)]
    assert found["kinds"]["previous token"]["score"] == pytest.approx(np.mean(before), rel=1e-5)


@pytest.mark.slow
def test_an_own_text_is_measured_in_equal_windows(small, tmp_path):
    loop.train(small(train__steps=1, model__position="rope"), tmp_path, conclude=False)
    run = Run(tmp_path)
    text = "the cat (sat) on the mat = 1\n" * 3  # 87 tokens, in 3 windows of at most 32
    result = suites.evaluate(run, "heads", SuiteOptions(text=text))
    tokens_BL = np.frombuffer(text.encode(), np.uint8).reshape(3, 29).astype(np.int32)
    weights_BHLS = attention_maps(run.model, tokens_BL)[0].weights_BHLS
    for head, row in enumerate(result["heads"]):
        before = np.diagonal(weights_BHLS[:, head], -1, 1, 2)
        assert row["kinds"]["previous token"]["score"] == pytest.approx(before.mean(), rel=1e-4)
        assert row["kinds"]["previous token"]["queries"] == before.size == 84
        assert row["kinds"]["induction"]["queries"] > 0
    assert result["request"] == {"text": text}
    one = suites.evaluate(run, "heads", SuiteOptions(text="a"))["heads"]
    assert {(head["label"], head["offset"]) for head in one} == {("mixed", None)}


def test_a_study_compares_the_means_of_all_heads():
    kinds = lambda score: {"first token": {"score": score}}
    heads = [{"kinds": kinds(0.25), "entropy": 0.5}, {"kinds": kinds(0.75), "entropy": 0.9}]
    (row,) = suites.SUITES["heads"].compared_rows({"context_length": 64, "heads": heads})
    assert row == {"length": 64, "status": "ok", "reason": None, "first_token": 0.5, "entropy": 0.7}
    (row,) = suites.SUITES["heads"].compared_rows(
        {"context_length": 1, "heads": [{"kinds": kinds(None), "entropy": 0.0}]}
    )
    assert (row["status"], row["first_token"]) == ("undefined", None)

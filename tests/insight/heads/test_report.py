"""A report finds the heads of a model whose weights are set by hand, and the truth of Python in tokens."""

import csv
import json

import jax
import numpy as np
import pytest
from flax import nnx

from mini_gpt.commands import suites
from mini_gpt.commands.suite_options import Request
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight.attention import attention_maps
from mini_gpt.insight.heads import python_source
from mini_gpt.insight.heads import report as head_report
from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.model import MiniGPT
from mini_gpt.model import parameters as model_parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in

V, L = 9, 16  # eight letters and the separator; a one-hot for each place
D = V + L + V + 1  # what stands in the residual stream: the token, its place, the token before; and one to divide by 5


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(head_report, "TOKENS", 6144)


@pytest.fixture
def by_hand(small):
    """Gives config and parameters of a model of two layers and five heads: in the first layer head 3 looks at the token
    before and writes it beside, in the second head 1 looks for the place whose token before is the query's token."""
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
    definition, drawn = model_parameters.split(MiniGPT(config.model, V, rngs=nnx.Rngs(0)))
    parameters = jax.tree.map(np.zeros_like, drawn)
    for block in parameters["blocks"].values():
        for norm in ("attention_norm", "mlp_norm"):
            block[norm] = jax.tree.map(np.ones_like, block[norm])
    token, place, before = slice(0, V), slice(V, V + L), slice(V + L, V + L + V)
    parameters["embedding"][:, token] = np.eye(V)
    parameters["positions"]["learned"]["embedding"][:, place] = np.eye(L)

    def head(layer, number, query, key, value, out):
        """Sets one head's matrices, given as {(from, to): matrix} over the widths of stream and head."""
        attention = parameters["blocks"][layer]["attention"]
        width = slice(number * D, (number + 1) * D)
        for name, matrix in (("query", query), ("key", key), ("value", value)):
            attention[name]["kernel"][:, width][matrix[0], : matrix[1].shape[1]] = matrix[1]
        attention["out"]["kernel"][width][: out[1].shape[0], out[0]] = out[1]

    head(
        0,
        3,
        query=(place, 50 * np.eye(L, k=-1)),  # place i asks for what place i - 1 answers
        key=(place, np.eye(L)),
        value=(token, np.eye(V)),
        out=(before, np.eye(V)),
    )
    head(1, 1, query=(token, 50 * np.eye(V)), key=(before, np.eye(V)), value=(token, np.eye(V)), out=(token, np.eye(V)))
    return config, definition, parameters


def test_A9_the_heads_of_a_model_made_by_hand_to_do_induction_are_found(by_hand):
    config, definition, parameters = by_hand
    tokenizer = CharacterTokenizer("abcdefgh")
    tokens = np.random.default_rng(0).integers(0, V - 1, 4000).astype(np.uint16)
    mesh = sharding.make_reading_mesh(config.mesh.fsdp, config.mesh.tensor)
    texts = head_report.rows_of_text(tokens, tokenizer, L)
    rows = head_report.head_report(definition, parameters, config, tokenizer, mesh, texts, tokens)
    labels = {(row["layer"], row["head"]): row["label"] for row in rows}
    assert len(labels) == 10 and labels.pop((0, 3)) == "previous token" and labels.pop((1, 1)) == "induction"
    assert set(labels.values()) == {"global"}
    found = {(row["layer"], row["head"]): row["kinds"] for row in rows}
    assert found[0, 3]["previous token"]["strength"] == pytest.approx(1, abs=0.01)
    # But for the first place, which has none before it, takes itself for it, and has its share where its token returns.
    _, period_B = head_scores.repeated_tokens(np.arange(V - 1), L, head_report.INDUCTION_ROWS, seed=0)
    queries = [(place, period) for period in period_B for place in range(period, L)]
    score = np.mean([1 if place % period else 1 - 1 / (place // period + 1) for place, period in queries])
    assert found[1, 1]["induction"]["score"] == pytest.approx(score, abs=0.01) and score > 0.9
    assert found[0, 3]["induction"]["strength"] < 0 and found[0, 0]["induction"]["strength"] == pytest.approx(
        0, abs=1e-4
    )
    assert found[1, 1]["induction"]["queries"] == len(queries)
    summary = head_report.by_depth(rows)
    assert [layer["labels"] for layer in summary] == [{"global": 4, "previous token": 1}, {"global": 4, "induction": 1}]
    assert summary[0]["strengths"]["previous token"] == pytest.approx(0.2, abs=0.01)


SOURCE = '''def größe(wert):
    """Says how large."""
    return (wert, [wert + größe(1)])
'''


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
def test_A9_what_belongs_together_in_python_is_found_in_tokens(small, tmp_path, kind):
    for number in range(120):
        (tmp_path / f"{number:03}.py").write_text(SOURCE.replace("wert", "abcdefghij"[number % 10] * (1 + number % 4)))
    paths = {"data__path": str(tmp_path / "*.py"), "data__cache_dir": str(tmp_path / "cache"), "train__steps": 1}
    loop.train(small(data__tokenizer=kind, data__vocab_size=300, **paths), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    tokens, length = run.store.split("validation").tokens, 128
    starts = head_report.windows(tokens, length)
    related = head_report._relations(tokens, run.tokenizer, starts, length)
    for name in python_source.KINDS:
        template_BLS = related(name, starts)
        pairs = [
            (tokens[starts[row] :][query], tokens[starts[row] :][key]) for row, query, key in np.argwhere(template_BLS)
        ]
        assert pairs, name
        for query, key in pairs[:200]:
            asks, meant = run.tokenizer.decode([query]), run.tokenizer.decode([key])
            if name == "matching bracket":
                assert any(c in asks for c in ")]") and any(c in meant for c in "(["), (asks, meant)
            elif name == "definition of a call" and kind == "characters":
                assert asks == "e" and meant in "größe"


def test_the_suite_writes_a_grid_a_table_and_the_whole(small, tmp_path, capsys):
    workdir = tmp_path / "run"
    loop.train(small(model__num_layers=2, model__position="rope"), workdir, conclude=False)
    result = suites.evaluate(Run(workdir), "heads", Request())
    assert result == json.loads((workdir / "eval" / "heads.json").read_text())
    printed = capsys.readouterr().out
    assert printed.count("\n") >= 9 and "label" in printed
    rows = list(csv.DictReader((workdir / "eval" / "heads.csv").open()))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [(n, h) for n in range(2) for h in range(4)]
    assert (workdir / "eval" / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert list((workdir / "tensorboard" / "heads").glob("events*"))
    # The pair is what the model's own maps hold there.
    run = Run(workdir)
    tokens = run.store.split("validation").tokens
    starts = head_report.windows(tokens, 32)
    tokens_BL = np.stack([tokens[start : start + 32] for start in starts]).astype(np.int32)
    tokens_BL = tokens_BL[: len(tokens_BL) // 8 * 8]
    maps = attention_maps(run.model, tokens_BL)
    for layer in range(2):
        weights_BHLS = maps[layer].weights_BHLS
        np.testing.assert_allclose(weights_BHLS.sum(-1), 1, rtol=1e-5)
        for head in range(4):
            away = np.where(~np.eye(32, dtype=bool) & (np.arange(32) >= 15)[:, None], weights_BHLS[:, head], 0)
            assert result["heads"][4 * layer + head]["pair"]["weight"] == pytest.approx(away.max(), rel=1e-4)


def test_relations_of_every_document_in_a_window_count(by_hand):
    tokenizer = CharacterTokenizer("\n()a")
    document = tokenizer.encode("(a)\n")
    tokens = np.concatenate([[*document, tokenizers.separator(tokenizer)]] * 4)
    related = head_report._relations(tokens, tokenizer, np.array([0]), len(tokens))
    assert np.argwhere(related("matching bracket", np.array([0]))).tolist() == [[0, 5 * n + 2, 5 * n] for n in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("length", "123")
def test_the_shortest_contexts_are_reported_without_induction(small, tmp_path, length):
    workdir = tmp_path / "run"
    loop.train(small(train__steps=1, model__position="rope"), workdir, conclude=False)
    run = Run(workdir, overrides={"context_length": length})
    for suite in ("heads", "diagnose"):
        result = suites.evaluate(run, suite, Request())
    assert "finite" not in result["found"]
    heads = json.loads((workdir / "eval" / f"heads,context_length={length}.json").read_text())["heads"]
    assert {head["kinds"]["induction"]["queries"] for head in heads} == {0}


@pytest.mark.slow
def test_what_can_not_be_reported_ends_in_one_line(small, tmp_path):
    workdir = tmp_path / "run"
    loop.train(small(train__steps=1, model__position="rope"), workdir, conclude=False)
    for suite in ("heads", "pruning", "diagnose"):
        with pytest.raises(UserError, match=r"--split: validation has \d+ tokens; more than the context of 999999 are"):
            suites.evaluate(Run(workdir, overrides={"context_length": "999999"}), suite, Request())
    run = Run(workdir)
    run.parameters["embedding"] = run.parameters["embedding"].at[ord("t")].set(np.nan)
    unread = Run(workdir)
    unread.parameters["embedding"] = unread.parameters["embedding"].at[5].set(np.nan)  # in no text, but in the softmax
    for suite, broken in (("heads", run), ("pruning", run), ("pruning", unread)):
        with pytest.raises(UserError, match="the model of step 1 gives no finite numbers; see --suite=diagnose"):
            suites.evaluate(broken, suite, Request())
    assert not (workdir / "eval").exists()
    assert suites.evaluate(run, "diagnose", Request())["most_likely"] == "a step with bad numbers was taken"


TASK = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None, "data__task_length": 4}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["next_token", "masked"])
def test_what_heads_do_with_a_tasks_problems_is_told_without_what_fills_them_up(small, tmp_path, objective):
    fields = {"train__objective": objective, "model__causal": objective == "next_token", "context_length": 12}
    fields |= {"data__isolate_documents": objective == "masked"}
    loop.train(small(train__steps=1, model__position="rope", **TASK, **fields), tmp_path, conclude=False)
    run = Run(tmp_path)
    found = suites.evaluate(run, "heads", Request())["heads"][1]
    problems = [f"{question}={answer}\n" for question, answer in run.problems("validation", head_report.TOKENS // 12)]
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


def test_a_context_without_room_for_a_problem_is_refused(small, tmp_path, monkeypatch):
    loop.train(small(train__steps=1, context_length=12, **TASK), tmp_path, conclude=False)
    for suite in ("heads", "pruning", "figures", "explorer"):
        arguments = [f"--workdir={tmp_path}", f"--suite={suite}", "--override", "context_length=5"]
        line = type_in(monkeypatch, "eval.py", *arguments)
        assert line == "error: context_length: found 5; task:copy with data.task_length=4 needs at least 9"


def test_a_sweep_has_no_table_for_heads(monkeypatch):
    arguments = ["--config=configs/tiny.py", "--vary", "model.num_heads=2,4", "--suite=heads"]
    line = type_in(monkeypatch, "mini_gpt.sweep", *arguments)
    assert line.startswith("error: --suite: found heads, which a sweep has no table for; must be of perplexity, extra")

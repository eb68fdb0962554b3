"""Ids of tokens, and the first token of a text."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.data import corpora, splits, token_store
from mini_gpt.data.subwords import BpeTokenizer, ImportedTokenizer
from mini_gpt.data.text_batches import TextBatches, corrupted_blocks, vocab_of
from mini_gpt.evaluation import extrapolation, perplexity
from mini_gpt.hugging_face import exporting, importing
from mini_gpt.insight import samples
from mini_gpt.insight.heads import inputs
from mini_gpt.suites import base, needles
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.inputs import layout_of
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.hugging_face.bpe_tokenizers import foreign
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.hugging_face.models import BERT, logits
from tests.random_models import random_model

# An imported model has its own token ids: with other ids of special tokens, all results are the same.

PLACE = 70  # new id of the special token that is moved
WEIGHTS = "model.safetensors"
# Objective: (the token that is moved, fields of the run, suites). The others measure no text with its ids.
CASES = {
    "next_token": ("<|endoftext|>", {"position": "learned"}, "perplexity,heads,diagnose,lens,extrapolation,pruning"),
    "masked": ("<mask>", BERT, "perplexity,heads,diagnose,pruning"),
}
SAME = {"rtol": 1e-3, "atol": 1e-4}


def moved(source, directory, name):
    """Copy exported files, and give a special token the id PLACE. Return the old id of each new one."""
    directory.mkdir()
    described = {path.name: json.loads(path.read_text()) for path in source.glob("*.json")}
    tensors, tokenizer = load_file(source / WEIGHTS), described["tokenizer.json"]
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    rows = described["config.json"]["vocab_size"]
    order = np.insert(np.delete(np.arange(rows), added[name]), PLACE, added[name])
    new_of = np.argsort(order).tolist()
    vocabulary = tokenizer["model"]["vocab"] | added
    tokenizer["model"]["vocab"] = {text: new_of[token] for text, token in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = new_of[token["id"]]
    for values in (described["config.json"], described.get("generation_config.json", {})):
        values |= {field: new_of[value] for field, value in values.items() if field.endswith("token_id")}
    for file, values in described.items():
        (directory / file).write_text(json.dumps(values))
    save_file({name: x[order] if len(x) == rows else x for name, x in tensors.items()}, directory / WEIGHTS)
    return order


def exported(objective, **model):
    """Return the fields of a run to export."""
    fields = {f"model__{field}": value for field, value in (CASES[objective][1] | model).items()}
    fields |= {"data__tokenizer": "bpe", "data__vocab_size": 280, "data__isolate_documents": True}
    return fields | {"train__objective": objective}


def given(corpus_files, tmp_path):
    """Return the fields of an imported run that its files lack."""
    fields = {field: value for field, value in SMALL.items() if field.startswith(("data.", "train.", "eval.", "mesh."))}
    fields |= {"data.path": corpus_files, "model.dtype": "float32"}
    return fields | {"data.isolate_documents": True, "train.steps": 3, "optimizer.warmup_steps": 1}


@pytest.fixture(params=CASES)
def runs(request, trained, corpus_files, tmp_path):
    """Return (objective, order, imported run, the run with a moved token, directory of its files)."""
    exporting.export(Run(trained(**exported(request.param))), tmp_path / "out")
    order = moved(tmp_path / "out", tmp_path / "moved", CASES[request.param][0])
    for at in ("out", "moved"):
        importing.import_run(tmp_path / at, tmp_path / f"{at}-run", "configs/default.py", given(corpus_files, tmp_path))
    return request.param, order, Run(tmp_path / "out-run"), Run(tmp_path / "moved-run"), tmp_path / "moved"


def assert_same(found, wanted, path=""):
    """Compare results, except for texts with numbers, packed numbers, and induction, which random ids measure."""
    if isinstance(wanted, dict):
        for name in wanted.keys() - {"says", "sha256", "limit", "induction", "label", "also", "labels", "items"}:
            assert_same(found[name], wanted[name], f"{path}/{name}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{path}/{place}")
    elif isinstance(wanted, float):
        np.testing.assert_allclose(found, wanted, **SAME, err_msg=path)
    else:
        assert found == wanted, path


@pytest.mark.slow
def test_results_do_not_depend_on_the_ids(runs, monkeypatch, tmp_path, capsys):
    objective, order, first, second, there = runs
    new_of, mask, text = np.argsort(order), PLACE if objective == "masked" else None, "the größer\n cat <mask>"
    assert second.tokenizer.encode(text).tolist() == new_of[first.tokenizer.encode(text)].tolist()
    assert second.tokenizer.mask_id == mask == second.model.layout.mask_id
    tokens = np.array([[PLACE, *second.tokenizer.encode(text), PLACE, 5]])
    logits_BLV = np.asarray(second.model.merge()(jnp.asarray(tokens)))
    np.testing.assert_allclose(logits_BLV, logits(there, tokens), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(second.model(tokens), np.asarray(first.model(order[tokens]))[..., order], **SAME)
    suites = CASES[objective][2]
    for run in (first, second):
        assert type_in(monkeypatch, "eval.py", f"--workdir={run.workdir}", f"--suite={suites}") is None
        assert type_in(monkeypatch, "eval.py", f"--workdir={run.workdir}", "--suite=explorer") is None
    for suite in suites.split(","):
        wanted, found = (json.loads((run.workdir / "eval" / f"{suite}.json").read_text()) for run in (first, second))
        assert_same(found, wanted, suite)
    capsys.readouterr()
    asked = ["--fill=the [MASK] on [MASK]"] if objective == "masked" else ["--prompt=the", "--temperature=0"]
    for run in (first, second):
        assert type_in(monkeypatch, "sample.py", f"--workdir={run.workdir}", "--json", *asked) is None
    wanted, found = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["text"] == wanted["text"]
    if objective == "masked":
        for ours, theirs in zip(found["masks"], wanted["masks"], strict=True):
            assert [one["token"] for one in ours] == [new_of[one["token"]] for one in theirs]
            np.testing.assert_allclose(*([one["probability"] for one in each] for each in (ours, theirs)), **SAME)


@pytest.mark.slow
def test_exports_have_the_ids_also_after_more_training(runs, monkeypatch, tmp_path):
    _, order, first, second, there = runs
    exporting.export(second, tmp_path / "back")
    for name, tensor in load_file(tmp_path / "back" / WEIGHTS).items():
        np.testing.assert_array_equal(tensor, load_file(there / WEIGHTS)[name], name)
    for at, run in (("first", first), ("second", second)):
        flags = [f"--config={run.workdir / 'config.json'}", f"--workdir={run.workdir}"]
        assert type_in(monkeypatch, "train.py", *flags) is None
        exporting.export(Run(run.workdir), tmp_path / at)
    wanted, found, before = (load_file(tmp_path / at / WEIGHTS) for at in ("first", "second", "back"))
    for name, tensor in found.items():
        rows = wanted[name][order] if len(tensor) == len(order) else wanted[name]
        np.testing.assert_allclose(tensor, rows, rtol=1e-3, atol=2e-4, err_msg=name)
    changed = [name for name in found if np.abs(found[name] - before[name]).max() > 1e-3]
    assert len(changed) > len(found) / 2, "training has changed the weights"
    for at in ("back", "second"):
        files = [json.loads((path / "config.json").read_text()) for path in (tmp_path / at, there)]
        assert files[0]["eos_token_id"] == files[1]["eos_token_id"]
        ids = [json.loads((path / "tokenizer.json").read_text())["model"]["vocab"] for path in (tmp_path / at, there)]
        assert ids[0] == ids[1]


@pytest.mark.slow
def test_a_causal_model_starts_with_the_weights_of_bert(trained, corpus_files, tmp_path):
    """With one layer, both predict the same at the last token, which sees all tokens in both."""
    exporting.export(Run(trained(**exported("masked", num_layers=1))), tmp_path / "out")
    importing.import_run(tmp_path / "out", tmp_path / "bert", "configs/default.py", given(corpus_files, tmp_path))
    changes = {"model.causal": True, "train.objective": "next_token", "train.steps": 1}
    changes |= {"optimizer.learning_rate": 1e-12, "optimizer.weight_decay": 0.0}
    config = loading.override(Run(tmp_path / "bert").config, changes)
    loop.train(config, tmp_path / "causal", init_from=tmp_path / "bert", conclude=False)
    bert, causal = (Run(tmp_path / name).model for name in ("bert", "causal"))
    tokens_BL = np.random.default_rng(0).integers(4, 256, (3, 9))
    for length in (1, 5, 9):
        last = [np.asarray(model(tokens_BL[:, :length]))[:, -1] for model in (causal, bert)]
        np.testing.assert_allclose(*last, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(causal(tokens_BL)[:, length - 1], last[0], rtol=1e-4, atol=1e-5)
    assert np.abs(bert(tokens_BL)[:, 4] - bert(tokens_BL[:, :5])[:, 4]).max() > 2e-4, "a token sees later ones"


# Rows of a model whose tokenizer adds a first token begin with it, and it is never a target.

FIRST, END = 1, 2
LIBRARY = foreign()
TOKENIZER = BpeTokenizer(LIBRARY, END, LIBRARY.get_vocab_size())
SCORE = needles.task_accuracy.TaskScore(1, 1, 1, 1, 0.0, [], {})


def streams(config, tokenizer=TOKENIZER):
    """Return {split: tokens} of the small corpus, and the documents of the training split as ids without the first."""
    corpus = corpora.open_corpus(config.data)
    store = token_store.open_store(corpus, config.data, tokenizer)
    pieces = splits.split_pieces(corpus, config.data)
    return store.tokens("train"), [tokenizer.encode(piece.text)[1:] for split, piece in pieces if split == "train"]


def loaded(config, tokenizer=TOKENIZER):
    model = random_model(config, tokenizer.token_bytes)
    return dataclasses.replace(model, layout=layout_of(config, tokenizer))


_logits = jax.jit(lambda model, tokens_BL: model.merge()(tokens_BL))


def reference(model, row, targets):
    """Return the losses of targets after a row of tokens, from the logits of the module."""
    padded = np.pad(row, (0, -len(row) % 32))  # one program for all lengths; the causal mask hides the padding
    logits_LV = np.asarray(_logits(model, padded[None].astype(np.int32))[0], np.float64)
    return [float(-jax.nn.log_softmax(logits_L)[target]) for logits_L, target in zip(logits_LV, targets, strict=False)]


def test_a_stream_begins_with_the_first_token_and_documents_do_not(small):
    tokens, documents = streams(small(context_length=16))
    joined = [FIRST, *(token for document in documents for token in (*document, END))][:-1]
    assert len(documents) > 50 and tokens.tolist() == joined


def test_each_row_of_training_and_of_insight_begins_with_the_first_token(small):
    config = small(context_length=16)
    tokens, _ = streams(config)
    batches = TextBatches(tokens, config, vocab=vocab_of(TOKENIZER))
    rows = [batches[step] for step in range(5)]
    of_text = [batch for _, batch in samples.of_text(loaded(config), tokens, 512)]
    for batch in (*rows, *of_text):
        assert (batch["inputs"][:, 0] == FIRST).all() and not (batch["targets"] == FIRST).any()
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    tokens_BL = inputs.of_text(tokens, TOKENIZER, 16).tokens_BL
    assert (tokens_BL[:, 0] == FIRST).all() and (tokens_BL[:, 1:] != FIRST).all()


def test_masked_rows_begin_with_cls_which_is_no_target(small):
    library = wordpiece()
    tokenizer = ImportedTokenizer(library, 3, library.get_vocab_size(), mask_id=4)
    config = small(context_length=16, train__objective="masked", model__causal=False, train__mask_rate=0.9)
    tokens, _ = streams(config, tokenizer)
    _, block = next(corrupted_blocks(tokens, config, vocab=vocab_of(tokenizer), batch_size=64, seed=0))
    assert (block["inputs"][:, 0] == 2).all() and (block["weights"][:, 0] == 0).all()
    assert block["weights"][:, 1:].mean() > 0.8 and not (block["targets"][:, 1:] == 2).any()


def test_every_block_and_window_is_scored_after_the_first_token(small):
    config = small(context_length=16)
    tokens = streams(config)[0][:150]
    model = loaded(config)
    expected = []
    for start in range(0, len(tokens) - 1, 16):
        targets = tokens[start + 1 : start + 17].tolist()
        expected += reference(model, [FIRST, *targets[:-1]], targets)
    score = perplexity.score_split(model, tokens, TOKENIZER.token_bytes)
    np.testing.assert_allclose(score.losses_T, expected, atol=2e-5)
    (row,), _ = extrapolation.extrapolation(
        model, tokens, TOKENIZER.token_bytes, extrapolation.plan(len(tokens), "train", (16,), (4,), 20)[1:]
    )
    first = row["first_target"]
    sliding = []
    for target in range(first, len(tokens)):
        start = first - 1 - 12 + (target - first) // 4 * 4  # windows of 16, of which each scores the last 4
        known = tokens[start + 1 : target].tolist()
        sliding.append(reference(model, [FIRST, *known], [*known, int(tokens[target])])[-1])
    assert row["nll"] == pytest.approx(np.mean(sliding), abs=2e-5)


@pytest.mark.slow
def test_an_isolated_document_is_scored_as_if_alone(small):
    config = small(context_length=32, data__isolate_documents=True)
    model, rng = loaded(config), np.random.default_rng(0)
    document = rng.integers(3, 90, 9).tolist()
    row = [FIRST, *rng.integers(3, 90, 12).tolist(), END, *document]
    nll_BL = perplexity.make_nll_fn(model)(np.array([row[:-1]]), np.array([row[1:]]))
    np.testing.assert_allclose(nll_BL[0, -9:], reference(model, [FIRST, *document[:-1]], document), atol=2e-5)


@pytest.mark.parametrize("kind", needles.KINDS)
def test_needles_have_one_first_token_and_read_as_one_text(small, kind):
    text = streams(small(context_length=16))[0]
    for index in range(5):
        prompt, answer = needles.prompt(kind, index, 1500, text[1:], TOKENIZER)
        whole = TOKENIZER.decode([*prompt, *answer])
        assert prompt[0] == FIRST and (np.concatenate([prompt[1:], answer]) != FIRST).all()
        question = "?" if kind not in ("variables",) else " ="
        assert question in whole and "  " not in whole.split("What is")[1], whole[-200:]
        assert TOKENIZER.decode(answer).startswith(" ") and not TOKENIZER.decode(answer).startswith("  ")


@pytest.mark.slow
def test_needles_in_isolated_documents_are_in_one_document(small, monkeypatch):
    config = small(context_length=16, data__isolate_documents=True)
    seen = []
    monkeypatch.setattr(needles, "_batch", lambda prompts, *_: seen.extend(prompts))
    monkeypatch.setattr(needles.task_accuracy, "score", lambda model, batch_of, *_: batch_of([0]) or SCORE)
    needles.measure(loaded(config), TOKENIZER, streams(config)[0], (1200,))
    assert len(seen) > 100 and not any((prompt == END).any() for prompt, _ in seen)


def test_the_text_that_pages_open_with_begins_with_the_first_token(small):
    config = small(context_length=16)
    tokens, documents = streams(config)
    run = types.SimpleNamespace(config=config, tokenizer=TOKENIZER, step=1, workdir=None)
    run.store = types.SimpleNamespace(tokens=lambda split: tokens)
    opening = base.opening(run, SuiteOptions(), 12).tolist()
    assert opening[0] == FIRST and opening[1:] in [document[:11].tolist() for document in documents]

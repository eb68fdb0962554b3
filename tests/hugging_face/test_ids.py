"""An imported model has its own token ids: with other ids of special tokens, all results are the same."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.hugging_face import exporting, importing
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL
from tests.hugging_face.models import BERT, logits

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

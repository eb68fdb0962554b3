"""python -m mini_gpt.prune: a smaller run that all tools open."""

import csv
import dataclasses
import json
import re

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.commands import measuring
from mini_gpt.commands.prune import parse
from mini_gpt.hugging_face.origin import described_origin
from mini_gpt.insight import pruning, removed
from mini_gpt.model import editing
from mini_gpt.model.parameters import count
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.training import test_step

HEADS = ((0, 1, 3), (2,))
FIELDS = {"model__num_layers": 2, "model__position": "alibi"}


def prune(monkeypatch, workdir, *arguments):
    command = (f"--workdir={workdir}", f"--output={workdir.parent / 'smaller'}", *arguments)
    return type_in(monkeypatch, "mini_gpt.prune", *command)


@pytest.mark.slow
def test_the_heads_that_are_named_are_removed_and_the_run_goes_on(monkeypatch, trained, capsys):
    workdir = trained(**FIELDS)
    assert prune(monkeypatch, workdir, "--heads=0.2,1.0,1.1,1.3", "--tokens=64") is None
    printed = capsys.readouterr().out
    run, smaller = Run(workdir), Run(workdir.parent / "smaller")
    assert smaller.config.model.heads == HEADS and "each layer keeps: 0 1 3; 2" in printed
    tokens_BL = np.arange(16, dtype=np.int32).reshape(2, 8)
    mask_NBH = removed.mask(run.config.model, HEADS)[:, None]
    edited = dataclasses.replace(run.model, edits=editing.head_mask(mask_NBH))
    np.testing.assert_allclose(smaller.model(tokens_BL), edited(tokens_BL), rtol=1e-4, atol=1e-5)
    before, after = json.loads((smaller.workdir / "eval/prune.json").read_text())["comparison"]
    assert (before["heads"], after["heads"]) == (8, 4) and after["nll"] != before["nll"]
    assert [row["parameters"] for row in (before, after)] == [count(each.model.parameters) for each in (run, smaller)]
    assert described_origin(smaller.workdir) == "those of run, a run of mini_gpt, of which 4 heads are kept"
    assert type_in(monkeypatch, "train.py", f"--workdir={smaller.workdir}", "--config.train.steps=8") is None
    row = json.loads((smaller.workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 8 and "attention/entropy/layer_1/head_2" in row
    assert "attention/entropy/layer_1/head_0" not in row
    assert Run(smaller.workdir).step == 8


@pytest.mark.slow
def test_the_most_important_heads_are_kept_and_fine_tuned(monkeypatch, trained, capsys):
    workdir = trained(**FIELDS | {"model__num_kv_heads": 2, "model__position": "rope"})
    assert prune(monkeypatch, workdir, "--keep=3", "--tokens=64").startswith(
        "error: --keep: found 3; must be in 4..6, in"
    )
    assert not (workdir.parent / "smaller").exists()
    learning = "--config.optimizer.learning_rate=0.001"
    assert prune(monkeypatch, workdir, "--keep=6", "--tokens=64", "--steps=3", learning) is None
    smaller = Run(workdir.parent / "smaller")
    assert smaller.step == smaller.config.train.steps == 3
    result = json.loads((smaller.workdir / "eval/prune.json").read_text())
    assert [row["heads"] for row in result["rows"]] == [8, 6, 4]
    before, after, tuned = result["comparison"]
    assert result["rows"][0]["nll"] == pytest.approx(before["nll"], rel=1e-5)
    assert result["rows"][1]["nll"] == pytest.approx(after["nll"], rel=1e-5)
    assert tuned["model"] == "after 3 steps" and tuned["nll"] < after["nll"]
    with (smaller.workdir / "eval/prune.csv").open() as file:
        assert [row["heads"] for row in csv.DictReader(file)] == ["8", "6", "4"]
    assert (smaller.workdir / "eval/prune.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_suites_measure_a_smaller_run(monkeypatch, trained, capsys):
    workdir = trained(**FIELDS)
    assert prune(monkeypatch, workdir, "--heads=0.2,1.0,1.1,1.3", "--tokens=64") is None
    run = Run(workdir.parent / "smaller")
    left_out = {"tasks", "translation", "needles", "grammar"}  # of other data
    options = SuiteOptions(tokens=64, lengths="16,32", text="the cat sat", other="the dog ran")
    found = {name: suites.evaluate(run, name, options) for name in suites.SUITES.keys() - left_out}
    patching = found["patching"]
    for scores in (found["pruning"]["importance"], patching["heads"], patching["direct"]["heads_NH"]):
        assert (np.isfinite(np.array(scores, float)) == (removed.mask(run.config.model, HEADS) > 0)).all()
    for heads in (found["heads"]["heads"], found["circuits"]["heads"]):
        assert [(row["layer"], row["head"]) for row in heads] == removed.existing(run.config.model)
    assert [sum(row["labels"].values()) for row in found["heads"]["by_depth"]] == [3, 1]
    assert max(row["removed"] for row in found["pruning"]["rows"]) == 4
    assert not {"zero weights", "dead heads"} & {*found["diagnose"]["found"]}
    page = next((run.workdir / "eval").glob("explorer*.html")).read_text(encoding="utf-8")
    assert "4 heads, of which 4 are kept" in page and page.count('["removed", null]') == 4
    assert type_in(monkeypatch, "sample.py", f"--workdir={run.workdir}", "--prompt=the", "--length=9") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.4", "--heads: found '0.4'"),
        ("2.0", "--heads: found '2.0'; the run has layers 0..1"),
        ("1", "--heads: found '1'; must be LAYER.HEAD"),
        ("0.0,1.2", "--heads: found '0.0,1.2'; layer 1 must keep at least one head"),
        ("0.0", "--heads: found '0.0'; layer 0 must keep equally many heads of each group"),
    ],
)
def test_heads_that_can_not_be_removed_are_refused(small, text, message):
    config = small(**FIELDS, model__heads=HEADS).model
    grouped = dataclasses.replace(config, num_kv_heads=2, heads=None)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        parse(text, grouped if "group" in message else config)
    assert parse("0.3, 0.0", config) == parse("0.3, 0.0", grouped) == [(0, 3), (0, 0)]


@pytest.mark.slow
def test_muon_trains_layers_with_other_numbers_of_heads(small):
    config = small(**FIELDS, model__heads=HEADS, optimizer__name="muon")
    losses = [metrics["loss"] for metrics in test_step.run(config)[1]]
    assert np.isfinite(losses).all() and losses[0] != losses[-1]


def test_fields_that_would_change_nothing_are_refused(monkeypatch, tmp_path):
    refused = lambda *fields: prune(monkeypatch, tmp_path / "run", "--heads=0.0", *fields)
    assert "train.steps: found 7, and --steps=3" in refused("--steps=3", "--config.train.steps=7")
    assert "optimizer.name: nothing is trained without --steps" in refused("--config.optimizer.name=muon")


def test_attention_costs_the_sum_over_layers_of_heads_times_keys(small):
    fields = {"model__num_heads": 4, "model__heads": ((0, 1, 2, 3), (1,)), "model__attention_window": (8, None)}
    config = small(**FIELDS | fields)
    keys = 4 * 8 + 1 * config.context_length
    assert measuring.flops_per_token(config, {}) == 12 * config.model.head_width * keys


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads=0.0", "--config.model.d_ff=8"], "model.d_ff: the smaller run has that of "),
        (["--keep=1"], "--keep: found 1; must be in 2..7"),
        (["--keep=3"], "found model.block=gru; a recurrent run has no heads to remove"),
        (["--heads=0.0", "--steps=1", "--config.mesh.data=3"], "train.batch_size: found 8; must be divisible by 3"),
    ],
)
def test_wrong_flags_are_refused_and_nothing_is_written(monkeypatch, trained, arguments, message):
    workdir = trained(**FIELDS | ({"model__block": "gru", "model__position": "none"} if "gru" in message else {}))
    monkeypatch.chdir(workdir.parent)
    monkeypatch.delattr(pruning, "importance")  # the refusal comes before it
    assert message in prune(monkeypatch, workdir, *arguments)
    assert not (workdir.parent / "smaller").exists()

"""Encoders without a prediction head, such as MiniLM: attention works, and what needs logits is refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mini_gpt import suites
from mini_gpt.hugging_face import architectures, comparing
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from tests.commands.test_command_line import type_in
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.hugging_face.models import written
from tests.hugging_face.test_importing import imported


def without_head(directory):
    """Write a BERT without its head, with the names that BertModel writes."""
    tokenizer = wordpiece()
    written("bert", directory, vocab_size=tokenizer.get_vocab_size(), end=3)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]", "sep_token": "[SEP]"}))
    tensors = load_file(directory / "model.safetensors")
    kept = {name.removeprefix("bert."): array for name, array in tensors.items() if not name.startswith("cls.")}
    width = kept["embeddings.LayerNorm.weight"].size
    save_file(kept | {"pooler.dense.weight": np.ones((width, width), np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def source(tmp_path):
    return without_head(tmp_path / "model")


@pytest.mark.slow
def test_attention_is_measured_and_logits_are_refused(source, corpus_files, tmp_path, monkeypatch, caplog):
    with caplog.at_level("INFO", "mini_gpt"):
        run = imported(source, tmp_path / "run", corpus_files)
    assert "no prediction head, so that only tools for activations and attention" in caplog.text
    for name in ("heads", "figures", "explorer"):
        assert suites.evaluate(run, name, SuiteOptions(text="the cat")) is not None
        assert list((run.workdir / "eval").glob(f"{name}*"))
    refusal = rf"^{run.workdir}: the model has no prediction head, whose logits --suite={{}} needs; use --suite=heads,"
    for name in ("perplexity", "lens", "play"):
        with pytest.raises(UserError, match=refusal.format(name)):
            suites.check_run(run, name, SuiteOptions())
    with pytest.raises(
        UserError, match=r"^model.prediction_head: found None: the model has no prediction head, and so"
    ):
        run.model(np.array([[1, 2]]))
    sample = type_in(monkeypatch, "sample.py", f"--workdir={run.workdir}", "--fill=a [MASK]")
    assert sample.startswith(f"error: {run.workdir}: the model has no prediction head, so that it can't write")
    train = ["train.py", f"--config={run.workdir}/config.json", f"--init_from={run.workdir}", f"--workdir={tmp_path}/x"]
    assert "model.prediction_head: found None; the model has no prediction head, and training" in type_in(
        monkeypatch, *train
    )
    with pytest.raises(UserError, match=r"model.prediction_head: found None; must be True; a bidirectional model"):
        architectures.choose(run.config.model)


@pytest.mark.slow
def test_compare_finds_the_first_layer_that_differs(source, corpus_files, tmp_path):
    left = imported(source, tmp_path / "left", corpus_files).workdir
    tensors = load_file(source / "model.safetensors")
    tensors["encoder.layer.1.output.dense.weight"] *= np.float32(1.05)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    right = imported(source, tmp_path / "right", corpus_files).workdir
    report, are_equal = comparing.compare(left, left, "the cat sat", 0.0)
    assert are_equal and "loss and logits: not compared, a model has no prediction head" in report
    report, are_equal = comparing.compare(left, right, "the cat sat", 1e-4)
    assert not are_equal and report.endswith("\n\nDifferent from here on: after layer 1, normed.")
    written("bert, untied, odd", tmp_path / "other", vocab_size=wordpiece().get_vocab_size(), end=3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / "other")
    other = imported(tmp_path / "other", tmp_path / "third", corpus_files).workdir
    with pytest.raises(UserError, match=r"^--right: .*; nothing can be compared \(layers: not .*; loss and log"):
        comparing.compare(left, other, "the cat sat", 1e-4)

"""`compare` finds the first difference of two models: of two runs here, of a run and Transformers in a later test."""

import json
import re
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mini_gpt.commands import hugging_face
from mini_gpt.hugging_face import comparing, exporting
from mini_gpt.hugging_face.readers import Reader
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.hugging_face.bpe_tokenizers import foreign
from tests.hugging_face.models import logits, written
from tests.hugging_face.test_importing import imported

TEXT = "the dog eats the cat and the man"
ROWS = 400
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
LAYER = "model.layers.1.mlp.down_proj.weight"


def source(directory, name="llama", tokenizer=None, changed=None):
    """Write a random model with a tokenizer. changed: the name of a tensor to change a little."""
    if not directory.exists():
        written(name, directory, vocab_size=ROWS, end=2)
        (tokenizer or foreign()).save(str(directory / "tokenizer.json"))
        plain = {"tokenizer_class": "PreTrainedTokenizerFast"}  # else Transformers uses the one of the model's type
        (directory / "tokenizer_config.json").write_text(json.dumps(plain))
    if changed:
        tensors = load_file(directory / "model.safetensors")
        tensors[changed] = tensors[changed] * np.float32(1.05)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def runs(tmp_path, corpus_files):
    """Return a function that imports a model, with the arguments of `source`."""

    def run(side, **options):
        return imported(source(tmp_path / f"{side} files", **options), tmp_path / side, corpus_files)

    return run


def first_difference(report):
    """Return the names of the rows up to the marked one; None if none is marked."""
    rows = [line for line in report.splitlines() if line.startswith("  ")]
    names = [line.strip().split("  ")[0] for line in rows]
    marked = [n for n, line in enumerate(rows) if line.endswith("  <- the first above the tolerance")]
    assert len(marked) <= 1 and "logits" in names
    return names[: marked[0] + 1] if marked else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed, rows",
    [
        (None, None),
        ("model.embed_tokens.weight", ["embeddings"]),
        ("model.layers.0.self_attn.o_proj.weight", ["embeddings", "after layer 0"]),
        (LAYER, ["embeddings", "after layer 0", "after layer 1, normed"]),
        ("model.norm.weight", ["embeddings", "after layer 0", "after layer 1, normed"]),
        ("lm_head.weight", ["embeddings", "after layer 0", "after layer 1, normed", "logits"]),
    ],
)
def test_the_first_layer_that_differs_is_named(changed, rows, runs, tmp_path):
    left, right = runs("left"), runs("right", changed=changed)
    report, are_equal = comparing.compare(left.workdir, right.workdir, TEXT, 1e-4)
    assert first_difference(report) == rows and are_equal == (changed is None)
    ids = np.array([foreign().encode(TEXT).ids])
    assert f"tokens: {ids.size}, equal" in report
    wanted = [logits(tmp_path / f"{name} files", ids)[0] for name in ("left", "right")]
    for name, logits_LV in zip(("left", "right"), wanted, strict=True):
        logits_LV = logits_LV[:-1] - logits_LV[:-1].max(axis=-1, keepdims=True)
        chosen_L = np.take_along_axis(logits_LV, ids[0, 1:, None], axis=-1)[:, 0]
        loss = np.mean(np.log(np.exp(logits_LV).sum(axis=-1)) - chosen_L)
        assert float(re.search(rf"{name} ([\d.]+)", report.partition("loss:")[2])[1]) == pytest.approx(loss, abs=2e-5)
    if changed:
        gap_LV = np.abs(wanted[0] - wanted[1])
        place, token = np.unravel_index(np.argmax(gap_LV), gap_LV.shape)
        found = re.search(r"logits: largest difference (\S+) .* at place (\d+) after", report)
        assert float(found[1]) == pytest.approx(gap_LV.max(), rel=0.06) and int(found[2]) == place
        name = foreign().id_to_token(int(token)) or f"id {token}"
        assert f"for {name.replace(SPACE, ' ')!r}\n" in report or name.startswith("<")


@pytest.mark.slow
def test_another_tokenizer_is_told_from_another_model(runs):
    without_merges = json.loads(foreign().to_str())["model"] | {"merges": []}
    left, right = runs("left"), runs("right", tokenizer=foreign(model=without_merges))
    report, are_equal = comparing.compare(left.workdir, right.workdir, TEXT, 1e-4)
    assert not are_equal and first_difference(report) is None
    assert re.search(r"tokens: \d+, different from place \d+ on: left '.*', right '.*'; both models read", report)
    assert report.endswith("Different tokens. On those of the left: equal within the relative tolerance of 0.0001.")


@pytest.mark.slow
def test_other_numbers_of_layers_are_compared_by_logits(runs):
    left, right = runs("left"), runs("right", name="smollm3")
    report, are_equal = comparing.compare(left.workdir, right.workdir, TEXT, 1e-4)
    assert "layers: not compared, left 2 of width 32, right 3 of width 32" in report and not are_equal
    assert first_difference(report) == ["logits"]


@pytest.mark.slow
def test_a_run_of_bytes_is_compared_with_its_own_import(trained, tmp_path, corpus_files):
    run = Run(trained(model__position="learned"))
    exporting.export(run, tmp_path / "out")
    again = imported(tmp_path / "out", tmp_path / "again", corpus_files)
    report, are_equal = comparing.compare(run.workdir, again.workdir, TEXT * 9, 0.0)
    assert are_equal and "tokens: the first 32 of 288, equal" in report


@pytest.mark.slow
def test_the_command_exits_with_1_if_models_differ_and_refuses_what_it_cannot_compare(runs, monkeypatch, capsys):
    flags = [f"--left={runs('left').workdir}", f"--right={runs('right', changed=LAYER).workdir}"]
    command = ["mini_gpt.commands.hugging_face", "compare", *flags]
    assert type_in(monkeypatch, *command, f"--prompt={TEXT}", "--tolerance=0.9") is None
    assert "Equal within the relative tolerance of 0.9." in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, f"--prompt={TEXT}"])
    with pytest.raises(SystemExit) as stopped:
        hugging_face.main()
    assert stopped.value.code == 1
    assert "Different from here on: after layer 1, normed.\n" in capsys.readouterr().out
    assert "must have at least two tokens" in type_in(monkeypatch, *command, "--prompt=")
    refused = type_in(monkeypatch, *command, "--prompt=a", "--tolerance=-1")
    assert refused == "error: --tolerance: found -1.0; must be in 0..1"


def test_a_token_of_the_tokenizer_without_a_row_in_the_model_is_refused():
    """Some published tokenizers have more tokens than their models."""
    encode = lambda text: np.arange(len(text))
    reader = lambda title, names: Reader(title, [*names], 8, False, encode, str, lambda ids: None)
    with pytest.raises(UserError, match=r"^small: token id: found 4; the model has no row for this id"):
        comparing._tokens(reader("large", "abcdef"), reader("small", "abc"), "bcdef")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_packages_are_named(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "transformers":
        monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(UserError, match=rf"^--right: .*: {missing} is not installed; pip install -r requirements-hu"):
        comparing.readers.of_transformers(source(tmp_path / "files"))

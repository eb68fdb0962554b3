"""`compare` of imported and exported models with Transformers (`make test-hugging-face`)."""

import json
import re

import pytest

from mini_gpt.hugging_face import comparing, exporting
from mini_gpt.runtime.errors import UserError
from mini_gpt.training.run import Run
from tests.hugging_face.bpe_tokenizers import like_robertas
from tests.hugging_face.models import written
from tests.hugging_face.test_comparing import TEXT, first_difference, source
from tests.hugging_face.test_importing import imported

# {model: a tensor in its second layer}
MODELS = {
    "learned": "transformer.h.1.mlp.c_proj.weight",
    "pythia": "gpt_neox.layers.1.mlp.dense_4h_to_h.weight",
    "llama, grouped, biased": "model.layers.1.mlp.down_proj.weight",
    "gemma2": "model.layers.1.post_feedforward_layernorm.weight",
    "olmo2": "model.layers.1.post_feedforward_layernorm.weight",
    "opt": "model.decoder.layers.1.fc2.weight",
    "bloom": "transformer.h.1.mlp.dense_4h_to_h.weight",
    "alibi": "transformer.blocks.1.ffn.down_proj.weight",
}


@pytest.mark.parametrize("name", MODELS)
def test_an_import_equals_its_source_until_a_layer_is_changed(name, tmp_path, corpus_files):
    files = source(tmp_path / "files", name=name)
    run = imported(files, tmp_path / "run", corpus_files)
    report, are_equal = comparing.compare(run.workdir, files, TEXT, 1e-4)
    assert are_equal and first_difference(report) is None, report
    assert re.search(r"^right  .*: Transformers [\d.]+", report, re.M)
    report, are_equal = comparing.compare(run.workdir, source(files, changed=MODELS[name]), TEXT, 1e-4)
    rows = first_difference(report)
    assert not are_equal and rows[:2] == ["embeddings", "after layer 0"] and len(rows) == 3, report
    assert rows[2] in ("after layer 1", "after layer 1, normed")


def test_a_masked_model_is_compared(tmp_path, corpus_files):
    files, tokenizer = tmp_path / "files", like_robertas(300)
    rows = tokenizer.get_vocab_size()
    written("roberta", files, vocab_size=rows, end=rows - 1)
    tokenizer.save(str(files / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<unk>", "mask_token": "<mask>"}
    (files / "tokenizer_config.json").write_text(json.dumps(names))
    run = imported(files, tmp_path / "run", corpus_files)
    report, are_equal = comparing.compare(run.workdir, files, TEXT, 1e-4)
    assert are_equal and "of the tokens themselves: none is masked" in report, report


@pytest.mark.parametrize("kind", ["bytes", "bpe", "characters"])
def test_a_run_equals_its_export(kind, trained, tmp_path):
    run = Run(trained(data__tokenizer=kind, data__vocab_size=300, model__position="learned"))
    exporting.export(run, tmp_path / "out")
    report, are_equal = comparing.compare(run.workdir, tmp_path / "out", TEXT, 1e-4)
    assert are_equal and "tokens: " in report, report


def test_missing_tensors_and_encoders_are_refused(tmp_path, corpus_files):
    files = source(tmp_path / "files")
    run = imported(files, tmp_path / "run", corpus_files)
    (files / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"^--right: .*files: Transformers can't open it \("):
        comparing.compare(run.workdir, files, TEXT, 1e-4)
    with pytest.raises(UserError, match=r"t5: found a model with an encoder; compare needs models"):
        comparing.compare(run.workdir, source(tmp_path / "t5", name="t5"), TEXT, 1e-4)

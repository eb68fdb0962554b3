"""Imports: sizes are compared first, what is refused, the chosen context, and encoders without a head."""

import dataclasses
import json
import os
import re
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as library
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from mini_gpt import suites
from mini_gpt.commands.generate import request
from mini_gpt.config import loading
from mini_gpt.hugging_face import architectures, comparing, exporting, importing, origin, stored
from mini_gpt.pages.play import page as playground
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.play import runs_of
from mini_gpt.training import assembly, loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import slow
from tests.faults.limits import seconds
from tests.hugging_face.bpe_tokenizers import foreign
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.hugging_face.models import read, written

# An import compares sizes with the files before it allocates anything.


def described(directory, **fields):
    """Change fields of a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"n_embd": 2**20, "n_inner": 2**22}, r"\(29, 32\); config.json requires \(29, 1048576\)$"),
        *slow(({"n_layer": 4096}, r"h.2.ln_1.weight")),
        ({"n_layer": 2**24}, r"model.num_layers: found 16777216; must be"),
        ({"n_positions": 2**24}, r"wpe.weight: found the shape \(16, 32\); config.json requires \(16777216, 32\)$"),
    ],
)
def test_a_config_larger_than_the_files_is_refused_at_once(fields, message, tmp_path):
    written("learned", tmp_path / "out")
    described(tmp_path / "out", **fields)
    tracemalloc.start()
    try:
        with seconds(20), pytest.raises(UserError, match=message) as raised:
            read(tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 2**28 and "\n" not in str(raised.value)
    finally:
        tracemalloc.stop()


def sparse(path, shape):
    """Write a safetensors file with one tensor, of whose values no byte is on the disk."""
    size = 4 * int(np.prod(shape))
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"transformer.wte.weight": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return len(header) + 8 + size


def test_files_with_shapes_of_impossible_size_are_refused(tmp_path):
    size = sparse(tmp_path / "model.safetensors", [2**24, 2**16])
    with pytest.raises(UserError, match=r"model.safetensors: not a complete safetensors file \(.*\); download it"):
        stored.find(tmp_path)
    os.truncate(tmp_path / "model.safetensors", size)
    with seconds(10), pytest.raises(UserError, match=r"4,398,[0-9,]+ bytes, but nearly all of them are holes"):
        stored.find(tmp_path)


def test_tensors_are_read_in_blocks_of_any_float(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "BLOCK", 7)
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=(5, 4)).astype(name) for name in ("float64", "float32", "float16")}
    save_file(tensors, tmp_path / "model.safetensors")
    found = stored.find(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name].read(), tensor.astype(np.float32))
        assert found[name].equals(found[name])
    assert not found["float64"].equals(found["float16"])
    tensors["float32"][4, 3] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="float32: found non-finite values"):
        stored.find(tmp_path)["float32"].read()


def like_gpt2(directory, vocab_size, width, layers):
    """Write a GPT-2 with random weights and a tokenizer of its size; return the bytes of its weights."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (vocab_size, width), "wpe.weight": (1024, width)}
    shapes |= {f"ln_f.{part}": (width,) for part in ("weight", "bias")}
    for layer in range(layers):
        for name, (rows, columns) in {
            "attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)
        }.items():  # fmt: skip
            shapes[f"h.{layer}.{name}.weight"] = (rows * width, columns * width)
            shapes[f"h.{layer}.{name}.bias"] = (columns * width,)
        shapes |= {f"h.{layer}.ln_{norm}.{part}": (width,) for norm in (1, 2) for part in ("weight", "bias")}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    fields = {"model_type": "gpt2", "vocab_size": vocab_size, "n_embd": width, "n_layer": layers, "n_head": 8}
    (directory / "config.json").write_text(json.dumps(fields | {"n_positions": 1024, "eos_token_id": vocab_size - 1}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left in letters for right in letters][: vocab_size - 1 - len(letters)]
    tokens = [*letters, *map("".join, merges)]
    tokenizer = library.Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([library.AddedToken("<|endoftext|>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return sum(tensor.nbytes for tensor in tensors.values())


def imported(source, workdir, corpus, **overrides):
    """Import a model for the small corpus; return the run."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    fields = {"data.corpus": "text", "data.path": corpus, "model.dtype": "float32", "mesh.data": 1}
    importing.import_run(source, workdir, "configs/default.py", fields | dotted)
    return Run(workdir)


@pytest.mark.slow
def test_bfloat16_parameters_compute_as_the_rounded_weights(tmp_path, corpus_files):
    like_gpt2(tmp_path / "model", 400, 32, 2)
    narrow = imported(tmp_path / "model", tmp_path / "narrow", corpus_files, model__param_dtype="bfloat16").model
    wide = imported(tmp_path / "model", tmp_path / "wide", corpus_files).model
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.parameters)} == {jnp.dtype("bfloat16")}
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(model.parameters)) for model in (narrow, wide)]
    assert 2 * sizes[0] == sizes[1]
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), wide.parameters)
    tokens_BL = jnp.asarray(np.random.default_rng(0).integers(0, 400, (2, 9)), jnp.int32)
    expected_BLV = dataclasses.replace(wide, parameters=rounded).logits(tokens_BL)
    np.testing.assert_array_equal(narrow.logits(tokens_BL), expected_BLV)
    assert np.abs(expected_BLV - wide.logits(tokens_BL)).max() > 1e-3
    # A run may be read in either dtype, and trained in float32.
    again = Run(tmp_path / "wide", overrides={"model.param_dtype": "bfloat16"}).model
    np.testing.assert_array_equal(again.logits(tokens_BL), expected_BLV)
    config = loading.override(
        Run(tmp_path / "narrow").config, {"model.param_dtype": "float32", "train.steps": 1, "context_length": 32}
    )
    state = loop.train(config, tmp_path / "tuned", init_from=tmp_path / "narrow", conclude=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.parameters)} == {jnp.dtype("float32")}


def test_training_with_bfloat16_parameters_is_refused(small):
    with pytest.raises(UserError, match=r"model.param_dtype: found 'bfloat16'; training needs float32: give --init"):
        assembly.make_mesh(small(model__param_dtype="bfloat16"))


def refused(source, **fields):
    """Return the message with which an import of a model with these fields of config.json is refused."""
    described(source, **fields)
    with pytest.raises(UserError) as raised:
        importing.import_run(source, source.parent / "run", "configs/default.py", {})
    return str(raised.value).removeprefix(f"{source / 'config.json'}: ")


def test_one_error_names_all_fields_that_cannot_be_imported(tmp_path):
    source = tmp_path / "model"
    written("llama", source)
    assert refused(source, hidden_act="relu") == 'hidden_act: found "relu"; must be silu or swish to be imported'
    message = refused(
        source,
        attention_bias=1,
        rms_norm_eps="small",
        partial_rotary_factor=0.5,
        quantization_config={"bits": 4},
        rope_scaling={"rope_type": "longrope", "factor": 4.0},
    )
    fields = ["quantization_config", "partial_rotary_factor", "rope_scaling.rope_type", "attention_bias"]
    fields += ["rms_norm_eps", "hidden_act"]
    assert message.startswith("6 fields cannot be imported: ") and "\n" not in message
    assert all(f"{name}: found " in message for name in fields)
    message = refused(source, num_attention_heads=0)  # ends the list, since other fields depend on it
    assert "num_attention_heads: found 0" in message and "attention_bias" not in message
    message = refused(source, num_attention_heads=4, model_type="rwkv")
    assert message.startswith('model_type: found "rwkv"; must be ')


@pytest.mark.slow
def test_an_import_chooses_a_context_and_batches_for_a_laptop(tmp_path, corpus_files, caplog):
    source = tmp_path / "model"
    written("llama", source, vocab_size=400)
    foreign().save(str(source / "tokenizer.json"))
    described(source, max_position_embeddings=8192, eos_token_id=2, bos_token_id=2)
    with caplog.at_level("INFO", "mini_gpt"):
        run = imported(source, tmp_path / "run", corpus_files)
    assert "context_length is 2,048; the model was made for 8,192 tokens. train.batch_size is 2, " in caplog.text
    config = run.config
    assert (config.context_length, config.train.batch_size, config.model.rope.original_context) == (2048, 2, 8192)
    exporting.export(run, tmp_path / "out")
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert again["max_position_embeddings"] == 8192 and again["rope_theta"] == 10_000.0
    fields = {"context_length": 4096, "train__batch_size": 3, "model__dtype": "auto"}
    chosen = imported(source, tmp_path / "chosen", corpus_files, **fields).config
    assert (chosen.context_length, chosen.train.batch_size) == (4096, 3)
    assert (config.model.dtype, chosen.model.dtype) == ("float32", "auto"), "as in Transformers, if it is not given"
    divided = imported(source, tmp_path / "divided", corpus_files, context_length=100, train__accumulation_steps=2)
    assert divided.config.train.batch_size == 16, "16 rows of 100 tokens fit"


@pytest.mark.slow
def test_a_shortened_context_is_not_called_the_trained_one(tmp_path, corpus_files, caplog):
    like_gpt2(tmp_path / "model", 400, 32, 2)
    run = imported(tmp_path / "model", tmp_path / "run", corpus_files, context_length=32)
    assert origin.trained_context(run) == 1024 and run.config.context_length == 32
    for tokens in (1024, 1025):
        request.warn_if_longer_than_trained(run, tokens)
    assert caplog.messages == ["1025 tokens are more than the 1024 that the model was trained on"]
    result = suites.evaluate(run, "extrapolation", SuiteOptions(lengths="1x,2x", strides="16", tokens=64))
    assert {row["length"] for row in result["rows"]} == {32, 64} and result["train_length"] == 1024
    (shown,) = runs_of(run, SuiteOptions())
    page = playground.play([shown], run.tokenizer, "the cat", title="")
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data[1])["models"][0]["trained_context"] == 1024


# Encoders without a prediction head, such as MiniLM: attention works, and what needs logits is refused.


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

"""Exported weights compute the same logits, and are imported unchanged."""

import json
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import exporting
from mini_gpt.model import build, parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from tests import oracle
from tests.conftest import slow
from tests.hugging_face.models import (
    EXPORTABLE,
    SOURCE_BS,
    STORED,
    TOKENS_BL,
    VOCAB,
    fill,
    forward,
    logits,
    make,
    read,
    written,
)

# Quick: the first of each model_type.
FIRST = {kind: name for name, (kind, _) in reversed(EXPORTABLE.items())}.values()


@pytest.mark.parametrize("name", [*FIRST, *slow(*(name for name in EXPORTABLE if name not in FIRST))])
def test_exported_files_hold_the_model_and_are_read_as_by_transformers(name, tmp_path):
    config, drawn = written(name, tmp_path / "out")
    stored = np.load(STORED)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(str(stored["configs"]))[name]
    again, arrays = read(tmp_path / "out")
    differing = {name for name in loading.differences(config, again) if name.startswith("model.")}
    assert differing <= {"model.dtype", "model.scan_layers"} | CHANGED_FIELDS.get(name, set())
    original = parameters.by_name(parameters.with_layers(drawn, stacked=False))
    source_BS = SOURCE_BS if config.model.encoder_layers else None
    gemma = EXPORTABLE[name][0].startswith("gemma")  # its files have the weights of norms minus 1
    for path in original if gemma or not config.model.scale_embeddings else ():
        # A factor sqrt(d_model) adds a rounding to float32, except for a power of four.
        rounded = (gemma and path.endswith("norm/scale")) or (path == "final_norm/scale" and name in ROUNDED)
        np.testing.assert_allclose(arrays[path], original[path], rtol=2e-7 * rounded, atol=1e-7 * rounded)
    one, of_source = TOKENS_BL[:1], None if source_BS is None else source_BS[:1]
    before_BLV, after_BLV = (
        forward(*each, one, of_source) for each in ((config.model, original), (again.model, arrays))
    )
    np.testing.assert_allclose(after_BLV, before_BLV, rtol=0, atol=1e-5 * np.abs(before_BLV).max())

    fill(tmp_path / "out")
    wanted_BLV = stored[name]
    found_BLV = logits(tmp_path / "out", TOKENS_BL, source_BS)
    np.testing.assert_allclose(found_BLV, wanted_BLV, rtol=0, atol=1e-4 * np.abs(wanted_BLV).max())


ROUNDED = ("t5, tied, odd", "t5, stacked")
LENGTHS = {"model.fire.threshold", "model.cope.positions", "model.variants.ssmax_start"}
BIASES = {"model.use_bias", "model.qkv_bias", "model.attention_out_bias"}
CHANGED_FIELDS = {
    # Biases of 0 are added. The others follow the context length, which is the size of the table after the import.
    "learned, no bias, long": BIASES | LENGTHS,
    "llama, dynamic": LENGTHS | {"model.max_positions"},
    "llama, dynamic, factor 1": LENGTHS | {"model.max_positions"},
    "bert, no bias, stacked": BIASES,
    "opt": BIASES,
    "none": {"model.position"},
    "sinusoidal": BIASES | {"model.position", "model.sinusoidal.amplitude"},
    "sinusoidal, scaled": {"model.position", "model.sinusoidal.base", "model.scale_embeddings", "model.tie_embeddings"},
    "phi": {"model.qkv_bias"},
    "bert, untied, odd": LENGTHS,
    "learned, scaled": {"model.scale_embeddings", "model.tie_embeddings"},
    "rope, linear": {"model.rope.original_context"},
    "rope, ntk": {"model.rope.base", "model.rope.scaling", "model.rope.factor", "model.rope.original_context"} | BIASES,
}


@pytest.mark.parametrize("name", ["sinusoidal, scaled", *slow("none", "sinusoidal")])
def test_tables_of_positions_may_be_longer_than_the_context(name, tmp_path):
    config, drawn = written(name, tmp_path / "out", length=50)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    table_PD = tensors["transformer.wpe.weight"]
    assert described["n_positions"] == len(table_PD) == 50 > config.context_length
    sinusoidal = config.model.sinusoidal
    scale = sinusoidal.amplitude * (1 if config.model.scale_embeddings else 0.02) * (name != "none")
    waves_PD = [oracle.sinusoid(place, config.model.d_model, sinusoidal.base) for place in range(50)]
    np.testing.assert_allclose(table_PD, scale * np.stack(waves_PD), atol=scale * 1e-5)
    tokens_L = np.random.default_rng(7).integers(0, VOCAB, 50)
    original = parameters.by_name(parameters.with_layers(drawn, stacked=False))
    wanted_BLV = forward(config.model, original, tokens_L[None])
    np.testing.assert_allclose(logits(tmp_path / "out", tokens_L[None]), wanted_BLV, rtol=1e-4, atol=1e-4)
    again, arrays = read(tmp_path / "out")
    assert again.model.position == "learned" and again.context_length == again.model.max_positions == 50
    np.testing.assert_array_equal(arrays["positions/learned/embedding"], table_PD)


@pytest.mark.parametrize(
    "name, length, message",
    [
        ("learned", 32, "--length: found 32; is only for models with positions none, sinusoidal or alibi"),
        ("rope", 32, "--length: found 32; is only for models with positions none, sinusoidal or alibi"),
        ("bloom", 32, "--length: found 32; is only for models with positions none, sinusoidal or alibi"),
        ("none", 15, r"--length: found 15; must be in 16..1048576"),
        ("alibi", 2**20 + 1, r"--length: found 1048577; must be in 16..1048576"),
    ],
)
def test_lengths_that_cannot_be_chosen_are_refused(name, length, message, tmp_path):
    with pytest.raises(UserError, match=message):
        written(name, tmp_path / "out", length=length)


def rounded(values, bits):
    """Return float32 values rounded to a float with `bits` of mantissa, half to even, by integers."""
    drop = 23 - bits
    whole = values.view(np.uint32).astype(np.uint64)
    whole += (np.uint64(1) << np.uint64(drop - 1)) - np.uint64(1) + (whole >> np.uint64(drop) & np.uint64(1))
    return (whole >> np.uint64(drop) << np.uint64(drop)).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 7), ("float16", 10)])
@pytest.mark.parametrize("name", ["learned, scaled", *slow("t5", "llama", "rope, stacked", "bert", "qwen3")])
def test_weights_are_rounded_once_to_the_dtype(name, dtype, bits, tmp_path):
    written(name, tmp_path / "exact")
    written(name, tmp_path / "out", dtype=dtype)
    _, exact = read(tmp_path / "exact")
    _, arrays = read(tmp_path / "out")
    for path, leaf in exact.items():
        if path == "final_norm/scale" and name == "t5":
            leaf = leaf * 8  # the factor sqrt(64) is in the file
            arrays[path] = arrays[path] * 8
        normal = np.abs(leaf) >= 2.0**-14  # smaller ones have fewer bits in float16
        np.testing.assert_array_equal(arrays[path][normal], rounded(leaf, bits)[normal], path)
        np.testing.assert_allclose(arrays[path][~normal], leaf[~normal], atol=2.0**-25, rtol=2.0**-8)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described == json.loads((tmp_path / "exact" / "config.json").read_text()) | {"torch_dtype": dtype}
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118  not a mapping
    assert kinds == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}


def test_weights_too_large_for_float16_are_refused(tmp_path):
    message = r"--dtype: found 70000 in transformer.ln_f.bias, too large for float16; use bfloat16 or float32"
    grow = {"final_norm/bias": np.full(32, 70000, np.float32)}
    with pytest.raises(UserError, match=message):
        written("learned", tmp_path / "out", dtype="float16", changes=grow)
    written("learned", tmp_path / "other", dtype="bfloat16", changes=grow)
    assert read(tmp_path / "other")[1]["final_norm/bias"][0] == 70144


@pytest.mark.parametrize("name", ["rope, stacked", *slow("llama")])
def test_an_export_packs_one_tensor_at_a_time(name, tmp_path):
    config, drawn = make(name, 500, **{"model.num_layers": 8, "model.d_model": 128, "model.d_ff": 512})
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(drawn))
    definition, mesh = build.abstract(config.model, 500)[0], sharding.make_reading_mesh(1, 1)
    model = LoadedModel(drawn, definition, config, mesh, config.batch_tokens, PLAIN)
    tracemalloc.start()
    try:
        exporting.write_model(model, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 0.3 * weights
    finally:
        tracemalloc.stop()
    assert (tmp_path / "model.safetensors").stat().st_size > weights > 5_000_000

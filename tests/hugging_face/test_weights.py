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
from mini_gpt.hugging_face import architectures, exporting, importing, settings
from mini_gpt.model import build, parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from tests import oracle
from tests.conftest import slow
from tests.hugging_face import numpy_forwards
from tests.hugging_face.models import EXPORTABLE, FURTHER, VOCAB, make, written

TOKENS_BL = np.random.default_rng(5).integers(4, VOCAB, (2, 13))
SOURCE_BS = np.random.default_rng(6).integers(0, VOCAB, (2, 17))
SOURCE_BS[1, 5:] = -1


def by_path(tree):
    listed = jax.tree_util.tree_leaves_with_path(parameters.with_layers(tree, stacked=False))
    return {parameters.path_name(path): np.asarray(leaf) for path, leaf in listed}


def read(directory):
    """Return the config of the model in a directory, and its parameters by path."""
    described = settings.read(directory / "config.json")
    architecture = architectures.find(described)
    fields = importing.read_fields(directory, architecture, described)
    config = loading.load("configs/default.py", FURTHER.get(architecture.model_type, {}) | fields)
    arrays = importing.read_weights(directory, architecture, config.model, described.whole("vocab_size"))
    return config, {path: np.asarray(array) for path, array in arrays.items()}


# Quick: the first of each model_type.
FIRST = {kind: name for name, (kind, _) in reversed(EXPORTABLE.items())}.values()


@pytest.mark.parametrize("name", [*FIRST, *slow(*(name for name in EXPORTABLE if name not in FIRST))])
def test_exported_files_hold_the_model_and_are_read_back(name, tmp_path):
    config, drawn = written(name, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert described["model_type"] == EXPORTABLE[name][0]
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters.with_layers(drawn, stacked=False))
    source_BS = SOURCE_BS if config.model.encoder_layers else None
    sources = [None, None] if source_BS is None else source_BS
    rows = zip(TOKENS_BL, sources, strict=True)
    expected_BLV = np.stack([oracle.forward(config.model, exact, tokens, source=source) for tokens, source in rows])
    found_BLV = numpy_forwards.logits(described, tensors, TOKENS_BL, source_BS)
    assert np.abs(expected_BLV).max() > 3
    # A factor sqrt(d_model) adds a rounding to float32, except for a power of four, as in "t5".
    rounded = config.model.scale_embeddings or name in ("t5, tied, odd", "t5, stacked", "sinusoidal")
    tolerance = 1e-4 if rounded else 1e-9
    np.testing.assert_allclose(found_BLV, expected_BLV, rtol=tolerance, atol=tolerance)

    again, arrays = read(tmp_path / "out")
    original = by_path(drawn)
    gemma = EXPORTABLE[name][0].startswith("gemma")  # its files have the weights of norms minus 1
    if gemma or not config.model.scale_embeddings:
        for path, leaf in original.items():
            if (rounded and path == "final_norm/scale") or (gemma and path.endswith("norm/scale")):
                np.testing.assert_allclose(arrays[path], leaf, rtol=2e-7, atol=1e-7)
            else:
                np.testing.assert_array_equal(arrays[path], leaf, path)
        added = arrays.keys() - original.keys() - ({"positions/learned/embedding"} if name == "sinusoidal" else set())
        assert all(not arrays[path].any() for path in added), "added biases, and positions of a model without, are 0"
    differing = {name for name, _ in loading.differences(config, again).items() if name.startswith("model.")}
    assert differing <= {"model.dtype", "model.scan_layers"} | CHANGED_FIELDS.get(name, set())


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
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters.with_layers(drawn, stacked=False))
    found_BLV = numpy_forwards.logits(described, tensors, tokens_L[None])
    np.testing.assert_allclose(found_BLV[0], oracle.forward(config.model, exact, tokens_L), rtol=1e-4, atol=1e-4)
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

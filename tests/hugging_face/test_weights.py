"""Weights: exported and imported unchanged, and read from all forms of files."""

import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import flax as safetensors_flax
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import exporting, stored
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
    rewrite,
    written,
)

# Exported weights compute the same logits, and are imported unchanged.

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
LENGTHS = {"model.fire.threshold", "model.cope.positions", "model.relative_logits.extent", "model.variants.ssmax_start"}
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


# Files of weights are read in all forms that Transformers writes; incomplete and wrong files are refused.


def test_split_bfloat16_and_older_weight_files_are_read(tmp_path):
    out = tmp_path / "out"
    written("learned", out)
    _, original = read(out)
    tensors = {name: jnp.asarray(tensor) for name, tensor in load_file(out / "model.safetensors").items()}
    (out / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        part = {name.removeprefix("transformer."): tensors[name].astype(jnp.bfloat16) for name in inside}
        part |= {"h.0.attn.bias": jnp.ones((1, 1, 16, 16), jnp.uint8)} if file.startswith("a") else {}
        safetensors_flax.save_file(part, out / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    _, arrays = read(out)
    for path, leaf in original.items():
        assert arrays[path].dtype == np.float32
        np.testing.assert_array_equal(arrays[path], np.asarray(jnp.asarray(leaf).astype(jnp.bfloat16), np.float32))


@pytest.mark.parametrize("name", ["a", "longer", "of eight"])
def test_written_tensors_are_read_by_safetensors_and_are_aligned(name, tmp_path):
    arrays = {name: np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": np.array([1, -2], np.float16)}
    path, layout = tmp_path / "model.safetensors", {name: ("F32", (3, 2)), "b": ("F16", (2,))}
    stored.write(path, layout, arrays.values())
    found = load_file(path)
    assert found.keys() == arrays.keys()
    assert all(found[each].dtype == array.dtype and (found[each] == array).all() for each, array in arrays.items())
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_a_tied_table_may_be_stored_twice_if_equal(tmp_path):
    written("rope", tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors | {"embed_out.weight": tensors["gpt_neox.embed_in.weight"]})
    read(tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors | {"embed_out.weight": 2 * tensors["gpt_neox.embed_in.weight"]})
    with pytest.raises(UserError, match=r"embed_out.weight: it differs from gpt_neox.embed_in.weight, but "):
        read(tmp_path / "out")


@pytest.mark.parametrize("name", ["learned, relu, untied", "rope", *slow("learned", "rope, stacked", "llama", "alibi")])
@pytest.mark.parametrize("other", ["lm_head.weight", "embed_out.weight"])
def test_only_the_output_layer_of_the_architecture_is_expected(name, other, tmp_path):
    config, _ = written(name, tmp_path / "out")
    own = "embed_out.weight" if EXPORTABLE[name][0] == "gpt_neox" else "lm_head.weight"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert (own in tensors) == (not config.model.tie_embeddings)
    if other != own:
        rewrite(tmp_path / "out", lambda tensors: tensors | {other: np.zeros((VOCAB, 32), np.float32)})
        with pytest.raises(UserError, match=f"{other}: unexpected tensor"):
            read(tmp_path / "out")


def test_the_embedding_of_type_0_is_added_to_the_positions(tmp_path):
    written("bert", tmp_path / "out")
    _, before = read(tmp_path / "out")
    types = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    rewrite(tmp_path / "out", lambda tensors: tensors | {"bert.embeddings.token_type_embeddings.weight": types})
    _, after = read(tmp_path / "out")
    table = "positions/learned/embedding"
    np.testing.assert_array_equal(after[table], before[table] + types[0])
    assert all(np.array_equal(after[path], leaf) for path, leaf in before.items() if path != table)


@pytest.mark.parametrize("name", ["bert", "bert, untied, odd", "roberta"])
def test_the_second_bias_of_the_logits_may_be_missing_but_not_differ(name, tmp_path):
    written(name, tmp_path / "out")
    second = "lm_head.decoder.bias" if name == "roberta" else "cls.predictions.decoder.bias"
    _, before = read(tmp_path / "out")
    bias = load_file(tmp_path / "out" / "model.safetensors")[second]
    rewrite(tmp_path / "out", without(second))
    _, after = read(tmp_path / "out")
    assert all(np.array_equal(after[path], leaf) for path, leaf in before.items())
    rewrite(tmp_path / "out", lambda tensors: tensors | {second: bias + 1})
    first = second.replace("decoder.", "")
    with pytest.raises(UserError, match=rf"{second}: it differs from {first}, and Transformers uses one of them$"):
        read(tmp_path / "out")


def test_t5_may_repeat_its_table_and_store_an_unused_bias(tmp_path):
    written("t5", tmp_path / "out")
    _, before = read(tmp_path / "out")
    table = load_file(tmp_path / "out" / "model.safetensors")["shared.weight"]
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = {"encoder.embed_tokens.weight": table, unused: np.zeros((32, 4), np.float32)}
    rewrite(tmp_path / "out", lambda tensors: tensors | more)
    _, after = read(tmp_path / "out")
    assert all(np.array_equal(after[path], leaf) for path, leaf in before.items())
    rewrite(tmp_path / "out", lambda tensors: tensors | {"encoder.embed_tokens.weight": table + 1})
    with pytest.raises(UserError, match=r"encoder.embed_tokens.weight: it differs from shared.weight, but config.json"):
        read(tmp_path / "out")


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    "change, message",
    [
        (without("transformer.ln_f.bias"), r"transformer.ln_f.bias: tensor not found; this GPT-2 config"),
        (
            lambda t: t | {"transformer.h.0.extra": t["transformer.ln_f.bias"]},
            r"h.0.extra: unexpected tensor for this GPT-2",
        ),
        (
            lambda t: {name: t[name] for name in t if ".h.0." not in name} | {"a": t["transformer.ln_f.bias"]},
            r": transformer.h.0.ln_1.weight, (\S+, ){3}\S+ and 7 others: tensors not found; this GPT-2 config needs "
            r"them; a: unexpected tensor for this GPT-2 config$",
        ),
        (
            lambda t: t | {"transformer.h.1.mlp.c_fc.weight": np.zeros((128, 32), np.float32)},
            r"h.1.mlp.c_fc.weight: found the shape \(128, 32\); config.json requires \(32, 128\)",
        ),
        (
            lambda t: t | {"transformer.wte.weight": np.zeros((VOCAB, 32), np.int8)},
            r"wte.weight: found I8; must be one of F64, F32, F16, BF16",
        ),
    ],
)
def test_wrong_tensors_are_refused(change, message, tmp_path):
    written("learned", tmp_path / "out")
    rewrite(tmp_path / "out", change)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "out")


@pytest.mark.parametrize("kept", [0, 4, 60, 0.5, 0.999])
def test_a_truncated_weight_file_is_refused(kept, tmp_path):
    written("learned", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(UserError, match=r"model.safetensors: not a complete safetensors file \(.*\); download it"):
        read(tmp_path / "out")


@pytest.mark.parametrize(
    "index, message",
    [
        (None, r"model.safetensors: not found, but 'pytorch_model.bin'; weights are read from safetensors only, never"),
        ("[]", r"index.json: not an index of files \(TypeError"),
        ('{"weight_map": {"a": "../a"}}', r"index.json: found '../a'; must be a file in the same directory"),
        ('{"weight_map": {"a": ".."}}', r"index.json: found '..'; must be a file in the same directory"),
        (r'{"weight_map": {"a": "a\u0000"}}', r"index.json: found 'a\\x00'; must be a file in the same directory"),
        (r'{"weight_map": {"a": "\ud800"}}', r"index.json: found '\\ud800'; must be a file in the same directory"),
        ('{"weight_map": {"a": "a"}}', r"out/a: not found; model.safetensors.index.json names it"),
    ],
)
def test_missing_weight_files_are_refused(index, message, tmp_path):
    written("learned", tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "out" / "pytorch_model.bin")
    for other in ("optimizer.pt", "scheduler.pt", "training_args.bin"):  # of a Trainer, beside the weights
        (tmp_path / "out" / other).touch()
    if index is not None:
        (tmp_path / "out" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "out")


def test_norms_of_old_bert_files_are_read_by_their_old_names(tmp_path):
    written("bert", tmp_path / "out")
    _, new = read(tmp_path / "out")
    old = lambda name: re.sub(
        r"LayerNorm\.weight$", "LayerNorm.gamma", re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)
    )
    rewrite(tmp_path / "out", lambda tensors: {old(name): tensor for name, tensor in tensors.items()})
    assert any(name.endswith("gamma") for name in load_file(tmp_path / "out" / "model.safetensors"))
    _, again = read(tmp_path / "out")
    for path, leaf in new.items():
        np.testing.assert_array_equal(again[path], leaf)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    written("learned", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "model.safetensors").unlink()
    first, *others = sorted(tensors)
    save_file(tensors, tmp_path / "out" / "a.safetensors")
    save_file({first: 0 * tensors[first]}, tmp_path / "out" / "b.safetensors")
    index = {"weight_map": {first: "b.safetensors"} | dict.fromkeys(others, "a.safetensors")}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{re.escape(first)}: found in two files; only one may have it"):
        read(tmp_path / "out")

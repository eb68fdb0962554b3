"""Exported models compute the same in Transformers, and attention as in PyTorch (`make test-hugging-face`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from mini_gpt.hugging_face import architectures, importing, settings
from mini_gpt.hugging_face.architectures import ARCHITECTURES
from mini_gpt.model import build, parameters
from mini_gpt.model.positions.biases import t5_bucket
from tests.hugging_face.models import EXPORTABLE, LLAMA, VOCAB, written
from tests.model.cores import attend_with_maps, draw, row_context
from tests.model.test_taught_claims import attention_of

# Exported models compute the same in Transformers (`make test-hugging-face`). test_families.py has imports.

TOKENS_BL = np.random.default_rng(5).integers(4, VOCAB, (2, 16))
SOURCE_BS = np.random.default_rng(6).integers(0, VOCAB, (2, 40))
SOURCE_BS[1, 9:] = -1


def ours(config, arrays):
    definition, shapes = build.abstract(config.model, VOCAB)
    named = lambda path, _: jnp.asarray(arrays[parameters.path_name(path)])
    model = nnx.merge(definition, jax.tree_util.tree_map_with_path(named, shapes))
    source = {"source_BS": jnp.asarray(SOURCE_BS)} if config.model.has_encoder else {}
    run = jax.jit(lambda model, tokens_BL, source: model(tokens_BL, **source))
    return np.asarray(run(model, jnp.asarray(TOKENS_BL), source))


def theirs(model):
    tokens_BL, source_BS = torch.from_numpy(TOKENS_BL), torch.from_numpy(SOURCE_BS)
    inputs = {"input_ids": tokens_BL}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": source_BS.clamp(min=0), "attention_mask": source_BS >= 0, "decoder_input_ids": tokens_BL}
    with torch.inference_mode():
        return model.eval()(**inputs).logits.float().numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_reads_rounded_weights(dtype, tmp_path):
    config, _ = written("llama, grouped, biased", tmp_path / "out", dtype=dtype)
    model = loaded(tmp_path / "out", dtype="auto")
    assert {tensor.dtype for tensor in model.parameters()} == {getattr(torch, dtype)}
    assert model.config.dtype == getattr(torch, dtype)
    architecture = architectures.find(settings.read(tmp_path / "out" / "config.json"))
    arrays = importing.read_weights(tmp_path / "out", architecture, config.model, VOCAB)
    assert_equal_logits(theirs(loaded(tmp_path / "out", dtype=torch.float32)), ours(config, arrays), config)


def loaded(directory, **options):
    """Load a model. Raise AssertionError if a tensor is missing, unexpected or of another shape."""
    model_type = settings.read(directory / "config.json").values["model_type"]
    load = getattr(transformers, ARCHITECTURES[model_type].auto_class).from_pretrained
    if model_type == "gemma2":  # other implementations of some versions leave the soft cap out
        options["attn_implementation"] = "eager"
    model, about = load(directory, output_loading_info=True, **options)
    assert not any(about.values()), about
    return model


def assert_equal_logits(found_BLV, expected_BLV, config):
    largest = np.abs(expected_BLV).max()
    assert largest > 3
    # T5 does not scale its scores, so that the rounding errors of random weights grow.
    atol = 1e-4 * (largest if config.model.encoder_layers else 1)
    np.testing.assert_allclose(found_BLV, expected_BLV, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", EXPORTABLE)
def test_transformers_computes_the_same_logits(name, tmp_path):
    config, drawn = written(name, tmp_path / "out")
    listed = jax.tree_util.tree_leaves_with_path(drawn)
    expected_BLV = ours(config, {parameters.path_name(path): leaf for path, leaf in listed})
    assert_equal_logits(theirs(loaded(tmp_path / "out")), expected_BLV, config)


def test_transformers_computes_the_same_if_all_layers_keep_equally_many_heads(monkeypatch, tmp_path):
    kept = {"num_heads": 4, "num_kv_heads": 2, "head_width": 12, "heads": ((0, 3), (1, 2))}
    monkeypatch.setitem(EXPORTABLE, "kept", ("llama", LLAMA | kept))
    config, drawn = written("kept", tmp_path / "out")
    assert settings.read(tmp_path / "out/config.json").values["num_attention_heads"] == 2
    named = {parameters.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(drawn)}
    assert_equal_logits(theirs(loaded(tmp_path / "out")), ours(config, named), config)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 9), (16, 300), (64, 100), (4, 1000)])
def test_the_buckets_of_t5_are_equal(bidirectional, num_buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets, sizes = np.arange(-1500, 1501), {"num_buckets": num_buckets, "max_distance": max_distance}
    found = t5_bucket(jnp.asarray(offsets), causal=not bidirectional, **sizes)
    wanted = T5Attention._relative_position_bucket(torch.from_numpy(offsets), bidirectional=bidirectional, **sizes)
    np.testing.assert_array_equal(found, wanted.numpy())


def test_pytorchs_function_equals_ours_and_returns_no_weights():
    attention = attention_of(4)
    q, k, v = (draw(1, 5, 4, 8, seed=seed) for seed in range(3))
    ours, _ = attend_with_maps(attention.core, q, k, v, row_context(attention.mask, 5))
    theirs = [torch.tensor(np.asarray(x)).swapaxes(1, 2) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    np.testing.assert_allclose(attend(*theirs, is_causal=True).swapaxes(1, 2), ours, atol=1e-5)
    for name in ("need_weights", "return_weights", "enable_flash"):
        with pytest.raises(TypeError, match=name):
            attend(*theirs, **{name: True})

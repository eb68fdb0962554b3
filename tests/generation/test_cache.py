"""Logits from a KV cache, against a full forward pass, for prompts of different lengths."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.data.layout import Layout
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache
from mini_gpt.runtime import sharding
from tests.conftest import slow
from tests.random_models import random_parameters

VOCAB, CAPACITY = 13, 40

VARIANTS = {
    "plain": {},
    "qk_norm": {"qk_norm": "weighted"},
    "ssmax": {"query_scale": "ssmax"},
    "llama4": {"query_scale": "llama4"},
    "soft_cap": {"soft_cap": 2.0},
    "sink": {"sink": "trained"},
    "gate": {"gate": "entry"},
    "canon": {"canon": True},
    "differential": {"differential": True},
    "sticks": {"normaliser": "stick_breaking"},
}
LAYOUTS = list(itertools.product([None, 5, (5, 5, None)], [None, 12]))  # windows, separator of isolated documents
QUICK = (("fox", "canon"), ("pope", "sink"))


def _marks(encoding, variant, chosen):
    """Return the marks of a combination. chosen: whether it is the one of its pair that is not exhaustive."""
    if chosen:
        return () if (encoding, variant) in QUICK else pytest.mark.slow
    return (pytest.mark.slow, pytest.mark.exhaustive)


# One combination of each pair of encoding and variant is chosen, so that each of the two meets all layouts.
COMBINATIONS = [
    pytest.param(encoding, variant, *layout, marks=_marks(encoding, variant, number == (row + column) % len(LAYOUTS)))
    for row, encoding in enumerate(ENCODINGS)
    for column, variant in enumerate(VARIANTS)
    for number, layout in enumerate(LAYOUTS)
    if (encoding, variant) not in (("hard_alibi", "ssmax"), ("path", "soft_cap"))  # refused
]
MODELS = {
    "pattern": {"model.position": ("rope", "none", "t5")},
    "windows and bases": {"model.attention_window": (9, 4), "model.rope.base": (100.0, 1e4, 1e6)},
    "all heads": {"model.position": "fox", "model.num_kv_heads": 4},
    "one key-value head": {"model.position": "pope", "model.num_kv_heads": 1},
    "scanned": {"model.position": "rope", "model.scan_layers": True},
    "post": {"model.position": "sinusoidal", "model.norm_placement": "post", "model.scale_embeddings": True},
    "yarn": {"model.position": "rope", "model.rope.scaling": "yarn", "model.rope.factor": 4.0},
    "yarn by index": {"model.rope.scaling": "yarn_by_index", "model.rope.factor": 4.0},
    "random": {"model.position": "rope", "model.random_positions": 200},
    "random, learned": {"model.position": "learned", "model.random_positions": 64, "model.max_positions": 64},
    "all variants": {
        "model.variants.query_scale": "ssmax",
        "model.variants.qk_norm": "plain",
        "model.variants.sink": "zero",
        "model.variants.gate": "head",
        "model.variants.canon": True,
        "model.rope.turning": 0.5,
    },
    "partial rope": {"model.position": "rope", "model.rope.fraction": 0.5, "model.activation": "swiglu"},
    "head and norm of embeddings": {
        "model.position": "learned",
        "model.embedding_norm": True,
        "model.prediction_head": True,
        "model.norm_epsilon": 1e-3,
    },
    "Phi": {
        "model.parallel_residual": "one_norm",
        "model.output_bias": True,
        "model.qkv_bias": False,
        "model.rope.fraction": 0.5,
        "model.head_width": 12,
        "model.scan_layers": True,
    },
    "OLMo": {"model.norm_weights": False, "model.parallel_residual": "two_norms", "model.attention_out_bias": False},
    "Gemma": {
        "model.output_norm": True,
        "model.output_soft_cap": 3.0,
        "model.scale_width": 5.0,
        "model.variants.soft_cap": 2.0,
        "model.attention_window": (9, None),
        "model.rope.base": (100.0, 1e4),
        "model.rope.scaling": "linear",
        "model.rope.factor": (1.0, 8.0),
    },
    "OLMo 2": {
        "model.norm_placement": "none",
        "model.output_norm": True,
        "model.variants.qk_norm": "all_heads",
        "model.variants.clip_qkv": 0.1,
        "model.scan_layers": True,
    },
    "latent": {"model.variants.latent": 12, "model.num_kv_heads": 4, "model.attention_window": (9, None)},
    "latent, no positions": {
        "model.variants.latent": 40,
        "model.num_kv_heads": 4,
        "model.position": ("rope", "none", "none"),
        "model.variants.sink": "trained",
        "model.scan_layers": True,
    },
    "geglu": {"model.position": "t5", "model.activation": "geglu", "model.norm_placement": "post"},
    "bfloat16": {"model.position": "rope", "model.dtype": "bfloat16"},
    "coupled": {"model.position": "learned"},
}


def make(fields, separator_id=None):
    base = {
        "context_length": 16,
        "model.d_model": 32,
        "model.num_layers": 3,
        "model.dtype": "float32",
        "model.num_kv_heads": 2,
    }
    base |= {"model.max_positions": CAPACITY}
    config = loading.load("configs/default.py", base | fields)
    definition, parameters = random_parameters(config.model, VOCAB, noise=0.3)
    return LoadedModel(parameters, definition, config, sharding.make_mesh(1, 1, 1), 1024, Layout(separator_id))


@pytest.mark.parametrize("encoding, variant, window, separator_id", COMBINATIONS)
def test_cached_logits_equal_a_full_forward_pass(encoding, variant, window, separator_id):
    fields = {f"model.variants.{name}": value for name, value in VARIANTS[variant].items()}
    fields |= {"model.position": encoding, "model.attention_window": window}
    assert_cached_equals_full(make(fields, separator_id))


@pytest.mark.parametrize("name", ["pattern", *slow(*(name for name in MODELS if name != "pattern"))])
def test_cached_logits_of_other_models_equal_a_full_forward_pass(name):
    tolerance = {"rtol": 0.05, "atol": 0.15} if name == "bfloat16" else {}
    model = make(MODELS[name], 12 if name == "random" else None)
    if name == "coupled":
        model = dataclasses.replace(model, layout=Layout(None, (3, 12)))
    assert_cached_equals_full(model, **tolerance)


def test_latent_attention_keeps_one_small_vector_of_each_token():
    """Per token and layer 12 + 4 numbers (4 of the rotated part), where plain attention has 2 · 32."""
    for fields, numbers in (({"model.variants.latent": 12}, 16), ({}, 64)):
        model = make({"model.num_kv_heads": 4} | fields)
        _, kv = cache.prefill(model, jnp.zeros((3, 5), int), jnp.array([5, 2, 4]), CAPACITY)
        assert sum(leaf.size for leaf in jax.tree.leaves(kv.layers)) == 3 * numbers * 3 * CAPACITY


def assert_cached_equals_full(model, rtol=1e-4, atol=2e-4):
    """Compare prompts of different lengths, then one token at a time, far past the context of 16 tokens."""
    tokens_BT = np.random.default_rng(0).integers(0, VOCAB, (3, CAPACITY), np.int32)
    lengths_B = np.array([9, 1, 20])
    layout = model.layout.positions_and_segments(model.config.model, tokens_BT)
    full_BTV = np.asarray(jax.jit(lambda model: model.merge()(tokens_BT, *layout))(model))
    prompts_BL = tokens_BT[:, :20].copy()
    for row, length in enumerate(lengths_B):
        prompts_BL[row, length:] = row  # padding must have no effect
    prefill = jax.jit(lambda model: cache.prefill(model, prompts_BL, jnp.array(lengths_B), CAPACITY))
    decode = jax.jit(cache.decode)
    logits_BV, kv = prefill(model)
    in_order = model.config.model.variants.normaliser == "stick_breaking"  # then all keys are kept
    kinds = model.config.model.layer_kinds
    windows = [CAPACITY if in_order or kind.position in ("cope", "path") else kind.window or CAPACITY for kind in kinds]
    assert [layer.keys_XSK.shape[1] for layer in kv.layers] == windows
    for _ in range(CAPACITY - max(lengths_B)):
        np.testing.assert_allclose(logits_BV, full_BTV[np.arange(3), lengths_B - 1], rtol=rtol, atol=atol)
        logits_BV, kv = decode(model, tokens_BT[np.arange(3), lengths_B], kv)
        lengths_B = lengths_B + 1
    np.testing.assert_allclose(logits_BV, full_BTV[np.arange(3), lengths_B - 1], rtol=rtol, atol=atol)
    assert np.ptp(full_BTV, axis=-1).min() > 0.5

"""Logits from a KV cache, against a full forward pass, for prompts of different lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading as configs
from mini_gpt.generation import cache
from mini_gpt.model import MiniGPT, gpt
from mini_gpt.model.gpt import positions_and_segments
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.positions import ENCODINGS
from mini_gpt.runtime import sharding
from tests.conftest import slow

VOCAB, CAPACITY = 13, 40

MODELS = {name: {"model.position": name} for name in ENCODINGS} | {
    "window": {"model.position": "rope", "model.attention_window": 5},
    "window, alibi": {"model.position": "alibi", "model.attention_window": 7},
    "pattern": {"model.position": ("rope", "none", "t5")},
    "rnope-swa": {"model.position": ("rope", "rope", "none"), "model.attention_window": (5, 5, None)},
    "windows and bases": {"model.attention_window": (9, 4), "model.rope.base": (100.0, 1e4, 1e6)},
    "grouped": {"model.position": "alibi", "model.num_kv_heads": 2},
    "scanned": {"model.position": "rope", "model.scan_layers": True},
    "post": {"model.position": "sinusoidal", "model.norm_placement": "post", "model.scale_embeddings": True},
    "yarn": {"model.position": "rope", "model.rope.scaling": "yarn", "model.rope.factor": 4.0},
    "random": {"model.position": "rope", "model.random_positions": 200},
    "random, learned": {"model.position": "learned", "model.random_positions": 64, "model.max_positions": 64},
    "ssmax, norms": {"model.variants.query_scale": "ssmax", "model.variants.qk_norm": "weighted"},
    "sink, cap, gate": {
        "model.position": "fire",
        "model.num_kv_heads": 2,
        "model.variants.sink": "trained",
        "model.variants.soft_cap": 2.0,
        "model.variants.gate": "entry",
    },
    "ssmax, window": {"model.variants.query_scale": "ssmax", "model.attention_window": 5},
    "window, hard_alibi": {"model.position": "hard_alibi", "model.attention_window": 7},
    "p-rope, zero sink": {"model.rope.turning": 0.5, "model.variants.sink": "zero"},
    "partial rope": {"model.position": "rope", "model.rope.fraction": 0.5, "model.activation": "swiglu"},
    "fox, window": {"model.position": "fox", "model.attention_window": 5, "model.num_kv_heads": 2},
    "pope, windows": {"model.position": "pope", "model.attention_window": (5, None), "model.num_kv_heads": 2},
    "cope, window": {"model.position": "cope", "model.attention_window": 5, "model.num_kv_heads": 2},
    "canon, windows": {"model.variants.canon": True, "model.attention_window": (3, None, 7)},
    "sticks": {"model.position": "none", "model.variants.normaliser": "stick_breaking", "model.num_kv_heads": 2},
    "sticks, window": {"model.variants.normaliser": "stick_breaking", "model.attention_window": 5},
    "bfloat16": {"model.position": "rope", "model.dtype": "bfloat16"},
}


def make(fields, separator_id=None):
    base = {"context_length": 16, "model.d_model": 32, "model.num_layers": 3, "model.dtype": "float32"}
    base |= {"model.max_positions": CAPACITY}
    config = configs.load("configs/default.py", base | fields)
    definition, params = gpt.split(MiniGPT(config.model, VOCAB, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    noisy = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), params)
    return LoadedModel(noisy, definition, config, sharding.make_mesh(1, 1, 1), separator_id, 1024)


# Models that are also tested with isolated documents.
ISOLATED = (
    "learned",
    "t5",
    "fire",
    "kerple",
    "hard_alibi",
    "window",
    "rnope-swa",
    "random",
    "ssmax, norms",
    "ssmax, window",
    "sink, cap, gate",
    "fox, window",
    "pope, windows",
    "cope, window",
    "canon, windows",
    "sticks",
    "sticks, window",
)


QUICK = [("rope", None), ("grouped", None), ("rnope-swa", 12), ("ssmax, window", 12), ("sink, cap, gate", None)]
CASES = [(name, None) for name in MODELS] + [(name, 12) for name in ISOLATED]


@pytest.mark.parametrize("name, separator_id", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_cached_logits_equal_a_full_forward_pass(name, separator_id):
    model = make(MODELS[name], separator_id)
    tokens_BT = np.random.default_rng(0).integers(0, VOCAB, (3, CAPACITY), np.int32)  # far past the context of 16
    lengths_B = np.array([9, 1, 20])
    layout = positions_and_segments(model.config.model, tokens_BT, separator_id)
    full_BTV = np.asarray(jax.jit(lambda model: model.merge()(tokens_BT, *layout))(model))
    prompts_BL = tokens_BT[:, :20].copy()
    for row, length in enumerate(lengths_B):
        prompts_BL[row, length:] = row  # padding must have no effect
    prefill = jax.jit(lambda model: cache.prefill(model, prompts_BL, jnp.array(lengths_B), CAPACITY))
    decode = jax.jit(cache.decode)
    logits_BV, kv = prefill(model)
    windows = [kind.window or CAPACITY for kind in model.config.model.layer_kinds]
    assert [layer.keys_XSK.shape[1] for layer in kv.layers] == windows
    tolerance = {"rtol": 0.05, "atol": 0.15} if name == "bfloat16" else {"rtol": 1e-4, "atol": 2e-4}
    for _ in range(CAPACITY - max(lengths_B)):
        np.testing.assert_allclose(logits_BV, full_BTV[np.arange(3), lengths_B - 1], **tolerance)
        logits_BV, kv = decode(model, tokens_BT[np.arange(3), lengths_B], kv)
        lengths_B = lengths_B + 1
    np.testing.assert_allclose(logits_BV, full_BTV[np.arange(3), lengths_B - 1], **tolerance)
    assert np.ptp(full_BTV, axis=-1).min() > 0.5


@pytest.mark.slow
def test_a_head_mask_applies_with_a_cache_too():
    model = dataclasses.replace(make(MODELS["rope"]), head_mask_NBH=jnp.ones((3, 1, 4)).at[1, 0, 2].set(0.0))
    tokens_BT = np.random.default_rng(0).integers(0, VOCAB, (2, 9), np.int32)
    full_BTV = model.logits(tokens_BT)
    logits_BV, kv = jax.jit(lambda model: cache.prefill(model, tokens_BT[:, :8], jnp.array([8, 8]), 9))(model)
    np.testing.assert_allclose(logits_BV, full_BTV[:, 7], rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(
        jax.jit(cache.decode)(model, tokens_BT[:, 8], kv)[0], full_BTV[:, 8], rtol=1e-4, atol=2e-4
    )
    unmasked_BTV = dataclasses.replace(model, head_mask_NBH=None).logits(tokens_BT)
    assert np.abs(unmasked_BTV - full_BTV).max() > 0.1

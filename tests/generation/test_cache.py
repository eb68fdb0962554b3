"""Logits from a cache are those of a full forward pass, at every place, for rows of different lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading as configs
from mini_gpt.generation import cache
from mini_gpt.model import MiniGPT, parameters
from mini_gpt.model.gpt import text_layout
from mini_gpt.model.positions import ENCODINGS

VOCAB, CAPACITY = 13, 40

MODELS = {name: {"model.position": name} for name in ENCODINGS} | {
    "window": {"model.position": "rope", "model.attention_window": 5},
    "window, alibi": {"model.position": "alibi", "model.attention_window": 7},
    "pattern": {"model.position": ("rope", "none", "t5")},
    "grouped": {"model.position": "alibi", "model.num_kv_heads": 2},
    "scanned": {"model.position": "rope", "model.scan_layers": True},
    "post": {"model.position": "sinusoidal", "model.norm_placement": "post", "model.scale_embeddings": True},
    "yarn": {"model.position": "rope", "model.rope.scaling": "yarn", "model.rope.factor": 4.0},
    "random": {"model.position": "rope", "model.random_positions": 200},
    "random, learned": {"model.position": "learned", "model.random_positions": 64, "model.max_positions": 64},
    "partly turned": {"model.position": "rope", "model.rope.fraction": 0.5, "model.activation": "swiglu"},
    "bfloat16": {"model.position": "rope", "model.dtype": "bfloat16"},
}


def make(fields):
    base = {"context_length": 16, "model.d_model": 32, "model.num_layers": 3, "model.dtype": "float32"}
    base |= {"model.max_positions": CAPACITY}
    config = configs.load("configs/default.py", base | fields).model
    definition, drawn = parameters.split(MiniGPT(config, VOCAB, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(drawn))))
    larger = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), drawn)
    return parameters.merge(definition, larger)


APART = ("learned", "t5", "window", "random")  # some that keep documents apart too, at the separator 12


SLOW = ("sinusoidal", "window, alibi", "post", "yarn", "random, learned", "partly turned", "bfloat16")
CASES = [(name, None) for name in MODELS] + [(name, 12) for name in APART]


@pytest.mark.parametrize(
    "name, isolate_at",
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in SLOW else []) for case in CASES],
)
def test_C7_cached_logits_are_those_of_the_whole(name, isolate_at):
    model = make(MODELS[name])
    tokens_BT = np.random.default_rng(0).integers(0, VOCAB, (3, CAPACITY), np.int32)  # far past the context of 16
    lengths_B = np.array([9, 1, 20])
    layout = text_layout(model.config, tokens_BT, isolate_at)
    whole_BTV = np.asarray(jax.jit(lambda model: model(tokens_BT, *layout))(model))
    prompts_BL = tokens_BT[:, :20].copy()
    for row, length in enumerate(lengths_B):
        prompts_BL[row, length:] = row  # what fills a row up must not matter
    prefill = jax.jit(lambda model: cache.prefill(model, prompts_BL, jnp.array(lengths_B), CAPACITY, isolate_at))
    decode = jax.jit(lambda model, tokens_B, kept: cache.decode(model, tokens_B, kept, isolate_at))
    logits_BV, kept = prefill(model)
    assert len(kept.keys_NXSK) == 3 and kept.places_BS.shape[1] == (model.config.attention_window or CAPACITY)
    tolerance = {"rtol": 0.05, "atol": 0.15} if name == "bfloat16" else {"rtol": 1e-4, "atol": 2e-4}
    for _ in range(CAPACITY - max(lengths_B)):
        np.testing.assert_allclose(logits_BV, whole_BTV[np.arange(3), lengths_B - 1], **tolerance)
        logits_BV, kept = decode(model, tokens_BT[np.arange(3), lengths_B], kept)
        lengths_B = lengths_B + 1
    np.testing.assert_allclose(logits_BV, whole_BTV[np.arange(3), lengths_B - 1], **tolerance)
    assert np.ptp(whole_BTV, axis=-1).min() > 0.5

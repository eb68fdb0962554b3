"""The reference attention against float64 loops, masks against written-out matrices, maps and statistics."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.data import tasks
from mini_gpt.data.layout import PLAIN
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.attention import attention_statistics
from mini_gpt.insight.observing import layers
from mini_gpt.insight.training_curves import attention_metrics
from mini_gpt.model import MiniGPT, build
from mini_gpt.model.attention.context import Mask
from mini_gpt.model.attention.multi_head import MultiHeadAttention, split_heads
from mini_gpt.model.attention.reference import attend
from mini_gpt.objectives.tasks import TaskObjective
from mini_gpt.runtime import sharding
from tests import oracle
from tests.conftest import slow
from tests.model.cores import GivenMask, attend_with_maps, draw, make_core, row_context, visible_BLS
from tests.random_models import random_model


def test_projections_and_heads_have_the_expected_shapes():
    config = loading.load("configs/default.py", {"model.d_model": 8, "model.num_heads": 2}).model
    attention = MultiHeadAttention(config, config.layer_kinds[0], rngs=nnx.Rngs(0))
    x_BLD = draw(1, 3, 8)
    assert attention.query(x_BLD).shape == (1, 3, 8)
    heads_BLHK = split_heads(attention.query(x_BLD), 2)
    assert heads_BLHK.swapaxes(1, 2).shape == (1, 2, 3, 4)
    np.testing.assert_array_equal(heads_BLHK[0, :, 1], attention.query(x_BLD)[0, :, 4:])
    assert attention(x_BLD, row_context(None, 3)).shape == (1, 3, 8)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attend_equals_loops_in_float64(kv_heads):
    B, L, S, H, K = 2, 5, 7, 4, 6
    q, k, v = draw(B, L, H, K), draw(B, S, kv_heads, K, seed=1), draw(B, S, kv_heads, K, seed=2)
    visible = np.random.default_rng(0).random((B, L, S)) < 0.6
    visible[:, :, 0] = True
    core, bias = make_core(0.3), draw(B, H, L, S, seed=3)
    core.score_mods.append(lambda logits_BHLS, context: logits_BHLS + bias)
    out, maps = attend_with_maps(core, q, k, v, row_context(GivenMask(jnp.array(visible)), L))
    q, k, v, bias = (np.asarray(x, np.float64) for x in (q, k, v, bias))
    for b in range(B):
        for h in range(H):
            g = h // (H // kv_heads)
            logits = 0.3 * q[b, :, h] @ k[b, :, g].T + bias[b, h]
            weights = oracle.softmax(np.where(visible[b], logits, -np.inf))
            np.testing.assert_allclose(maps.logits_BHLS[b, h], logits, atol=1e-5)
            np.testing.assert_allclose(maps.weights_BHLS[b, h], weights, atol=1e-6)
            np.testing.assert_allclose(out[b, :, h], weights @ v[b, :, g], atol=1e-5)


@pytest.mark.parametrize("fields", [{}, *slow({"model.scan_layers": True}, {"model.remat": "block"})], ids=str)
def test_observed_weights_sum_to_one_for_visible_keys(fields):
    config = loading.load("configs/tiny.py", {"model.num_layers": 3, "model.num_kv_heads": 2} | fields).model
    definition, parameters = nnx.split(MiniGPT(config, 257, rngs=nnx.Rngs(0)))
    seen = lambda parameters, tokens: layers(nnx.merge(definition, parameters), (tokens,))
    weights = jax.jit(lambda *inputs: [layer.attention.weights_BHLS for layer in seen(*inputs)])
    maps = weights(parameters, jnp.arange(20).reshape(2, 10))
    assert [weights_BHLS.shape for weights_BHLS in maps] == [(2, config.num_heads, 10, 10)] * 3
    for weights_BHLS in maps:
        np.testing.assert_allclose(weights_BHLS.sum(-1), 1, atol=1e-6)
        assert (np.triu(weights_BHLS, 1) == 0).all()


def test_maps_that_are_reduced_are_in_memory_one_layer_at_a_time():
    fields = {"model.num_layers": 12, "model.scan_layers": True, "context_length": 256, "model.num_heads": 4}
    definition, shapes = build.abstract(loading.load("configs/tiny.py", fields).model, 257)

    def entropies(parameters, tokens):
        observed = layers(nnx.merge(definition, parameters), (tokens,))
        return [jax.scipy.special.entr(layer.attention.weights_BHLS).sum() for layer in observed]

    compiled = jax.jit(entropies).lower(shapes, jax.ShapeDtypeStruct((8, 256), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * (8 * 4 * 256 * 256 * 4)


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16", "float16")])
def test_a_query_without_visible_keys_gives_zero(dtype):
    q, k, v = (draw(1, 3, 2, 4, seed=s, dtype=jnp.dtype(dtype)) for s in range(3))
    visible = jnp.array([[[True, False, False], [False, False, False], [True, True, False]]])

    def total(q, k, v):
        out, maps = attend_with_maps(make_core(0.5, num_heads=2), q, k, v, row_context(GivenMask(visible), 3))
        return jnp.sum(out.astype(jnp.float32) ** 2), (out, maps)

    (_, (out, maps)), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    assert out.dtype == dtype
    assert (out[0, 1] == 0).all() and (maps.weights_BHLS[0, :, 1] == 0).all()
    np.testing.assert_array_equal(out[0, 0], v[0, 0])
    assert (maps.weights_BHLS[0, :, 2, 2] == 0).all(), "a masked key has exactly zero weight"
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert (gradients[0][0, 1] == 0).all() and (gradients[2][0, 2] == 0).all()


def test_large_float16_logits_do_not_overflow():
    q = jnp.full((1, 2, 1, 64), 60.0, jnp.float16)
    out = attend(make_core(num_heads=1), q, q, draw(1, 2, 1, 64, dtype=jnp.float16), row_context(Mask(True), 2))
    assert jnp.isfinite(out).all()


def test_masks_equal_written_out_matrices():
    on, off = True, False
    causal = [[on, off, off], [on, on, off], [on, on, on]]
    np.testing.assert_array_equal(visible_BLS(3), [causal])
    np.testing.assert_array_equal(visible_BLS(3, causal=False), np.ones((1, 3, 3), bool))
    segments = jnp.array([[1, 1, 2]])
    isolated = [[on, off, off], [on, on, off], [off, off, on]]
    np.testing.assert_array_equal(visible_BLS(3, segments_BL=segments), [isolated])
    both_ways = [[on, on, off], [on, on, off], [off, off, on]]
    np.testing.assert_array_equal(visible_BLS(3, causal=False, segments_BL=segments), [both_ways])
    near = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    np.testing.assert_array_equal(visible_BLS(4, window=2), [near])
    around = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    np.testing.assert_array_equal(visible_BLS(4, causal=False, window=2), [around])


def test_the_scale_keeps_the_logits_variance_at_one():
    K = 64
    q, k = draw(8, 64, 2, K), draw(8, 64, 2, K, seed=1)
    context = row_context(Mask(False), 64)
    for scale, variance in ((1 / math.sqrt(K), 1.0), (1.0, K)):
        _, maps = attend_with_maps(make_core(scale, num_heads=2), q, k, k, context)
        assert float(jnp.var(maps.logits_BHLS)) == pytest.approx(variance, rel=0.1)


@pytest.mark.slow
def test_attention_statistics_use_visible_pairs_without_padding():
    config = loading.load("configs/tiny.py", {"model.position": "alibi"})
    module, tokens = MiniGPT(config.model, 257, rngs=nnx.Rngs(0)), jnp.arange(24).reshape(2, 12)
    definition, params = build.split(module)
    maps = [layer.attention for layer in layers(module, (tokens,))]
    model = LoadedModel(params, definition, config, sharding.make_mesh(1, 1, 1), 1024, PLAIN)
    lengths = (9, 12)  # the first row has three tokens of padding
    is_query_BL = np.arange(12) < np.array(lengths)[:, None]
    statistics, maps_NHLS = attention_statistics(model, np.asarray(tokens), is_query_BL)
    assert len(statistics) == (2 + config.model.num_heads) * config.model.num_layers
    is_seen_LS = np.tril(np.ones((9, 9), bool))
    shown = np.stack([np.where(is_seen_LS, m.weights_BHLS[0, :, :9, :9], np.nan) for m in maps])
    np.testing.assert_allclose(maps_NHLS, shown, rtol=1e-4, atol=1e-6)
    for layer, m in enumerate(maps):
        queries = [(b, i) for b in range(2) for i in range(lengths[b])]
        logits = [m.logits_BHLS[b, h, i, : i + 1] for h in range(4) for b, i in queries]
        variance = np.var(np.concatenate(logits))
        assert statistics[f"attention/logit_variance/layer_{layer}"] == pytest.approx(variance, rel=1e-4)
        entropies = []
        for head in range(4):
            weights = [np.asarray(m.weights_BHLS[b, head, i, : i + 1]) for b, i in queries]
            entropies.append(np.mean([-(w * np.log(w)).sum() for w in weights]))
            found = statistics[f"attention/entropy/layer_{layer}/head_{head}"]
            assert found == pytest.approx(entropies[-1], rel=1e-4)
        assert statistics[f"attention/entropy/layer_{layer}"] == pytest.approx(np.mean(entropies), rel=1e-4)


@pytest.mark.slow
def test_padding_does_not_change_the_attention_curves_of_a_task():
    fields = {"data.task_length": 6, "model.num_layers": 1, "model.d_model": 16, "model.num_heads": 2}
    tokenizer, logged = CharacterTokenizer(tasks.ALPHABET), []
    for length in (14, 30):
        config = loading.load("configs/tasks.py:copy", fields | {"context_length": length})
        evaluator = TaskObjective(config, tokenizer, lambda _: None)
        curves, _ = attention_metrics(random_model(config, tokenizer.token_bytes), evaluator.probe_row)
        logged.append((evaluator.problems[0], curves))
    assert logged[0][0] == logged[1][0] and logged[0][1] == pytest.approx(logged[1][1], rel=1e-4)

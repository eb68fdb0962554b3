"""Attention and its masks against loops and written-out matrices, and encodings that depend on content."""

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
from mini_gpt.model.attention import reference, rows
from mini_gpt.model.attention.context import Mask
from mini_gpt.model.attention.multi_head import MultiHeadAttention, split_heads
from mini_gpt.model.attention.reference import attend
from mini_gpt.model.attention.variants import Canon
from mini_gpt.model.positions import biases, waves
from mini_gpt.model.positions.contextual import Fox
from mini_gpt.objectives.tasks import TaskObjective
from mini_gpt.runtime import sharding
from tests import oracle
from tests.conftest import slow
from tests.model.cores import GivenMask, attend_with_maps, draw, make_core, row_context, visible_BLS
from tests.random_models import random_model

# The reference attention against float64 loops, masks against written-out matrices, maps and statistics.


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


# Encodings and variants of attention that depend on content: known values, invariances, and known traps.


def make(name="rope", **fields):
    named = {f"model.{field}": value for field, value in fields.items()} | {"model.position": name}
    base = {"model.d_model": 32, "model.num_heads": 4, "model.num_layers": 1, "model.dtype": "float32"}
    return loading.load("configs/default.py", base | named).model


def encoding(name, **fields):
    config = make(name, **fields)
    return config.encodings[name](config, rngs=nnx.Rngs(0))


def test_alibi_is_forgetting_with_constant_gates():
    slopes = biases.alibi_slopes(4)
    sums_BLH = jnp.cumsum(jnp.broadcast_to(-jnp.array(slopes), (1, 20, 4)), axis=1)
    heads = [draw(1, 20, 4, 8, seed=seed) for seed in range(3)]
    wanted = reference.attend(make_core(position="alibi"), *heads, row_context(Mask(True), 20))
    found = reference.attend(make_core(position="fox"), *heads, row_context(Mask(True), 20, sums_BLH=sums_BLH))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_gates_of_fox_are_float32_and_start_as_in_the_released_code():
    config = make("fox", d_model=512, dtype="bfloat16")
    fox = Fox(config, rngs=nnx.Rngs(0))
    assert fox.gate.kernel[...].std() == pytest.approx(0.02, rel=0.1) and not fox.gate.bias[...].any()
    assert fox.log_gates(jnp.ones((1, 3, 512), jnp.bfloat16)).dtype == jnp.float32
    np.testing.assert_allclose(encoding("fox").log_gates(jnp.zeros((1, 3, 32))), np.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("name", ["fox", *slow("cope", "none", "accumulated")])
def test_content_encodings_do_not_depend_on_given_positions(name):
    definition, state = nnx.split(MiniGPT(make(name), 11, rngs=nnx.Rngs(0)))
    noisy = jax.tree.map(lambda leaf: leaf + 0.3 * draw(*leaf.shape, seed=1), state)
    logits = jax.jit(lambda positions_BL: nnx.merge(definition, noisy)(jnp.arange(10)[None], positions_BL))
    np.testing.assert_array_equal(logits(jnp.arange(10)[None]), logits(7 + 3 * jnp.arange(10)[None]))


@pytest.mark.parametrize("step", [1.0, 0.5])
def test_accumulated_positions_with_equal_steps_are_those_of_rope(step):
    made, rope = (encoding(name, num_kv_heads=2, **{"rope.base": 50.0}) for name in ("accumulated", "rope"))
    made.steps.project.kernel[...] *= 0
    made.steps.log_step[...] += np.log(step)
    q, k, x = draw(1, 9, 4, 8, seed=0), draw(1, 9, 2, 8, seed=1), draw(1, 9, 32, seed=2)
    at = jnp.arange(9)[None]
    logits = lambda q, k: jnp.einsum("blhk,bshk->bhls", q, jnp.repeat(k, 2, axis=2), precision="highest")
    found = logits(*made.turn(q, k, made.steps(x, row_context(Mask(True), 9))[1]))
    np.testing.assert_allclose(found, logits(rope.rotate(q, step * at), rope.rotate(k, step * at)), atol=1e-4)


def test_a_step_of_accumulated_positions_moves_all_later_tokens_of_a_head():
    steps = encoding("accumulated", num_kv_heads=2).steps
    x = jnp.ones((1, 6, 32))
    places = lambda x: steps(x, row_context(Mask(True), 6))[1].queries.sums_BLH[0]
    moved = places(x.at[0, 2].multiply(-3.0)) - places(x)  # the length of an input has no effect
    change = -2 * steps.project(x[0, :1])[0] / 32**0.5
    np.testing.assert_allclose(moved, np.outer([0, 0, 1, 1, 1, 1], change), atol=1e-5)


@pytest.mark.parametrize("name", ["accumulated", *slow("path", "relative_logits", "fox")])
def test_parameters_of_content_encodings_have_the_right_gradients(name):
    """Against differences of the loss, for a step of all parameters of the encoding."""
    definition, state = nnx.split(MiniGPT(make(name), 11, rngs=nnx.Rngs(0)))
    noisy = jax.tree.map(lambda leaf: leaf + 0.3 * draw(*leaf.shape, seed=1), state)
    loss = jax.jit(
        lambda state: jnp.sum(jax.nn.log_softmax(nnx.merge(definition, state)(jnp.arange(10)[None]))[..., 0])
    )
    gradient = jax.jit(jax.grad(loss))(noisy)
    own = lambda path: any(part in jax.tree_util.keystr(path) for part in ("on_input", "score_mods"))
    uphill = jax.tree_util.tree_map_with_path(lambda path, leaf: own(path) * leaf, gradient)
    slope = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(uphill))))
    moved = lambda by: float(loss(jax.tree.map(lambda x, d: x + by / slope * d, noisy, uphill)))
    assert slope > 1e-3 and (moved(0.003) - moved(-0.003)) / 0.006 == pytest.approx(slope, rel=0.05)


def test_relative_logits_add_the_profiles_weighted_by_the_query():
    """As in Transformers' Inkling: the distance is clamped, and what is outside is masked."""
    profiles = encoding("relative_logits", **{"relative_logits.extent": 4}).profiles
    profiles.table[...] = table_RE = draw(16, 4, seed=1)
    weights_BLHR, at_L = draw(1, 6, 4, 16, seed=2), np.array([0, 1, 2, 3, 7, 9])
    context = row_context(Mask(True), 6, positions_BL=jnp.array(at_L)[None])._replace(of_queries_BLHR=weights_BLHR)
    found_HLS = profiles(jnp.ones((1, 4, 6, 6)), context)[0]
    by_distance_LHE = np.float64(weights_BLHR[0]) @ np.float64(table_RE)
    for i, j in np.ndindex(6, 6):
        is_near = 0 <= at_L[i] - at_L[j] < 4
        wanted_H = 1 + by_distance_LHE[i, :, at_L[i] - at_L[j]] if is_near else np.ones(4)
        np.testing.assert_allclose(found_HLS[:, i, j], wanted_H, atol=1e-5)


def polar_logits(offset):
    pope = encoding("pope", num_kv_heads=2)
    pope.phases[...] = draw(2, 8, seed=3)
    q, k, at = draw(1, 12, 4, 8, seed=0), draw(1, 12, 2, 8, seed=1), jnp.arange(12)[None] + offset
    q_BLHK, k_BSGK = pope.rotate(q, at), jnp.repeat(pope.rotate_keys(k, at), 2, axis=2)
    return jnp.einsum("blhk,bshk->hls", q_BLHK, k_BSGK, precision="highest"), pope, q, k


def test_pope_depends_on_the_offset_only_and_equals_its_formula():
    logits_HLS, pope, q, k = polar_logits(0)
    np.testing.assert_allclose(logits_HLS, polar_logits(500)[0], atol=2e-3)
    i, j, h = 9, 4, 3
    moduli = oracle.softplus(np.asarray(q[0, i, h], np.float64)) * oracle.softplus(np.asarray(k[0, j, 1], np.float64))
    angles = (j - i) * 10_000.0 ** (-np.arange(8) / 8) + np.asarray(pope.phases[...])[1]
    assert logits_HLS[h, i, j] == pytest.approx((moduli * np.cos(angles)).sum(), abs=1e-4)


def test_the_phases_of_pope_are_trained_from_zero():
    """A clamp to at most 0, as in a public implementation, would stop a phase that has become positive."""
    definition, state = nnx.split(encoding("pope"))
    assert not state["phases"][...].any()
    q, k, at = draw(1, 6, 4, 8, seed=0), draw(1, 6, 4, 8, seed=1), jnp.arange(6)[None]

    def total(state):
        pope = nnx.merge(definition, state)
        return jnp.sum(pope.rotate(q, at) * pope.rotate_keys(k, at)[:, ::-1])

    positive = jax.tree.map(lambda leaf: leaf + 0.5, state)
    for gradient in map(jax.grad(total), (state, positive)):
        assert np.abs(gradient["phases"][...]).min() > 1e-4


def test_contextual_positions_count_gates_and_share_the_last_row():
    """Wide open gates count tokens: the own key has position 1. The table ends at row 3."""
    q = jnp.ones((1, 6, 1, 2))
    table = jnp.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [7.0, 0.0]])
    visible = visible_BLS(6)
    bias = rows.contextual_bias(q, jnp.full((1, 1, 6, 6), 30.0), visible, table)[0, 0]
    np.testing.assert_allclose(bias[5], [7, 7, 7, 7, 2, 1], atol=1e-5)
    half = rows.contextual_bias(q, jnp.zeros((1, 1, 6, 6)), visible, table)[0, 0]  # gates of 1/2
    np.testing.assert_allclose(half[5], [7, 4.5, 2, 1.5, 1, 0.5], atol=1e-5)
    np.testing.assert_allclose(half[2, :3], [1.5, 1, 0.5], atol=1e-5)  # keys after the query open no gate


def test_selective_attention_subtracts_the_first_heads_earlier_logits():
    logits = jnp.array([[[[9.0, 9, 9, 9], [5, 6, 9, 9], [5, 2, 7, 9], [5, 3, 1, 8]]] * 2])
    found = rows.selective_penalty(logits.at[:, 1].set(50.0), visible_BLS(4))[0]
    # Not by the query itself, not the own key, not the first key.
    np.testing.assert_array_equal(found, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0]])
    assert not rows.selective_penalty(-logits, visible_BLS(4)).any()
    apart = rows.selective_penalty(logits, visible_BLS(4, segments_BL=jnp.array([[0, 1, 1, 1]])))[0]
    np.testing.assert_array_equal(apart, np.zeros((4, 4)))  # token 1 is now the first of its document


def test_stick_breaking_weights_add_up_to_1_and_prefer_recent_keys():
    logits = draw(2, 3, 7, 7, seed=0)
    visible = visible_BLS(7, window=4, segments_BL=jnp.array([[0] * 7, [0] * 3 + [1] * 4]))
    weights = rows.stick_breaking(logits, visible)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not np.asarray(weights)[~np.broadcast_to(visible[:, None], weights.shape)].any()
    for b, h, i in ((0, 1, 6), (1, 2, 4), (1, 0, 3)):
        wanted = oracle.sticks(np.asarray(logits[b, h, i], np.float64), visible[b, i])
        np.testing.assert_allclose(weights[b, h, i], wanted, atol=1e-6)
    even = rows.stick_breaking(jnp.zeros((1, 1, 4, 4)), visible_BLS(4))[0, 0]
    np.testing.assert_allclose(even[3], [1 / 8, 1 / 4, 1 / 2, 1 / 8], rtol=1e-6)  # the rest is for the token itself


def test_a_canon_layer_starts_like_a_convolution_and_stays_in_its_document():
    canon = Canon(make(), rngs=nnx.Rngs(0))
    assert 0.4 < np.abs(canon.taps[...]).max() <= 0.5  # not 0.02
    x = draw(1, 9, 32, seed=0)
    convolved = lambda x, segments=None: canon(x, row_context(None, x.shape[1], segments_BL=segments))[0]
    parts = [convolved(part) for part in (x[:, :5], x[:, 5:])]
    np.testing.assert_array_equal(convolved(x, jnp.array([[0] * 5 + [1] * 4])), jnp.concatenate(parts, axis=1))
    moved = convolved(x.at[0, 6].set(0.0)) != convolved(x)
    assert np.flatnonzero(moved.any(-1)[0]).tolist() == [6, 7, 8] and not moved[0, :6].any()


def test_dynamic_ntk_follows_the_length_of_each_row():
    fields = {"rope.scaling": "dynamic", "rope.factor": 4.0, "rope.original_context": 16}
    rope, plain = encoding("rope", **fields), encoding("rope")
    x = draw(2, 8, 4, 8, seed=0)
    short, long = jnp.arange(8), jnp.arange(8) * 5 + 4  # lengths 8 and 36
    found = rope.rotate(x, jnp.stack([short, long]))
    np.testing.assert_array_equal(found[0], plain.rotate(x, short[None])[0])
    stretched = encoding("rope", **{"rope.base": 10_000.0 * (4 * 36 / 16 - 3) ** (8 / 6)})
    np.testing.assert_allclose(found[1], stretched.rotate(x, long[None])[1], atol=1e-5)
    frequencies = waves.dynamic_frequencies(
        rope.frequencies, rope.factor, rope.config.original_context, jnp.array([16, 17])
    )
    np.testing.assert_array_equal(frequencies[0], np.float32(plain.frequencies))
    assert (frequencies[1, 1:] < frequencies[0, 1:]).all() and frequencies[1, 0] == 1

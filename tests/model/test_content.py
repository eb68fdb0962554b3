"""Encodings and variants of attention that depend on content: known values, invariances, and known traps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.model import MiniGPT
from mini_gpt.model.attention import reference, rows
from mini_gpt.model.attention.context import Mask
from mini_gpt.model.attention.variants import Canon
from mini_gpt.model.positions import biases, waves
from mini_gpt.model.positions.contextual import Fox
from tests import oracle
from tests.conftest import slow
from tests.model.cores import draw, make_core, row_context, visible_BLS


def make(name="rope", **fields):
    named = {f"model.{field}": value for field, value in fields.items()} | {"model.position": name}
    base = {"model.d_model": 32, "model.num_heads": 4, "model.num_layers": 1, "model.dtype": "float32"}
    return loading.load("configs/default.py", base | named).model


def encoding(name, **fields):
    config = make(name, **fields)
    return config.encodings[name](config, rngs=nnx.Rngs(0))


def test_alibi_is_forgetting_with_constant_gates():
    slopes = biases.alibi_slopes(4)
    decay_BLH = jnp.cumsum(jnp.broadcast_to(-jnp.array(slopes), (1, 20, 4)), axis=1)
    heads = [draw(1, 20, 4, 8, seed=seed) for seed in range(3)]
    wanted = reference.attend(make_core(position="alibi"), *heads, row_context(Mask(True), 20))
    found = reference.attend(make_core(position="fox"), *heads, row_context(Mask(True), 20, decay_BLH=decay_BLH))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_gates_of_fox_are_float32_and_start_as_in_the_released_code():
    config = make("fox", d_model=512, dtype="bfloat16")
    fox = Fox(config, rngs=nnx.Rngs(0))
    assert fox.gate.kernel[...].std() == pytest.approx(0.02, rel=0.1) and not fox.gate.bias[...].any()
    assert fox.log_gates(jnp.ones((1, 3, 512), jnp.bfloat16)).dtype == jnp.float32
    np.testing.assert_allclose(encoding("fox").log_gates(jnp.zeros((1, 3, 32))), np.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("name", ["fox", *slow("cope", "none")])
def test_content_encodings_do_not_depend_on_given_positions(name):
    definition, state = nnx.split(MiniGPT(make(name), 11, rngs=nnx.Rngs(0)))
    noisy = jax.tree.map(lambda leaf: leaf + 0.3 * draw(*leaf.shape, seed=1), state)
    logits = jax.jit(lambda positions_BL: nnx.merge(definition, noisy)(jnp.arange(10)[None], positions_BL))
    np.testing.assert_array_equal(logits(jnp.arange(10)[None]), logits(7 + 3 * jnp.arange(10)[None]))


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

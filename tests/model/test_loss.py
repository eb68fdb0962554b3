"""The loss against float64 NumPy, and the chunked loss against the plain one: values, memory, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mini_gpt.model import loss as losses
from mini_gpt.runtime import sharding
from mini_gpt.training import train_state
from mini_gpt.training.step import make_step
from tests.conftest import slow

B, L, D, V = 8, 6, 5, 11


@pytest.fixture
def logits_and_targets():
    return 3 * jax.random.normal(jax.random.key(0), (2, 5, 11)), jnp.arange(10).reshape(2, 5)


def log_probabilities(logits):
    exact = np.asarray(logits, np.float64)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def test_nll_is_the_log_probability_of_the_target(logits_and_targets):
    logits, targets = logits_and_targets
    exact = -np.take_along_axis(log_probabilities(logits), np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses.nll(logits, targets), exact, rtol=1e-5)
    assert losses.nll(logits.astype(jnp.bfloat16), targets).dtype == jnp.float32


def loss_sum(logits_BLV, targets_BL, weights_BL, smoothing):
    """Return the objective. The logits are passed as hidden states, with the identity as unembedding table."""
    table_VV, mesh = jnp.eye(logits_BLV.shape[-1]), sharding.make_mesh(1, 1, 1)
    return losses.loss_sums(logits_BLV, table_VV, targets_BL, weights_BL, losses.LossOptions(smoothing), mesh)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothing_is_cross_entropy_against_the_mixture(logits_and_targets, smoothing):
    logits, targets = logits_and_targets
    mixture = (1 - smoothing) * np.eye(11)[np.asarray(targets)] + smoothing / 11
    exact = -(mixture * log_probabilities(logits)).sum(-1)
    of_weights = jax.jit(lambda weights_BL: loss_sum(logits, targets, weights_BL, smoothing))
    tokens = np.eye(10, dtype=np.float32).reshape(10, 2, 5)  # one token has weight 1
    np.testing.assert_allclose([of_weights(weights_BL) for weights_BL in tokens], exact.ravel(), rtol=1e-5)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    x_BLD, table_VD = rng.normal(size=(B, L, D)), rng.normal(size=(V, D))
    weights_BL = rng.random((B, L)) * (rng.random((B, L)) < 0.7)
    return jnp.float32(x_BLD), jnp.float32(table_VD), rng.integers(V, size=(B, L)), jnp.float32(weights_BL)


def plain_logits(x_BLD, table_VD, soft_cap):
    logits_BLV = jnp.einsum("bld,vd->blv", x_BLD, table_VD)
    return soft_cap * jnp.tanh(logits_BLV / soft_cap) if soft_cap else logits_BLV


def plain(x_BLD, table_VD, targets_BL, weights_BL, smoothing, soft_cap=None):
    logits_BLV = plain_logits(x_BLD, table_VD, soft_cap)
    mixture_BLV = optax.smooth_labels(jax.nn.one_hot(targets_BL, table_VD.shape[0]), smoothing)
    objective_BL = optax.softmax_cross_entropy(logits_BLV, mixture_BLV)
    return jnp.sum(objective_BL * weights_BL), jnp.sum(losses.nll(logits_BLV, targets_BL) * weights_BL)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("chunks, smoothing, soft_cap", [(4, 0.1, 1.5), *slow((1, 0.1, None), (4, 0.0, None))])
def test_the_chunked_loss_equals_the_plain_one(arrays, monkeypatch, mesh, chunks, smoothing, soft_cap):
    mesh = sharding.make_mesh(*mesh)
    rows = B // (mesh.shape["data"] * mesh.shape["fsdp"])
    monkeypatch.setattr(losses, "LIMIT", 4 * rows * L * V // chunks)
    chunked = lambda *arrays: losses.loss_sums(*arrays, losses.LossOptions(smoothing, soft_cap), mesh)
    with_gradient = lambda function: jax.jit(
        lambda *arrays: jax.value_and_grad(lambda *a: (3 * function(*a)[0], function(*a)[1]), (0, 1), True)(*arrays)
    )
    found = with_gradient(chunked)(*arrays)
    wanted = with_gradient(lambda *arrays: plain(*arrays, smoothing, soft_cap))(*arrays)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-6)
    x_BLD, table_VD, targets_BL, _ = arrays
    nll_BL = jax.jit(lambda *a: losses.token_nll(*a, mesh, soft_cap))(x_BLD, table_VD, targets_BL)
    wanted_BL = losses.nll(plain_logits(x_BLD, table_VD, soft_cap), targets_BL)
    np.testing.assert_allclose(nll_BL, wanted_BL, rtol=2e-5)


@pytest.mark.slow
def test_the_chunked_loss_counts_every_token(arrays, monkeypatch):
    """47 tokens, a prime number, are 5 chunks of 10. The last chunk is padded."""
    x_BLD, table_VD, targets_BL, weights_BL = arrays
    cut = (
        x_BLD.reshape(1, -1, D)[:, :47],
        table_VD,
        targets_BL.reshape(1, -1)[:, :47],
        weights_BL.reshape(1, -1)[:, :47],
    )
    monkeypatch.setattr(losses, "LIMIT", 4 * 10 * V)
    mesh = sharding.make_mesh(1, 1, 1)
    chunked = lambda *arrays: losses.loss_sums(*arrays, losses.LossOptions(0.1), mesh)
    assert "f32[10,11]" in str(jax.make_jaxpr(chunked)(*cut)) and "length=5" in str(jax.make_jaxpr(chunked)(*cut))
    for function in (lambda f: f, lambda f: jax.grad(lambda *arrays: f(*arrays)[0], (0, 1))):
        found, wanted = function(chunked)(*cut), function(lambda *arrays: plain(*arrays, 0.1))(*cut)
        for left, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-6)
    nll_BL = losses.token_nll(*cut[:3], mesh)
    np.testing.assert_allclose(nll_BL, losses.nll(jnp.einsum("bld,vd->blv", cut[0], table_VD), cut[2]), rtol=2e-5)


def test_bfloat16_loss_gradients_are_near_float32(arrays):
    mesh = sharding.make_mesh(1, 1, 1)
    gradient = jax.jit(jax.grad(lambda *arrays: losses.loss_sums(*arrays, losses.LossOptions(0.1), mesh)[0], (0, 1)))
    narrow, wide = gradient(arrays[0].astype(jnp.bfloat16), *arrays[1:]), gradient(*arrays)
    assert [leaf.dtype for leaf in narrow] == [jnp.bfloat16, jnp.float32]
    for left, right in zip(narrow, wide, strict=True):
        np.testing.assert_allclose(left.astype(jnp.float32), right, atol=0.02 * float(jnp.abs(right).max()))


def test_loss_gradients_are_summed_over_devices_once(arrays, monkeypatch):
    mesh = sharding.make_mesh(8, 1, 1)
    monkeypatch.setattr(losses, "LIMIT", 4 * L * V // 3)
    x_BLD, table_VD, targets_BL, weights_BL = arrays
    put = jax.device_put((x_BLD, targets_BL, weights_BL), sharding.batch_sharding(mesh))
    sums = lambda x, table, *rest: losses.loss_sums(x, table, *rest, losses.LossOptions(0.1), mesh)
    gradient = jax.grad(sums, (0, 1), has_aux=True)
    program = jax.jit(gradient).lower(put[0], table_VD, *put[1:]).compile().as_text()
    assert "all-gather" not in program and "while(" in program
    sums = [line for line in program.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert sums and not any("while/body" in line for line in sums)


@pytest.mark.slow
def test_the_train_step_never_holds_all_logits(small):
    """With GPT-2's vocabulary, 128 rows of 128 tokens would have 3.3 GB of logits."""
    config = small(context_length=128, train__batch_size=128)
    mesh = sharding.make_mesh(*config.mesh.sizes)
    definition, abstract_state = train_state.abstract(config, 50_257, mesh)
    rows = lambda dtype: jax.ShapeDtypeStruct((128, 128), dtype, sharding=sharding.batch_sharding(mesh))
    batch = {"inputs": rows(jnp.int32), "targets": rows(jnp.int32), "weights": rows(jnp.float32)}
    compiled = make_step(definition, config, abstract_state).lower(abstract_state, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * 4 * 128 * 128 * 50_257

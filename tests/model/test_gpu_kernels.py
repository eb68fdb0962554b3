"""The kernels for GPUs, interpreted on the CPU, against plain formulas in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.model import gpu_call, gpu_loss, gpu_norm, running
from mini_gpt.model import loss as losses
from mini_gpt.model.layers import make_norm
from mini_gpt.runtime import devices, sharding
from tests.conftest import slow
from tests.model.test_gpt import VOCAB, make_model


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(gpu_call, "INTERPRET", True)
    monkeypatch.setattr(gpu_norm, "PROGRAMS", 3)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def near(found, wanted, tolerance):
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance * float(jnp.abs(right).max()))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name, mesh, shape, weights",
    [
        ("layernorm", (2, 2, 2), (4, 7, 24), True),
        *slow(
            ("layernorm", (1, 1, 1), (4, 7, 24), True),
            ("layernorm", (2, 2, 2), (3, 5, 64), True),
            ("rmsnorm", (1, 1, 1), (4, 1, 129), False),
            ("rmsnorm", (2, 2, 2), (4, 7, 24), True),
        ),
    ],
    ids=str,
)
def test_an_addition_with_its_norm_equals_the_plain_formula(name, mesh, shape, weights):
    """28 rows and 3 programs of 4 rows: each has several blocks. With 4 and 15 rows, blocks are not full."""
    fields = {"model.norm": name, "model.norm_weights": weights, "model.use_bias": True, "model.d_model": shape[-1]}
    fields |= {"model.num_heads": 1, "model.position": "none"}
    definition, state = nnx.split(make_norm(loading.load("configs/default.py", fields).model, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda leaf: leaf + random(*leaf.shape), state)
    by_rows = sharding.batch_sharding(sharding.make_mesh(*mesh))
    x, added, d_total, dy = (3 * random(*shape, seed=seed) + 1 for seed in range(4))
    if shape[0] % sharding.shards(by_rows.mesh) == 0:
        x, added = jax.device_put((x, added), by_rows)

    def of(function):
        def total(x, added, state):
            x, y = function(x, added, nnx.merge(definition, state))
            return jnp.sum(x * d_total) + jnp.sum(y * dy), (x, y)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, added, state)

    near(of(gpu_norm.add), of(lambda x, added, norm: (x + added, norm(x + added))), 3e-6)


@pytest.mark.usefixtures("interpreted")
def test_the_norm_is_rounded_once_to_the_type_of_what_is_added():
    x, added, scale = 5 + random(2, 5, 40), random(2, 5, 40, seed=1).astype(jnp.bfloat16), random(40)
    total, y = gpu_norm.add_norm(x, added, scale, 0 * scale, gpu_norm.Kind(1e-5, True))
    plain = jax.nn.standardize(x + added.astype(jnp.float32), epsilon=1e-5) * scale
    assert total.dtype == jnp.float32 and y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), plain, rtol=2**-8, atol=1e-6)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("tokens, classes, block", [(7, 11, 16), *slow((3, 257, 128))])
def test_cross_entropy_equals_the_plain_formula(monkeypatch, tokens, classes, block):
    monkeypatch.setattr(gpu_loss, "BLOCK", block)
    x, table, weights = 2 * random(tokens, 6), random(classes, 6), jnp.abs(random(tokens)).at[0].set(0)
    targets = jnp.asarray(np.random.default_rng(0).integers(classes, size=tokens)).at[1].set(classes - 1)
    found = jax.jit(gpu_loss.gradients)(x, targets, weights, table)
    near(
        found,
        jax.jit(functools.partial(losses._gradients, options=losses.LossOptions()))(x, targets, weights, table),
        2e-6,
    )
    logits, count = random(tokens, classes + 9), classes
    kernel = jax.jit(lambda logits: gpu_loss.cross_entropy(logits, targets, weights, count, jnp.float32))
    plain = lambda logits: losses.nll(logits[:, :count], targets)
    wanted = jax.jit(lambda logits: (plain(logits), jax.grad(lambda logits: weights @ plain(logits))(logits)))
    near(kernel(logits), wanted(logits), 2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_model_with_kernels_equals_one_without(monkeypatch, sizes):
    """As on GPUs: the loss and all gradients, with dropout and biases."""
    mesh = sharding.make_mesh(*sizes)
    tokens = jax.device_put(np.arange(24).reshape(4, 6) % VOCAB, sharding.batch_sharding(mesh))

    def gradients():
        config, definition, params = make_model(dropout=0.1, use_bias=True)

        def loss(params):
            model = nnx.merge(definition, params)
            x = model.hidden(tokens, dropout_key=jax.random.key(0))
            return losses.loss_sums(x, model.output_table, tokens, jnp.ones(tokens.shape), losses.LossOptions(), mesh)

        return running.make_runner(config), jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    _, wanted = gradients()
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    runner, found = gradients()
    assert runner is gpu_norm.run
    near(found, wanted, 2e-5)


def test_triton_knows_the_operations_of_the_kernels():
    """The kernels are lowered for NVIDIA GPUs, which need not be there. JAX 0.11 asks for one, and has none."""

    def total(x, added, scale):
        return sum(map(jnp.sum, gpu_norm.add_norm(x, added, scale, scale, gpu_norm.Kind(1e-5, True))))

    x, ones = jnp.ones((2, 5, 24)), jnp.ones(7)
    try:
        norm = jax.jit(jax.grad(total, (0, 1, 2))).trace(x, x, jnp.ones(24)).lower(lowering_platforms=("cuda",))
    except RuntimeError as error:
        pytest.skip(str(error))
    chunk = jnp.ones((7, 6)), ones.astype(int), ones, jnp.ones((11, 6))
    loss = jax.jit(lambda *arrays: gpu_loss.gradients(*arrays)).trace(*chunk).lower(lowering_platforms=("cuda",))
    assert [program.as_text().count("stablehlo.custom_call @__gpu$xla") for program in (norm, loss)] == [2, 1]

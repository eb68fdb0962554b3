"""Linear layers and norms: rounding to bfloat16, and sums in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.model.layers import Linear, make_norm


@pytest.mark.parametrize("tokens, d_in, d_out", [(1, 1, 1), (1, 65, 3), (3, 2, 16), (130, 65, 64), (64, 256, 128)])
def test_a_bfloat16_linear_equals_exact_sums(tokens, d_in, d_out):
    """Operands are bfloat16 and sums are float32. Only activations are rounded to bfloat16."""
    config = loading.load("configs/default.py", {"model.dtype": "bfloat16"}).model
    linear = Linear(config, d_in, d_out, std=1.0, rngs=nnx.Rngs(0))
    definition, weights = nnx.split(linear)
    x, dy = (jax.random.normal(jax.random.key(i), (tokens, d), jnp.bfloat16) for i, d in enumerate((d_in, d_out)))

    @jax.jit
    def apply(weights, x):
        y, pull = jax.vjp(lambda weights, x: nnx.merge(definition, weights)(x), weights, x)
        return y, *pull(dy)

    y, d_weights, dx = apply(weights, x)
    exact_x, exact_dy = (np.asarray(array, np.float64) for array in (x, dy))
    kernel = np.asarray(weights["kernel"][...].astype(jnp.bfloat16), np.float64)
    assert y.dtype == dx.dtype == jnp.bfloat16 and d_weights["kernel"][...].dtype == jnp.float32
    near = lambda found, wanted, tolerance: np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, atol=tolerance * np.abs(wanted).max()
    )
    near(y, exact_x @ kernel, 2**-8)
    near(dx, exact_dy @ kernel.T, 2**-8)
    near(d_weights["kernel"][...], exact_x.T @ exact_dy, 1e-5)
    near(d_weights["bias"][...], exact_dy.sum(0), 1e-5)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_norms_are_computed_in_float32(name):
    """Near 300, bfloat16 values are 2 apart, more than the standard deviation of these inputs (1)."""
    config = loading.load("configs/default.py", {"model.norm": name, "model.dtype": "bfloat16"}).model
    x = np.random.default_rng(0).normal(300, 1, (8, config.d_model)).astype(np.float32)
    exact = np.asarray(x, np.float64)
    if name == "layernorm":
        exact = exact - exact.mean(-1, keepdims=True)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(make_norm(config, rngs=nnx.Rngs(0))(x), wanted, atol=2e-4)

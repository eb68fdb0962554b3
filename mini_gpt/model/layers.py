"""The few layers that attention and the blocks share."""

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.schema import ModelConfig

INIT_STD = 0.02  # Radford et al. 2019


class Linear(nnx.Linear):
    """A product in `dtype` with float32 parameters, on operands of two axes, whose gradient is faster on CPUs."""

    def __init__(
        self, config: ModelConfig, d_in: int, d_out: int, dtype: jnp.dtype, *, std: float = INIT_STD, rngs: nnx.Rngs
    ):
        kernel_init = nnx.initializers.normal(std)
        super().__init__(d_in, d_out, use_bias=config.use_bias, dtype=dtype, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], self.out_features)


def make_norm(config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Makes LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), with statistics in float32."""
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.d_model, epsilon=1e-5, dtype=dtype, rngs=rngs)
    return nnx.LayerNorm(
        config.d_model, epsilon=1e-5, use_bias=config.use_bias, use_fast_variance=False, dtype=dtype, rngs=rngs
    )


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes entries at `rate` and scales the rest by 1/(1 - rate) (Srivastava et al. 2014), where there is a key."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)

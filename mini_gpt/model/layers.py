"""Layers that attention and the blocks use: linear, norms, dropout."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.xla_workarounds import cpu_matmul

INIT_STD = 0.02  # Radford et al. 2019
PRODUCT = "product"  # name of a Linear's output for checkpoint policies


class Linear(nnx.Linear):
    """A linear layer with float32 parameters and matrix products in `dtype`."""

    def __init__(
        self, config: ModelConfig, d_in: int, d_out: int, dtype: jnp.dtype, *, std: float = INIT_STD, rngs: nnx.Rngs
    ):
        kernel_init = nnx.initializers.normal(std)
        super().__init__(d_in, d_out, use_bias=config.use_bias, dtype=dtype, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]  # no out_sharding
        x_TD = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        bfloat16_on_cpu = self.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
        y_TF = cpu_matmul(x_TD, self.kernel[...]) if bfloat16_on_cpu else x_TD @ self.kernel[...].astype(self.dtype)
        if self.bias is not None:
            y_TF = y_TF + self.bias[...]  # added in float32, so that the bias's gradient is summed in float32
        y_TF = checkpoint_name(y_TF.astype(self.dtype), PRODUCT)
        return y_TF.reshape(*x.shape[:-1], self.out_features)


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Return LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), computed in float32."""
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.d_model, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
    return nnx.LayerNorm(
        config.d_model, epsilon=1e-5, use_bias=config.use_bias, use_fast_variance=False, dtype=jnp.float32, rngs=rngs
    )


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries with probability `rate`, else scale by 1/(1 - rate) (Srivastava et al. 2014); no-op for key None."""
    if key is None or rate == 0.0:
        return x
    kept = x.astype(jnp.float32) / (1 - rate)  # in bfloat16, 1 - rate would be rounded
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), kept, 0).astype(x.dtype)

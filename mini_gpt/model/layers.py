"""The few layers that attention and the blocks share."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mini_gpt.config.model_schema import ModelConfig

INIT_STD = 0.02  # Radford et al. 2019
PRODUCT = "product"  # the name by which a policy of rematerialisation knows what a Linear gives


class Linear(nnx.Linear):
    """A product in `dtype` with float32 parameters, on operands of two axes, whose gradient is faster on CPUs."""

    def __init__(
        self, config: ModelConfig, d_in: int, d_out: int, dtype: jnp.dtype, *, std: float = INIT_STD, rngs: nnx.Rngs
    ):
        kernel_init = nnx.initializers.normal(std)
        super().__init__(d_in, d_out, use_bias=config.use_bias, dtype=dtype, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x_TD = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        fast = self.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
        y_TF = _cpu_product(x_TD, self.kernel[...]) if fast else x_TD @ self.kernel[...].astype(self.dtype)
        if self.use_bias:
            y_TF = y_TF + self.bias[...]  # in float32, in which so its gradient is summed
        y_TF = checkpoint_name(y_TF.astype(self.dtype), PRODUCT)
        return y_TF.reshape(*x.shape[:-1], self.out_features)


@jax.custom_vjp
def _cpu_product(x_TD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """Gives x W in float32, of x's dtype, in the form that XLA is fast at on CPUs, backward too: rows of the
    left operand against rows or columns of the right one, results in float32 (docs/performance.md)."""
    return _rows_product(x_TD, kernel_DF.astype(x_TD.dtype), 0)


def _cpu_product_forward(x_TD, kernel_DF):
    return _cpu_product(x_TD, kernel_DF), (_as_bits(x_TD), kernel_DF)


def _cpu_product_backward(saved, dy_TF):
    x_TD, kernel_DF = _from_bits(saved[0]), saved[1]
    dy_TF = dy_TF.astype(x_TD.dtype)
    # A loop of one pass, which XLA cannot know: a transposition that it sees it makes a slow product's own business.
    passes = 1 + (x_TD[0, 0] > jnp.inf).astype(jnp.int32)
    x_DT = jax.lax.fori_loop(0, passes, lambda _, x_DT: x_TD.T, jnp.zeros_like(x_TD.T))
    dx_TD = _rows_product(dy_TF, kernel_DF.astype(dy_TF.dtype), 1).astype(x_TD.dtype)
    return dx_TD, _rows_product(x_DT, dy_TF, 0)


_cpu_product.defvjp(_cpu_product_forward, _cpu_product_backward)


def _rows_product(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


def computed_again(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Gives `function` of arrays, of which a gradient keeps what it is given alone, and computes it again."""
    again = jax.custom_vjp(lambda *arrays: function(*arrays))

    def forward(*arrays):
        return function(*arrays), tuple(map(_as_bits, arrays))

    def backward(saved, d_result):
        return jax.vjp(function, *map(_from_bits, saved))[1](d_result)

    again.defvjp(forward, backward)
    return again


def _as_bits(x: jax.Array) -> jax.Array:
    """Gives bfloat16 as uint16: what a loop over layers keeps in bfloat16, XLA turns to float32 and back on CPUs."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Makes LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), in float32 throughout."""
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.d_model, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
    return nnx.LayerNorm(
        config.d_model, epsilon=1e-5, use_bias=config.use_bias, use_fast_variance=False, dtype=jnp.float32, rngs=rngs
    )


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes entries at `rate` and scales the rest by 1/(1 - rate) (Srivastava et al. 2014), where there is a key."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)

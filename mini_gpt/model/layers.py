"""Layers that attention and the blocks share, and work-arounds for slow programs of XLA on CPUs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mini_gpt.config.schema import ModelConfig

INIT_STD = 0.02  # Radford et al. 2019
PRODUCT = "product"  # name of a Linear's output for checkpoint policies


class Linear(nnx.Linear):
    """A linear layer: float32 parameters, products in `dtype`."""

    def __init__(
        self, config: ModelConfig, d_in: int, d_out: int, dtype: jnp.dtype, *, std: float = INIT_STD, rngs: nnx.Rngs
    ):
        kernel_init = nnx.initializers.normal(std)
        super().__init__(d_in, d_out, use_bias=config.use_bias, dtype=dtype, kernel_init=kernel_init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]  # no out_sharding
        x_TD = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        on_cpu = self.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
        y_TF = cpu_matmul(x_TD, self.kernel[...]) if on_cpu else x_TD @ self.kernel[...].astype(self.dtype)
        if self.bias is not None:
            y_TF = y_TF + self.bias[...]  # added in float32, so that the bias's gradient is summed in float32
        y_TF = checkpoint_name(y_TF.astype(self.dtype), PRODUCT)
        return y_TF.reshape(*x.shape[:-1], self.out_features)


def make_norm(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Make LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), computed in float32."""
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.d_model, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
    return nnx.LayerNorm(
        config.d_model, epsilon=1e-5, use_bias=config.use_bias, use_fast_variance=False, dtype=jnp.float32, rngs=rngs
    )


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries at `rate` and scale the rest by 1/(1 - rate) (Srivastava et al. 2014); None: no dropout."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


# docs/performance.md has the measurements of the work-arounds.
@jax.custom_vjp
def cpu_matmul(x_TD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """Return x W as y_TF in float32; operands have x's dtype.

    Every product, also of the gradient, is in a form that is fast on CPUs: the left operand is contracted along its
    rows, and the result is float32.
    """
    return _rows_product(x_TD, kernel_DF.astype(x_TD.dtype), 0)


def _cpu_matmul_forward(x_TD, kernel_DF):
    return cpu_matmul(x_TD, kernel_DF), (_as_bits(x_TD), kernel_DF)


def _cpu_matmul_backward(saved, dy_TF):
    x_TD, kernel_DF = _from_bits(saved[0]), saved[1]
    dy_TF = dy_TF.astype(x_TD.dtype)
    # Hide the transpose in a loop; its trip count depends on data. Otherwise XLA folds it into a slow dot.
    passes = 1 + (x_TD[0, 0] > jnp.inf).astype(jnp.int32)
    x_DT = jax.lax.fori_loop(0, passes, lambda _, x_DT: x_TD.T, jnp.zeros_like(x_TD.T))
    dx_TD = _rows_product(dy_TF, kernel_DF.astype(dy_TF.dtype), 1).astype(x_TD.dtype)
    return dx_TD, _rows_product(x_DT, dy_TF, 0)


cpu_matmul.defvjp(_cpu_matmul_forward, _cpu_matmul_backward)


def _rows_product(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


def recompute_in_backward(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the function with a backward pass that saves only its inputs, and recomputes the rest."""
    wrapped = jax.custom_vjp(lambda *arrays: function(*arrays))

    def forward(*arrays):
        return function(*arrays), tuple(map(_as_bits, arrays))

    def backward(saved, d_result):
        return jax.vjp(function, *map(_from_bits, saved))[1](d_result)

    wrapped.defvjp(forward, backward)
    return wrapped


def _as_bits(x: jax.Array) -> jax.Array:
    """Return bfloat16 as uint16: on CPUs, XLA converts bfloat16 that a scan saves to float32 and back."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

"""Layers that XLA alone would compute less exactly or more slowly; docs/performance.md has the measurements."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


@jax.custom_vjp
def matmul(x_TD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """Return x W as y_TF; operands have x's dtype.

    The gradient of the kernel is float32 before devices add up theirs; autodiff would round it to x's dtype first. On
    CPUs, y is float32 too, and all products contract the last axis of the left operand: this form is fast there.
    """
    return _product(x_TD, kernel_DF.astype(x_TD.dtype), 0, _dtype_of_products(x_TD))


def _matmul_forward(x_TD, kernel_DF):
    return matmul(x_TD, kernel_DF), (_as_bits(x_TD), kernel_DF)


def _matmul_backward(saved, dy_TF):
    x_TD, kernel_DF = _from_bits(saved[0]), saved[1]
    dy_TF = dy_TF.astype(x_TD.dtype)
    x_DT = unfused(jnp.transpose, x_TD)  # XLA on CPUs would fold the transpose into a slow dot
    dx_TD = _product(dy_TF, kernel_DF.astype(dy_TF.dtype), 1, _dtype_of_products(x_TD)).astype(x_TD.dtype)
    return dx_TD, _product(x_DT, dy_TF, 0, jnp.float32)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _dtype_of_products(x: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else x.dtype


def _product(a: jax.Array, b: jax.Array, axis_of_b: int, dtype: DTypeLike) -> jax.Array:
    """Return the product over the last axis of a and this axis of b; sums are float32."""
    return jax.lax.dot_general(a, b, (((1,), (axis_of_b,)), ((), ())), preferred_element_type=dtype)


def unfused(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return function(x), as an array of its own on CPUs, where XLA would compute it again in each of its users.

    XLA does not fuse a loop whose trip count depends on data. Outside jit, each call would compile the loop.
    """
    if jax.default_backend() != "cpu" or not isinstance(x, jax.core.Tracer):
        return function(x)
    passes = 1 + (x[(0,) * x.ndim] > jnp.inf).astype(jnp.int32)  # always 1, which XLA can't know
    zeros = jnp.zeros_like(jax.eval_shape(function, x))
    return jax.lax.fori_loop(0, passes, lambda *_: function(x), zeros)


class CpuNorm(nnx.Module):
    """Makes a norm of Flax faster: class CpuLayerNorm(CpuNorm, nnx.LayerNorm)."""

    scale: nnx.Param | None
    epsilon: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x with each row normalised, in float32."""
        scale, bias = self.scale, getattr(self, "bias", None)
        scale_D = jnp.ones(x.shape[-1], jnp.float32) if scale is None else scale[...]
        x_TD = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        y = cpu_norm(x_TD, scale_D, self.epsilon, isinstance(self, nnx.LayerNorm)).reshape(x.shape)
        return y if bias is None else y + bias[...]


class CpuLayerNorm(CpuNorm, nnx.LayerNorm): ...  # type: ignore[misc]  # no mask


class CpuRMSNorm(CpuNorm, nnx.RMSNorm): ...  # type: ignore[misc]  # no mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def cpu_norm(x_TD: jax.Array, scale_D: jax.Array, epsilon: float, centred: bool) -> jax.Array:
    """Return the LayerNorm (centred) or RMSNorm of each row, times scale_D. All arrays are float32.

    Sums over an axis are products with a vector: on CPUs, XLA's products are several times faster than its reductions.
    """
    return _cpu_norm_forward(x_TD, scale_D, epsilon, centred)[0]


def _cpu_norm_forward(x_TD, scale_D, epsilon, centred):
    ones_D1 = jnp.ones((len(scale_D), 1), jnp.float32)
    mean_T1 = x_TD @ ones_D1 / len(scale_D) if centred else jnp.zeros_like(x_TD[:, :1])
    variance_T1 = jnp.square(x_TD - mean_T1) @ ones_D1 / len(scale_D)
    inverse_T1 = jax.lax.rsqrt(variance_T1 + epsilon)
    return (x_TD - mean_T1) * inverse_T1 * scale_D, (x_TD, scale_D, mean_T1, inverse_T1)


def _cpu_norm_backward(epsilon, centred, saved, dy_TD):
    x_TD, scale_D, mean_T1, inverse_T1 = saved
    normed_TD = (x_TD - mean_T1) * inverse_T1
    scale_D1 = scale_D[:, None] / len(scale_D)
    dscale_TD = dy_TD * normed_TD
    dx_TD = dy_TD * scale_D - normed_TD * (dscale_TD @ scale_D1)
    dx_TD = (dx_TD - dy_TD @ scale_D1 if centred else dx_TD) * inverse_T1
    return dx_TD, (jnp.ones((1, len(x_TD)), jnp.float32) @ dscale_TD)[0]


cpu_norm.defvjp(_cpu_norm_forward, _cpu_norm_backward)


@functools.cache
def recompute_in_backward(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the function with a backward pass that recomputes everything from the saved inputs.

    Without the barrier, XLA would see that the forward pass has computed the same, and keep those results instead.
    """
    wrapped = jax.custom_vjp(lambda *arrays: function(*arrays))

    def forward(*arrays):
        return function(*arrays), tuple(map(_as_bits, arrays))

    def backward(saved, d_result):
        return jax.vjp(function, *map(_from_bits, jax.lax.optimization_barrier(saved)))[1](d_result)

    wrapped.defvjp(forward, backward)
    return wrapped


def _as_bits(x: jax.Array) -> jax.Array:
    """Return bfloat16 as uint16, because XLA on CPUs converts bfloat16 saved by a scan to float32 and back."""
    hidden = x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if hidden else x


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

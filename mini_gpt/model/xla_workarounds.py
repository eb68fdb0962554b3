"""Workarounds for slow code that XLA generates on CPUs; docs/performance.md has the measurements."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cpu_matmul(x_TD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """Return x W as y_TF in float32; operands have x's dtype.

    All products, also those of the gradient, contract the last axis of the left operand and return float32. This form
    is fast on CPUs.
    """
    return _contract_last_axis(x_TD, kernel_DF.astype(x_TD.dtype), 0)


def _cpu_matmul_forward(x_TD, kernel_DF):
    return cpu_matmul(x_TD, kernel_DF), (_as_bits(x_TD), kernel_DF)


def _cpu_matmul_backward(saved, dy_TF):
    x_TD, kernel_DF = _from_bits(saved[0]), saved[1]
    dy_TF = dy_TF.astype(x_TD.dtype)
    # A loop whose trip count depends on data keeps XLA from folding the transpose into a slow dot.
    passes = 1 + (x_TD[0, 0] > jnp.inf).astype(jnp.int32)
    x_DT = jax.lax.fori_loop(0, passes, lambda _, x_DT: x_TD.T, jnp.zeros_like(x_TD.T))
    dx_TD = _contract_last_axis(dy_TF, kernel_DF.astype(dy_TF.dtype), 1).astype(x_TD.dtype)
    return dx_TD, _contract_last_axis(x_DT, dy_TF, 0)


cpu_matmul.defvjp(_cpu_matmul_forward, _cpu_matmul_backward)


def _contract_last_axis(a: jax.Array, b: jax.Array, axis_of_b: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


@functools.cache
def recompute_in_backward(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the function with a backward pass that recomputes everything from the saved inputs."""
    wrapped = jax.custom_vjp(lambda *arrays: function(*arrays))

    def forward(*arrays):
        return function(*arrays), tuple(map(_as_bits, arrays))

    def backward(saved, d_result):
        return jax.vjp(function, *map(_from_bits, saved))[1](d_result)

    wrapped.defvjp(forward, backward)
    return wrapped


def _as_bits(x: jax.Array) -> jax.Array:
    """Return bfloat16 as uint16, because XLA on CPUs converts bfloat16 saved by a scan to float32 and back."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x

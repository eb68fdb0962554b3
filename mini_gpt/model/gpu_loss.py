"""The loss of a chunk of tokens on NVIDIA GPUs: one kernel for cross entropy and its gradient.

The kernel reads a row of logits twice, the second time mostly from the cache, and writes its gradient once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from mini_gpt.model import gpu_call
from mini_gpt.model.output import product

ALIGNED = 64  # rows of the table are a multiple of it: a product of 50,257 numbers in bfloat16 is not aligned, and slow
BLOCK, WARPS = 4096, 16  # classes that a program reads at a time


def gradients(
    x_TD: jax.Array, targets_T: jax.Array, weights_T: jax.Array, table_VD: jax.Array, options: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the losses nll_T twice, and the gradients d_x_TD and d_table_VD, as `loss` with its default options."""
    del options
    classes = len(table_VD)
    table_VD = jnp.pad(table_VD, ((0, -classes % ALIGNED), (0, 0)))
    nll_T, d_logits_TV = cross_entropy(product(x_TD, table_VD, (1, 1)), targets_T, weights_T, classes, x_TD.dtype)
    d_x_TD = product(d_logits_TV, table_VD, (1, 0)).astype(x_TD.dtype)
    return nll_T, nll_T, d_x_TD, product(d_logits_TV, x_TD, (0, 0))[:classes]


def cross_entropy(
    logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array, classes: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Return the losses nll_T, and the gradient of their weighted sum d_logits_TV in `dtype`.

    classes: columns of the logits that count; the gradient of the others is 0.
    """
    tokens = len(logits_TV)
    outputs = jax.ShapeDtypeStruct((tokens,), jnp.float32), jax.ShapeDtypeStruct(logits_TV.shape, dtype)
    block = min(BLOCK, pallas.next_power_of_2(logits_TV.shape[1]))
    kernel = functools.partial(_kernel, classes=classes, block=block)
    warps = max(1, WARPS * block // BLOCK)
    return gpu_call.call(kernel, "cross_entropy", tokens, outputs, warps=warps)(logits_TV, targets_T, weights_T)


def _kernel(logits_ref, targets_ref, weights_ref, nll_ref, d_logits_ref, *, classes: int, block: int):
    row, columns = pallas.program_id(0), logits_ref.shape[1]
    blocks = pallas.cdiv(columns, block)
    target, weight = triton.load(targets_ref.at[row]), triton.load(weights_ref.at[row])

    def read(part):
        index_C = part * block + jnp.arange(block)
        return index_C, triton.load(logits_ref.at[row, index_C], mask=index_C < classes, other=-1e30)

    def add(part, sums):  # in each lane: the maximum, and the sum of exp(logit - maximum)
        (max_C, sum_C), (_, x_C) = sums, read(part)
        higher_C = jnp.maximum(max_C, x_C)
        return higher_C, sum_C * jnp.exp(max_C - higher_C) + jnp.exp(x_C - higher_C)

    start = jnp.full(block, -1e30, jnp.float32), jnp.zeros(block, jnp.float32)
    max_C, sum_C = jax.lax.fori_loop(0, blocks, add, start)
    highest = jnp.max(max_C)
    log_sum = highest + jnp.log(jnp.sum(sum_C * jnp.exp(max_C - highest)))
    triton.store(nll_ref.at[row], log_sum - triton.load(logits_ref.at[row, target]))

    def write(part, carry):
        index_C, x_C = read(part)
        d_C = weight * (jnp.exp(x_C - log_sum) - jnp.where(index_C == target, 1.0, 0.0))
        triton.store(d_logits_ref.at[row, index_C], d_C.astype(d_logits_ref.dtype), mask=index_C < columns)
        return carry

    jax.lax.fori_loop(0, blocks, write, 0)

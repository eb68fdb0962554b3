"""How `gpu_norm` and `gpu_loss` call their kernels: Pallas, compiled by Triton for NVIDIA GPUs."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas
from jax.experimental.pallas import triton

INTERPRET = False  # True: run the kernels on any device, to test


def call(kernel: Callable[..., None], name: str, programs: int, outputs: tuple, *, warps: int) -> Callable[..., tuple]:
    """Return the kernel as a function of arrays. outputs: arrays or shapes with the shapes and types of the results."""
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), outputs)
    options: Any = {} if INTERPRET else {"compiler_params": triton.CompilerParams(num_warps=warps, num_stages=1)}
    return pallas.pallas_call(kernel, out_shape=shapes, grid=(programs,), interpret=INTERPRET, name=name, **options)

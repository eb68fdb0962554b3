"""Pre-LN blocks on NVIDIA GPUs: a kernel for each residual addition with the norm after it, and one for its gradient.

Each kernel reads and writes an array once, where XLA alone passes over the residual stream several times. Numbers
inside are float32. A norm's result and its gradient are rounded to `model.dtype`; products round the result anyway.
Axes: R rows of a program at a time, W the width or the next power of 2, P programs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from mini_gpt.config.model import ModelConfig
from mini_gpt.model import gpu_call
from mini_gpt.model.attention.context import Context
from mini_gpt.model.layers import Keys, dropout, dropout_keys

ROWS = 4  # of a program at a time
PROGRAMS = 528  # of the backward pass, each with a partial sum of the scale's gradient: 4 per multiprocessor of an H100
WIDEST = 4096  # a program has whole rows in its registers


def fits(config: ModelConfig) -> bool:
    """Return whether `run` can run the blocks of a config."""
    plain = config.norm_placement == "pre" and config.residual and config.parallel_residual == "none"
    return plain and config.block == "attention" and not config.has_encoder and config.d_model <= WIDEST


def run(blocks: nnx.List, x_BLD: jax.Array, context: Context, keys: Keys) -> jax.Array:
    """Return x_BLD after all blocks, as a loop over them does. Each addition waits for the norm after it."""
    if hasattr(blocks[0], "__captures__"):  # something observes the stream
        for block, key in zip(blocks, keys, strict=True):
            x_BLD = block(x_BLD, context, key)
        return x_BLD
    added_BLD: Any = None
    for block, key in zip(blocks, keys, strict=True):
        key, *of_sums = dropout_keys(key, 3)
        x_BLD, y_BLD = add(x_BLD, added_BLD, block.attention_norm)
        added_BLD = dropout(block.attention(y_BLD, context, key), block.dropout_rate, of_sums[0])
        x_BLD, y_BLD = add(x_BLD, added_BLD, block.mlp_norm)
        added_BLD = dropout(block.mlp(y_BLD), block.dropout_rate, of_sums[1])
    return x_BLD + added_BLD


def add(x_BLD: jax.Array, added_BLD: jax.Array | None, norm: Any) -> tuple[jax.Array, jax.Array]:
    """Return x + added, and its norm, both float32."""
    if added_BLD is None:
        return x_BLD, norm(x_BLD)
    scale_D = jnp.ones(x_BLD.shape[-1], jnp.float32) if norm.scale is None else norm.scale[...]
    bias = getattr(norm, "bias", None)
    bias_D = jnp.zeros_like(scale_D) if bias is None else bias[...]
    kind = Kind(norm.epsilon, isinstance(norm, nnx.LayerNorm))
    x_BLD, y_BLD = add_norm(x_BLD, added_BLD, scale_D, bias_D, kind)
    return x_BLD, y_BLD.astype(jnp.float32)  # so that the gradients of several readers are added in float32


class Kind(NamedTuple):
    """A kind of norm. centred: LayerNorm; otherwise RMSNorm."""

    epsilon: float
    centred: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def add_norm(x_BLD: jax.Array, added_BLD: jax.Array, scale_D: jax.Array, bias_D: jax.Array, kind: Kind) -> tuple:
    """Return x + added, float32, and its norm in the type of `added`."""

    def local(x_BLD, added_BLD, scale_D, bias_D):
        x_TD, added_TD = _rows(x_BLD), _rows(added_BLD)
        outputs = x_TD, added_TD
        made = _call(_forward_kernel, kind, pallas.cdiv(len(x_TD), ROWS), outputs)(x_TD, added_TD, scale_D, bias_D)
        return tuple(array.reshape(x_BLD.shape) for array in made)

    return _on_each_device(local, (x_BLD, added_BLD), (scale_D, bias_D))


def _add_norm_forward(x_BLD, added_BLD, scale_D, bias_D, kind):
    total_BLD, y_BLD = add_norm(x_BLD, added_BLD, scale_D, bias_D, kind)
    return (total_BLD, y_BLD), (total_BLD, scale_D)


def _add_norm_backward(kind, saved, gradients):
    total_BLD, scale_D = saved

    def local(total_BLD, d_total_BLD, dy_BLD, scale_D):
        total_TD, d_total_TD, dy_TD = map(_rows, (total_BLD, d_total_BLD, dy_BLD))
        outputs = total_TD, dy_TD, jax.ShapeDtypeStruct((PROGRAMS, 2, len(scale_D)), jnp.float32)
        call = _call(_backward_kernel, kind, PROGRAMS, outputs)
        d_x_TD, d_added_TD, parts_P2D = call(total_TD, d_total_TD, dy_TD, scale_D)
        return d_x_TD.reshape(total_BLD.shape), d_added_TD.reshape(total_BLD.shape), parts_P2D

    d_x_BLD, d_added_BLD, parts_P2D = _on_each_device(local, (total_BLD, *gradients), (scale_D,))
    return d_x_BLD, d_added_BLD, *jnp.sum(parts_P2D, axis=0)


add_norm.defvjp(_add_norm_forward, _add_norm_backward)


def _rows(x_BLD: jax.Array) -> jax.Array:
    return x_BLD.reshape(-1, x_BLD.shape[-1])


def _on_each_device(local: Callable[..., tuple], by_rows: tuple, whole: tuple) -> tuple:
    """Return the results of `local` for each device's rows, since XLA cannot partition a kernel."""
    mesh = jax.typeof(by_rows[0]).sharding.mesh
    if mesh.size <= 1:
        return local(*by_rows, *whole)
    divides = len(by_rows[0]) % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0
    rows = PartitionSpec(("data", "fsdp") if divides else None)
    in_specs = (rows,) * len(by_rows) + (PartitionSpec(),) * len(whole)
    divided = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
    return divided(*by_rows, *whole)


def _call(kernel: Callable[..., None], kind: Kind, programs: int, outputs: tuple) -> Callable[..., tuple]:
    warps = min(16, max(1, pallas.next_power_of_2(outputs[0].shape[1]) // 256))
    name = "add" + kernel.__name__.removesuffix("_kernel")
    return gpu_call.call(functools.partial(kernel, kind=kind), name, programs, outputs, warps=warps)


def _forward_kernel(x_ref, added_ref, scale_ref, bias_ref, total_ref, y_ref, *, kind):
    place, inside_RW = _place(x_ref.shape, pallas.program_id(0))
    columns_W = _columns(x_ref)
    total_RW = _load(x_ref, place, inside_RW) + _load(added_ref, place, inside_RW)
    normed_RW, _ = _normalised(total_RW, inside_RW, x_ref.shape[1], kind)
    scale_W, bias_W = (_load(ref, columns_W, columns_W < x_ref.shape[1]) for ref in (scale_ref, bias_ref))
    triton.store(total_ref.at[place], total_RW, mask=inside_RW)
    triton.store(y_ref.at[place], (normed_RW * scale_W[None] + bias_W[None]).astype(y_ref.dtype), mask=inside_RW)


def _backward_kernel(total_ref, d_total_ref, dy_ref, scale_ref, d_x_ref, d_added_ref, parts_ref, *, kind):
    count, width = total_ref.shape
    program = pallas.program_id(0)
    columns_W = _columns(total_ref)
    scale_W = _load(scale_ref, columns_W, columns_W < width)

    def add(chunk, sums):
        place, inside_RW = _place(total_ref.shape, program + chunk * PROGRAMS)
        normed_RW, inverse_R1 = _normalised(_load(total_ref, place, inside_RW), inside_RW, width, kind)
        dy_RW = _load(dy_ref, place, inside_RW)
        dx_RW = dy_RW * scale_W[None]
        mean_R1 = jnp.sum(dx_RW, axis=1, keepdims=True) / width if kind.centred else 0.0
        dx_RW = dx_RW - normed_RW * (jnp.sum(dx_RW * normed_RW, axis=1, keepdims=True) / width) - mean_R1
        dx_RW = dx_RW * inverse_R1 + _load(d_total_ref, place, inside_RW)
        triton.store(d_x_ref.at[place], dx_RW, mask=inside_RW)
        triton.store(d_added_ref.at[place], dx_RW.astype(d_added_ref.dtype), mask=inside_RW)
        return sums[0] + jnp.sum(dy_RW * normed_RW, axis=0), sums[1] + jnp.sum(dy_RW, axis=0)

    zeros_W = jnp.zeros(scale_W.shape, jnp.float32)
    chunks = pallas.cdiv(pallas.cdiv(count, ROWS), PROGRAMS)
    sums = jax.lax.fori_loop(0, chunks, add, (zeros_W, zeros_W))
    for kept, sum_W in enumerate(sums):
        triton.store(parts_ref.at[program, kept, columns_W], sum_W, mask=columns_W < width)


def _columns(ref: Any) -> jax.Array:
    return jnp.arange(pallas.next_power_of_2(ref.shape[1]))


def _place(shape: tuple, block: jax.Array) -> tuple:
    """Return the indices of a block of rows, and which of them are inside of the array."""
    rows_R1 = (block * ROWS + jnp.arange(ROWS))[:, None]
    columns_1W = jnp.arange(pallas.next_power_of_2(shape[1]))[None]
    return (rows_R1, columns_1W), (rows_R1 < shape[0]) & (columns_1W < shape[1])


def _load(ref: Any, place: tuple, inside: jax.Array) -> jax.Array:
    return triton.load(ref.at[place], mask=inside, other=0.0).astype(jnp.float32)


def _normalised(x_RW: jax.Array, inside_RW: jax.Array, width: int, kind: Kind) -> tuple[jax.Array, jax.Array]:
    """Return the rows without scale and bias, and 1/σ."""
    if kind.centred:
        x_RW = jnp.where(inside_RW, x_RW - jnp.sum(x_RW, axis=1, keepdims=True) / width, 0.0)
    inverse_R1 = jax.lax.rsqrt(jnp.sum(x_RW * x_RW, axis=1, keepdims=True) / width + kind.epsilon)
    return x_RW * inverse_R1, inverse_R1

"""Losses in nats, from logits or from final hidden states. The latter are processed in chunks to save memory.

The functions return losses or sums, not means. T is the number of tokens in a chunk. On a mesh, each device computes
the losses of its own rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from mini_gpt.model.output import logits, product
from mini_gpt.runtime import devices, sharding

LIMIT = 2**27  # bytes of float32 logits that a CPU holds at a time
LIMITS = {"tpu": 2**30, "gpu": 2**30}  # the same of others, where chunks are slow
LIMIT_OF_KERNEL = 2**32


def nll(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Return nll_BL, the negative log-likelihood of each target, in nats, float32."""
    logits_BLV = logits_BLV.astype(jnp.float32)
    chosen_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BLV, axis=-1) - chosen_BL


class LossOptions(NamedTuple):
    """The options of the loss.

    smoothing: the targets' distribution is (1 - smoothing) one-hot + smoothing uniform.
    soft_cap: that of `logits`.
    """

    smoothing: float = 0.0
    soft_cap: float | None = None


def token_nll(
    x_BLD: jax.Array, table_VD: jax.Array, targets_BL: jax.Array, mesh: Mesh, soft_cap: float | None = None
) -> jax.Array:
    """Return `nll` of the `logits` as nll_BL in float32, sharded by rows."""

    def local(x_BLD, table_VD, targets_BL):
        table_VD = table_VD.astype(x_BLD.dtype)
        chunk_nll = lambda _, chunk: (None, nll(logits(chunk[0], table_VD, soft_cap), chunk[1]))
        return _scan(chunk_nll, None, (x_BLD, targets_BL), len(table_VD))[1].reshape(targets_BL.shape)

    rows = sharding.batch_sharding(mesh).spec
    specs = (rows, PartitionSpec(), rows)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(x_BLD, table_VD, targets_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def loss_sums(
    x_BLD: jax.Array,
    table_VD: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    options: LossOptions,
    mesh: Mesh,
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sums of the smoothed cross-entropy and of `nll` of the `logits`, as float32 scalars.

    Label smoothing is that of Szegedy et al. 2016, 7. x_BLD is sharded by rows. Matrix products have operands in x's
    dtype and float32 results. While the forward pass has a chunk's logits, it also computes the gradient of the first
    sum with respect to x and the table (Hsu et al. 2024). The second sum and other inputs have no gradient.
    """
    return _loss_sums_forward(x_BLD, table_VD, targets_BL, weights_BL, options, mesh)[0]


def _loss_sums_forward(x_BLD, table_VD, targets_BL, weights_BL, options, mesh):
    gradients, limit = _gradients, None
    if options == LossOptions() and devices.has_triton():
        from mini_gpt.model import gpu_loss  # imports Pallas

        gradients, limit = gpu_loss.gradients, LIMIT_OF_KERNEL

    def local(x_BLD, table_VD, targets_BL, weights_BL):
        table_VD = table_VD.astype(x_BLD.dtype)

        def add(carry, chunk):
            x_TD, targets_T, weights_T = chunk
            objective_T, nll_T, d_x_TD, d_table_VD = gradients(x_TD, targets_T, weights_T, table_VD, options)
            sums = jnp.sum(objective_T * weights_T), jnp.sum(nll_T * weights_T), d_table_VD
            return jax.tree.map(jnp.add, carry, sums), d_x_TD

        zero = jnp.float32(0), jnp.float32(0), jnp.zeros(table_VD.shape, jnp.float32)
        sums, d_x_TD = _scan(add, zero, (x_BLD, targets_BL, weights_BL), len(table_VD), limit)
        return jax.lax.psum(sums, axes_of_rows), d_x_TD.reshape(x_BLD.shape)

    rows, replicated = sharding.batch_sharding(mesh).spec, PartitionSpec()
    axes_of_rows = rows[0]
    in_specs, out_specs = (rows, replicated, rows, rows), ((replicated,) * 3, rows)
    local = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    (objective, nll_sum, d_table_VD), d_x_BLD = local(x_BLD, table_VD, targets_BL, weights_BL)
    return (objective, nll_sum), (d_x_BLD, d_table_VD.astype(table_VD.dtype))


def _gradients(x_TD, targets_T, weights_T, table_VD, options):
    """Return a chunk's objective_T and nll_T, and the gradients d_x_TD and d_table_VD of its weighted objective."""
    smoothing, soft_cap = options
    classes_V = jnp.arange(len(table_VD))
    logits_TV = logits(x_TD, table_VD, soft_cap)
    max_T1 = jnp.max(logits_TV, axis=-1, keepdims=True)
    exp_TV = jnp.exp(logits_TV - max_T1)
    sum_T1 = jnp.sum(exp_TV, axis=-1, keepdims=True)
    lse_T = (jnp.log(sum_T1) + max_T1)[:, 0]
    nll_T = lse_T - jnp.take_along_axis(logits_TV, targets_T[:, None], axis=-1)[:, 0]
    objective_T = nll_T
    if smoothing:
        objective_T = (1 - smoothing) * nll_T + smoothing * (lse_T - jnp.mean(logits_TV, axis=-1))
    target_TV = (1 - smoothing) * (classes_V == targets_T[:, None]) + smoothing / len(classes_V)
    d_logits_TV = weights_T[:, None] * (exp_TV / sum_T1 - target_TV)
    if soft_cap is not None:
        d_logits_TV = d_logits_TV * (1 - jnp.square(logits_TV / soft_cap))  # the derivative of the cap
    d_logits_TV = d_logits_TV.astype(x_TD.dtype)
    d_table_VD = product(d_logits_TV, x_TD, (0, 0))
    return objective_T, nll_T, product(d_logits_TV, table_VD, (1, 0)).astype(x_TD.dtype), d_table_VD


def _loss_sums_backward(options, mesh, gradients, cotangents):
    d_x_BLD, d_table_VD = gradients
    return (cotangents[0] * d_x_BLD).astype(d_x_BLD.dtype), cotangents[0] * d_table_VD, None, None


loss_sums.defvjp(_loss_sums_forward, _loss_sums_backward)


def _scan(function, carry, arrays_BL, classes: int, limit: int | None = None):
    """Scan over tokens in as few equal chunks as the limit allows; one chunk needs no loop. Padding does not count.

    limit: bytes of float32 logits; None: that of the device.
    """
    tokens = arrays_BL[0].shape[0] * arrays_BL[0].shape[1]
    limit = limit or LIMITS.get(jax.default_backend(), LIMIT)
    count = -(-4 * tokens * classes // limit)  # rounded up, as the size is
    size = -(-tokens // count)

    def chunks(array_BL: jax.Array) -> jax.Array:
        rest = array_BL.shape[2:]
        padding = [(0, -tokens % size)] + [(0, 0)] * len(rest)
        return jnp.pad(array_BL.reshape(tokens, *rest), padding).reshape(-1, size, *rest)

    carry, outputs_CT = jax.lax.scan(function, carry, tuple(map(chunks, arrays_BL)), unroll=size == tokens)
    return carry, outputs_CT.reshape(-1, *outputs_CT.shape[2:])[:tokens]

"""Attention in blocks of queries and keys; memory is linear, not quadratic, in the sequence length.

Blocks that causality or a window hides are skipped. The softmax is computed online (Milakov and Gimelshein 2018; Rabe
and Staats 2021). The backward pass recomputes each block's attention weights from the log-sum-exp of its rows (Dao et
al. 2022).

Further letters: N blocks, C queries of a block, M query heads of a group, R = M · C rows. S is the keys of a block.
"""

import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.model.attention.context import MASKED_LOGIT, Context, Coordinates, Mask
from mini_gpt.model.attention.core import Core
from mini_gpt.model.attention.parts import Shared
from mini_gpt.model.layers import scaled

BLOCK = 256  # queries or keys in a block; docs/performance.md has the measurements of block sizes
SHORT = {256: 64, 512: 128}  # {longest sequence: its block}; for these, the loop over the blocks is unrolled
LONG, LARGE_BLOCK, FEW_HEADS = 2048, 512, 8  # sequences from LONG on have a large block, if B · H is at most FEW_HEADS


class _Plan(NamedTuple):
    """The static part of a call.

    pairs: (i, j) such that a query of block i may see a key of block j.
    unroll: pairs in a turn of the loop.
    mods: the definition of (score mods, shared encodings), or None if there are no score mods.
    """

    pairs: tuple[tuple[int, int], ...]
    unroll: int
    mask: Mask
    mods: Any


def attend(core: Core, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, context: Context) -> jax.Array:
    """Return out_BLHK, equal to `reference.attend` up to rounding; score mods are applied block by block."""
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    size = _block_size(max(L, S), B * H)
    pairs = _pairs(context, -(-L // size), -(-S // size), size)
    shared = {mod.key: context.shared[mod.key] for mod in core.score_mods if isinstance(mod, Shared)}
    mods, mod_parameters = nnx.split((core.score_mods, shared)) if len(core.score_mods) else (None, {})
    plan = _Plan(pairs, 1 if size >= BLOCK else len(pairs), context.mask, mods)
    # Each group's queries are the R rows of one matrix, so that products have two batch axes and two matrix axes.
    q_NBCGMK = _blocks(scaled(core.scale, q_BLHK).reshape(B, L, G, H // G, K), size)
    q_NBGRK = q_NBCGMK.transpose(0, 1, 3, 4, 2, 5).reshape(len(q_NBCGMK), B, G, -1, K)
    k_NBGSK, v_NBGSK = _blocks(k_BSGK, size).swapaxes(2, 3), _blocks(v_BSGK, size).swapaxes(2, 3)
    queries, keys = _coordinate_blocks(context.queries, size), _coordinate_blocks(context.keys, size)
    of_queries = jax.tree.map(functools.partial(_blocks, size=size), context.of_queries_BLHR)
    parameters = {"mods": mod_parameters, "sink": core.sink_H, "of_queries": of_queries}
    parameters["sums"] = queries.sums_BLH, keys.sums_BLH
    coordinates = queries._replace(sums_BLH=None), keys._replace(sums_BLH=None)
    out_NBGRK = _attend(plan, q_NBGRK, k_NBGSK, v_NBGSK, parameters, coordinates)
    out_NBGMCK = out_NBGRK.reshape(len(out_NBGRK), B, G, H // G, size, -1)
    return out_NBGMCK.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, H, out_NBGRK.shape[-1])[:, :L]


def _block_size(length: int, heads: int) -> int:
    for longest, size in SHORT.items():
        if length <= longest:
            return size
    return LARGE_BLOCK if length >= LONG and heads <= FEW_HEADS else BLOCK


def _pairs(context: Context, queries: int, keys: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return sorted pairs of blocks that the mask does not hide; segments are ignored."""
    if context.queries is not context.keys:  # cross-attention: indices of queries and keys are not related
        return tuple(itertools.product(range(queries), range(keys)))
    mask = context.mask
    pairs: list[tuple[int, int]] = []
    reach = keys if mask.window is None else (mask.window + size - 2) // size  # blocks to the furthest key
    for i in range(queries):
        last = i if mask.causal else min(keys - 1, i + reach)
        pairs += itertools.product([i], range(max(0, i - reach), last + 1))
    return tuple(pairs)


def _blocks(x: jax.Array, size: int, padding: int = 0) -> jax.Array:
    """Return x_N…: axis 1 is padded and split into N blocks, and N becomes the first axis."""
    missing = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=padding)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _coordinate_blocks(coordinates: Coordinates, size: int) -> Coordinates:
    """Return the coordinates in blocks; padding has index -1, so that no query sees it."""
    blocks = jax.tree.map(functools.partial(_blocks, size=size), coordinates)
    return blocks._replace(indices_BL=_blocks(coordinates.indices_BL, size, padding=-1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q_NBGRK, k_NBGSK, v_NBGSK, parameters: dict, coordinates: tuple) -> jax.Array:
    return _forward(plan, q_NBGRK, k_NBGSK, v_NBGSK, parameters, coordinates)[0]


def _forward(plan: _Plan, q_NBGRK, k_NBGSK, v_NBGSK, parameters, coordinates) -> tuple[jax.Array, tuple]:
    """Return out_NBGRK, and what the backward pass needs."""

    def add(sums: Any, pair: Any) -> tuple[Any, None]:
        """Add a pair of blocks to the sums of the queries' block."""
        (sum_NBGRK, max_NBGR, total_NBGR), (i, j) = sums, pair
        logits_BGRS = _changed(plan, _product("bgrk,bgsk->bgrs", q_NBGRK[i], k_NBGSK[j]), parameters, coordinates, pair)
        max_BGR = jnp.maximum(max_NBGR[i], jnp.max(logits_BGRS, axis=-1))
        weights_BGRS = jnp.exp(logits_BGRS - max_BGR[..., None])
        rescale_BGR = jnp.exp(max_NBGR[i] - max_BGR)
        values_BGRK = _product("bgrs,bgsk->bgrk", weights_BGRS, v_NBGSK[j])
        sum_NBGRK = sum_NBGRK.at[i].set(rescale_BGR[..., None] * sum_NBGRK[i] + values_BGRK)
        total_NBGR = total_NBGR.at[i].set(rescale_BGR * total_NBGR[i] + jnp.sum(weights_BGRS, axis=-1))
        return (sum_NBGRK, max_NBGR.at[i].set(max_BGR), total_NBGR), None

    rows = q_NBGRK.shape[:-1]
    zeros = jnp.zeros((*rows, v_NBGSK.shape[-1]), jnp.float32)
    sums = zeros, jnp.full(rows, MASKED_LOGIT), jnp.zeros(rows, jnp.float32)
    if parameters["sink"] is not None:  # as if the sink were the first key, with a value of 0
        sums = zeros, jnp.broadcast_to(_sink_rows(parameters["sink"], rows), rows), jnp.ones(rows, jnp.float32)
    (sum_NBGRK, max_NBGR, total_NBGR), _ = jax.lax.scan(add, sums, jnp.array(plan.pairs), unroll=plan.unroll)
    any_visible_NBGR = (max_NBGR > MASKED_LOGIT) | jnp.isnan(total_NBGR)  # NaN stays NaN
    out_NBGRK = jnp.where(any_visible_NBGR[..., None], sum_NBGRK / jnp.maximum(total_NBGR, 1)[..., None], 0)
    out_NBGRK = out_NBGRK.astype(q_NBGRK.dtype)
    # A row without a visible key gets log-sum-exp 0, so that its weights in `_backward` are exp(MASKED_LOGIT - 0) = 0.
    logsumexp_NBGR = jnp.where(any_visible_NBGR, max_NBGR + jnp.log(total_NBGR), 0)
    return out_NBGRK, (q_NBGRK, k_NBGSK, v_NBGSK, parameters, coordinates, out_NBGRK, logsumexp_NBGR)


def _backward(plan: _Plan, saved: tuple, dout_NBGRK: jax.Array) -> tuple:
    q_NBGRK, k_NBGSK, v_NBGSK, parameters, coordinates, out_NBGRK, logsumexp_NBGR = saved
    inner_NBGR = jnp.sum(dout_NBGRK.astype(jnp.float32) * out_NBGRK, axis=-1)
    # Transpose left operands once, because XLA on CPUs is slow with large transposed operands.
    q_NBGKR, dout_NBGKR = q_NBGRK.swapaxes(-1, -2), dout_NBGRK.swapaxes(-1, -2)

    def add(sums: Any, pair: Any) -> tuple[Any, None]:
        """Add the gradients that a pair of blocks contributes."""
        (dq_NBGRK, dk_NBGKS, dv_NBGKS, dparameters), (i, j) = sums, pair
        products_BGRS = _product("bgrk,bgsk->bgrs", q_NBGRK[i], k_NBGSK[j])
        if plan.mods is not None:
            changed = lambda products, parameters: _changed(plan, products, parameters, coordinates, pair)
            logits_BGRS, pullback = jax.vjp(changed, products_BGRS, parameters)
        else:
            logits_BGRS, pullback = _changed(plan, products_BGRS, parameters, coordinates, pair), None
        weights_BGRS = jnp.exp(logits_BGRS - logsumexp_NBGR[i][..., None])
        dweights_BGRS = _product("bgrk,bgsk->bgrs", dout_NBGRK[i], v_NBGSK[j])
        dlogits_BGRS = weights_BGRS * (dweights_BGRS - inner_NBGR[i][..., None])
        if pullback is not None:
            dlogits_BGRS, dchanged = pullback(dlogits_BGRS)
            dparameters = jax.tree.map(jnp.add, dparameters, dchanged)
        dq_NBGRK = dq_NBGRK.at[i].add(_product("bgrs,bgsk->bgrk", dlogits_BGRS, k_NBGSK[j]))
        dk_NBGKS = dk_NBGKS.at[j].add(_product("bgkr,bgrs->bgks", q_NBGKR[i], dlogits_BGRS))
        dv_NBGKS = dv_NBGKS.at[j].add(_product("bgkr,bgrs->bgks", dout_NBGKR[i], weights_BGRS))
        return (dq_NBGRK, dk_NBGKS, dv_NBGKS, dparameters), None

    sums = q_NBGRK, k_NBGSK.swapaxes(-1, -2), v_NBGSK.swapaxes(-1, -2), parameters
    sums = jax.tree.map(functools.partial(jnp.zeros_like, dtype=jnp.float32), sums)
    (dq_NBGRK, dk_NBGKS, dv_NBGKS, dparameters), _ = jax.lax.scan(add, sums, jnp.array(plan.pairs), unroll=plan.unroll)
    if parameters["sink"] is not None:
        weights_NBGR = jnp.exp(_sink_rows(parameters["sink"], q_NBGRK.shape[:-1]) - logsumexp_NBGR)
        dsink_GR = -jnp.sum(weights_NBGR * inner_NBGR, axis=(0, 1))
        dparameters = dparameters | {"sink": dsink_GR.reshape(len(parameters["sink"]), -1).sum(axis=1)}
    gradients = dq_NBGRK, dk_NBGKS.swapaxes(-1, -2), dv_NBGKS.swapaxes(-1, -2), dparameters
    inputs = q_NBGRK, k_NBGSK, v_NBGSK, parameters
    return *jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs), None


_attend.defvjp(_forward, _backward)


def _changed(plan: _Plan, products_BGRS, parameters: dict, coordinates: tuple, pair: tuple) -> jax.Array:
    """Return the logits_BGRS of a pair of blocks: the products after score mods and mask."""
    shape = products_BGRS.shape
    queries, keys = (jax.tree.map(operator.itemgetter(at), side) for at, side in zip(pair, coordinates, strict=True))
    logits_BHCS = products_BGRS.reshape(shape[0], -1, queries.indices_BL.shape[1], shape[-1])
    if plan.mods is not None:
        logits_BHCS = _with_mods(plan, logits_BHCS, parameters, (queries, keys), pair)
    return jnp.where(plan.mask.visible(queries, keys)[:, None], logits_BHCS, MASKED_LOGIT).reshape(shape)


def _with_mods(plan: _Plan, logits_BHCS, parameters: dict, coordinates: tuple, pair: tuple) -> jax.Array:
    """Return the logits of a pair of blocks after the score mods."""
    mods, shared = nnx.merge(plan.mods, parameters["mods"])
    sums = [None if each is None else each[at] for each, at in zip(parameters["sums"], pair, strict=True)]
    queries, keys = (of._replace(sums_BLH=each) for of, each in zip(coordinates, sums, strict=True))
    of_queries = jax.tree.map(operator.itemgetter(pair[0]), parameters["of_queries"])
    for mod in mods:
        logits_BHCS = mod(logits_BHCS, Context(queries, keys, plan.mask, shared, of_queries_BLHR=of_queries))
    return logits_BHCS


def _sink_rows(sink_H: jax.Array, rows_NBGR: tuple[int, ...]) -> jax.Array:
    """Return sink_GR, the sink of the head of each row."""
    groups, rows = rows_NBGR[2:]
    return jnp.repeat(sink_H.reshape(groups, -1), rows * groups // len(sink_H), axis=1)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the einsum of x and y, cast to the smaller of their dtypes and accumulated in float32."""
    dtype = x.dtype if x.dtype.itemsize < y.dtype.itemsize else y.dtype
    return jnp.einsum(subscripts, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)

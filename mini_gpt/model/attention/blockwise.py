"""Attention in blocks of queries and keys; memory is linear, not quadratic, in the sequence length.

Blocks that causality or a window hides are skipped. The softmax is computed online (Milakov and Gimelshein 2018; Rabe
and Staats 2021). The backward pass recomputes each block's attention weights from the log-sum-exp of its rows (Dao et
al. 2022).

Further letters: N blocks, C queries of a block, M query heads of a group, R = M · C rows. S is the keys of a block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.model.attention.inputs import HIDDEN, Context, Heads, Scoring, decay_bias, scaled

BLOCK = 256  # queries or keys in a block; docs/performance.md has the measurements of block sizes
UNROLLED = {256: 64, 512: 128}  # {sequence length: block size}; up to these lengths, the loop is unrolled


def attend(heads: Heads, context: Context, scoring: Scoring) -> jax.Array:
    """Return out_BLHK, equal to `reference.attend` up to rounding; positional biases are computed block by block."""
    (q_BLHK, k_BSGK, v_BSGK, decay_BLH), (mask, position, positions_BL, *_) = heads, context
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    unrolled = next((size for longest, size in UNROLLED.items() if longest >= max(L, S)), None)
    size = unrolled or BLOCK
    count = -(-L // size)
    pairs = mask.blocks(count, -(-S // size), size)

    def blocks(x: jax.Array) -> jax.Array:
        """Return x_N…: axis 1 is padded and split into N blocks, and N becomes the first axis."""
        count = -(-x.shape[1] // size)
        x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    # Each group's queries are the R rows of one matrix, so that products have two batch axes and two matrix axes.
    q_NBCGMK = blocks(scaled(scoring.scale, q_BLHK).reshape(B, L, G, H // G, K))
    q_NBGRK = q_NBCGMK.transpose(0, 1, 3, 4, 2, 5).reshape(count, B, G, -1, K)
    k_NBGSK, v_NBGSK = (blocks(x_BSGK).swapaxes(2, 3) for x_BSGK in (k_BSGK, v_BSGK))
    layout = {"positions": blocks(positions_BL)}
    if context.key_positions_BS is not None:
        layout["key_positions"] = blocks(context.key_positions_BS)
    if mask.segments_BL is not None:
        layout["segments"] = blocks(mask.segments_BL)
    if mask.key_segments_BS is not None:
        layout["key_segments"] = blocks(mask.key_segments_BS)
    biased = context.biased
    definition: Any
    definition, of_position = nnx.split(position) if biased else (None, {})
    decay_NBCH = None if decay_BLH is None else blocks(decay_BLH)
    parameters = {"bias": {"position": of_position, "decay": decay_NBCH}, "sink": scoring.sink_H}

    def bias_BHCS(parameters: dict, i: jax.Array, j: jax.Array, layout: dict) -> jax.Array:
        terms = []
        if biased:
            encoding = nnx.merge(definition, parameters["position"])
            of_keys = layout.get("key_positions", layout["positions"])
            terms.append(encoding.bias(layout["positions"][i], of_keys[j]))
        if decay_NBCH is not None:
            terms.append(decay_bias(parameters["decay"][i], parameters["decay"][j]))
        return jnp.broadcast_to(functools.reduce(jnp.add, terms), (B, H, size, size))

    def visible_B1CS(i: jax.Array, j: jax.Array, layout: dict) -> jax.Array:
        offsets_C = jnp.arange(size)
        segments = None
        if "segments" in layout:
            segments = layout["segments"][i], layout.get("key_segments", layout["segments"])[j]
        visible_BCS = mask.between(i * size + offsets_C, j * size + offsets_C, segments)
        return (visible_BCS & (j * size + offsets_C < S))[:, None]

    def sink_GR(parameters: dict) -> jax.Array:
        return jnp.repeat(parameters["sink"].reshape(G, H // G), size, axis=1)

    def capped_logits(q_BGRK, k_BGSK) -> jax.Array:
        return scoring.capped(jnp.einsum("bgrk,bgsk->bgrs", q_BGRK, k_BGSK, preferred_element_type=jnp.float32))

    def masked(logits_BGRS, parameters, i, j, layout) -> jax.Array:
        logits_BHCS = logits_BGRS.reshape(B, H, size, size)
        if biased or decay_NBCH is not None:
            logits_BHCS = logits_BHCS + bias_BHCS(parameters["bias"], i, j, layout)
        return jnp.where(visible_B1CS(i, j, layout), logits_BHCS, HIDDEN).reshape(logits_BGRS.shape)

    def over_pairs(body: Any, carry: Any) -> Any:
        if unrolled:
            for i, j in pairs:
                carry = body(carry, i, j)
            return carry
        return jax.lax.scan(lambda carry, pair: (body(carry, *pair), None), carry, jnp.array(pairs, jnp.int32))[0]

    def forward(q_NBGRK, k_NBGSK, v_NBGSK, parameters, layout) -> tuple[jax.Array, jax.Array]:
        def body(carry, i, j):
            sum_NBGRK, max_NBGR, total_NBGR = carry
            logits_BGRS = masked(capped_logits(q_NBGRK[i], k_NBGSK[j]), parameters, i, j, layout)
            max_BGR = jnp.maximum(max_NBGR[i], jnp.max(logits_BGRS, axis=-1))
            weights_BGRS = jnp.exp(logits_BGRS - max_BGR[..., None])
            rescale_BGR = jnp.exp(max_NBGR[i] - max_BGR)
            values_BGRK = _product("bgrs,bgsk->bgrk", weights_BGRS, v_NBGSK[j])
            return (
                sum_NBGRK.at[i].set(rescale_BGR[..., None] * sum_NBGRK[i] + values_BGRK),
                max_NBGR.at[i].set(max_BGR),
                total_NBGR.at[i].set(rescale_BGR * total_NBGR[i] + jnp.sum(weights_BGRS, axis=-1)),
            )

        rows = q_NBGRK.shape[:-1]
        start = jnp.zeros((*rows, v_NBGSK.shape[-1]), jnp.float32), jnp.full(rows, HIDDEN), jnp.zeros(rows, jnp.float32)
        if scoring.sink_H is not None:  # as if the sink were the first key, with a value of 0
            start = start[0], jnp.broadcast_to(sink_GR(parameters), rows), jnp.ones(rows, jnp.float32)
        sum_NBGRK, max_NBGR, total_NBGR = over_pairs(body, start)
        any_visible_NBGR = max_NBGR > HIDDEN
        out_NBGRK = jnp.where(any_visible_NBGR[..., None], sum_NBGRK / jnp.maximum(total_NBGR, 1)[..., None], 0)
        # A row without a visible key gets log-sum-exp 0, so that its weights in `backward` are exp(HIDDEN - 0) = 0.
        return out_NBGRK.astype(q_NBGRK.dtype), jnp.where(any_visible_NBGR, max_NBGR + jnp.log(total_NBGR), 0)

    def backward(saved, dout_NBGRK):
        q_NBGRK, k_NBGSK, v_NBGSK, parameters, layout, out_NBGRK, logsumexp_NBGR = saved
        inner_NBGR = jnp.sum(dout_NBGRK.astype(jnp.float32) * out_NBGRK, axis=-1)

        # Transpose left operands once, because XLA on CPUs is slow with large transposed operands.
        q_NBGKR, dout_NBGKR = q_NBGRK.swapaxes(-1, -2), dout_NBGRK.swapaxes(-1, -2)

        def body(carry, i, j):
            dq_NBGRK, dk_NBGKS, dv_NBGKS, dparameters = carry
            capped_BGRS = capped_logits(q_NBGRK[i], k_NBGSK[j])
            logits_BGRS = masked(capped_BGRS, parameters, i, j, layout)
            weights_BGRS = jnp.exp(logits_BGRS - logsumexp_NBGR[i][..., None])
            dweights_BGRS = jnp.einsum("bgrk,bgsk->bgrs", dout_NBGRK[i], v_NBGSK[j], preferred_element_type=jnp.float32)
            dlogits_BGRS = weights_BGRS * (dweights_BGRS - inner_NBGR[i][..., None])
            if jax.tree.leaves(parameters["bias"]):
                _, pullback = jax.vjp(lambda state: bias_BHCS(state, i, j, layout), parameters["bias"])
                dbias = pullback(dlogits_BGRS.reshape(B, H, size, size))[0]
                dparameters = dparameters | {"bias": jax.tree.map(jnp.add, dparameters["bias"], dbias)}
            if scoring.soft_cap is not None:  # the derivative of c · tanh(x / c)
                dlogits_BGRS = dlogits_BGRS * (1 - (capped_BGRS / scoring.soft_cap) ** 2)
            return (
                dq_NBGRK.at[i].add(_product("bgrs,bgsk->bgrk", dlogits_BGRS, k_NBGSK[j])),
                dk_NBGKS.at[j].add(_product("bgkr,bgrs->bgks", q_NBGKR[i], dlogits_BGRS)),
                dv_NBGKS.at[j].add(_product("bgkr,bgrs->bgks", dout_NBGKR[i], weights_BGRS)),
                dparameters,
            )

        start = q_NBGRK, k_NBGSK.swapaxes(-1, -2), v_NBGSK.swapaxes(-1, -2), parameters
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), start)
        dq_NBGRK, dk_NBGKS, dv_NBGKS, dparameters = over_pairs(body, start)
        if scoring.sink_H is not None:
            weights_NBGR = jnp.exp(sink_GR(parameters) - logsumexp_NBGR)
            dsink_GR = -jnp.sum(weights_NBGR * inner_NBGR, axis=(0, 1))
            dparameters = dparameters | {"sink": dsink_GR.reshape(H, size).sum(axis=1)}
        sums = dq_NBGRK, dk_NBGKS.swapaxes(-1, -2), dv_NBGKS.swapaxes(-1, -2), dparameters
        return *jax.tree.map(lambda d, x: d.astype(x.dtype), sums, (q_NBGRK, k_NBGSK, v_NBGSK, parameters)), None

    def core_forward(*arguments):
        out_NBGRK, logsumexp_NBGR = forward(*arguments)
        return out_NBGRK, (*arguments, out_NBGRK, logsumexp_NBGR)

    core = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
    core.defvjp(core_forward, backward)
    out_NBGRK = core(q_NBGRK, k_NBGSK, v_NBGSK, parameters, layout)
    out_NBGMCK = out_NBGRK.reshape(count, B, G, H // G, size, -1)
    return out_NBGMCK.transpose(1, 0, 4, 2, 3, 5).reshape(B, count * size, H, -1)[:, :L]


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the einsum of x and y, cast to the smaller of their dtypes and accumulated in float32."""
    dtype = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
    return jnp.einsum(subscripts, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)

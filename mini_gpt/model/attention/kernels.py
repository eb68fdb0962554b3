"""Attention by fused kernels, which never store all logits."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mini_gpt.model.attention.context import Context, Mask
from mini_gpt.model.attention.core import Core
from mini_gpt.model.layers import scaled


def cudnn(core: Core, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, context: Context) -> jax.Array:
    """Return out_BLHK in q's dtype, computed by cuDNN's kernel for NVIDIA GPUs."""
    mask = context.mask
    window = None if mask.window is None else (mask.window - 1, 0)
    options: Any = {"scale": core.scale, "is_causal": mask.causal, "local_window_size": window}
    return jax.nn.dot_product_attention(q_BLHK, k_BSGK, v_BSGK, **options, implementation="cudnn")


def splash(
    core: Core,
    q_BLHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    context: Context,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return out_BLHK in q's dtype, computed by JAX's Pallas kernel for TPUs. interpret: run on any device, to test."""
    batch, groups, mesh = len(q_BLHK), k_BSGK.shape[2], jax.typeof(q_BLHK).sharding.mesh
    local = functools.partial(_splash, mask=context.mask, scale=core.scale, interpret=interpret)
    heads, segments_BL = (q_BLHK, k_BSGK, v_BSGK), context.queries.segments_BL
    if mesh.size <= 1:
        return local(heads, segments_BL)
    # XLA cannot partition a Pallas kernel, so each device runs the kernel on its own rows and heads.
    rows = ("data", "fsdp") if batch % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
    heads_spec: Any = PartitionSpec(rows, None, "tensor" if groups % mesh.shape["tensor"] == 0 else None)
    specs = ((heads_spec,) * 3, PartitionSpec(rows))
    divided = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads_spec, check_vma=False)
    return divided(heads, segments_BL)


def _splash(heads: tuple, segments_BL: jax.Array | None, *, mask: Mask, scale: float, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels  # slow to import, and only for TPUs

    q_BLHK, k_BLGK, v_BLGK = heads
    B, L, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    mask_of_head: Any = kernels.CausalMask((L, L)) if mask.causal else kernels.FullMask((L, L))
    if mask.window is not None:
        reach = mask.window - 1
        mask_of_head = kernels.LocalMask((L, L), (reach, 0 if mask.causal else reach), offset=0)
    mask_of_group = kernels.MultiHeadMask([mask_of_head] * (H // G))
    kernel = kernels.make_splash_mqa_single_device(mask_of_group, interpret=interpret)
    q_BGMLK = scaled(scale, q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGLK, v_BGLK = k_BLGK.swapaxes(1, 2), v_BLGK.swapaxes(1, 2)
    segments = None if segments_BL is None else kernels.SegmentIds(segments_BL, segments_BL)
    over_groups = jax.vmap(kernel, (0, 0, 0, None))
    out_BGMLK = jax.vmap(over_groups, (0, 0, 0, None if segments is None else 0))(q_BGMLK, k_BGLK, v_BGLK, segments)
    return out_BGMLK.transpose(0, 3, 1, 2, 4).reshape(B, L, H, K).astype(q_BLHK.dtype)

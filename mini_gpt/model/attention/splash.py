"""Attention by the Pallas kernel for TPUs that JAX keeps, "splash", which skips the blocks that a mask hides."""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as kernel_masks
from jax.sharding import PartitionSpec

from mini_gpt.model.attention.masks import Mask


def attend(
    q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, *, mask: Mask, scale: float, interpret: bool = False
) -> jax.Array:
    """Gives out_BLHK in q's dtype; lengths are multiples of 128. interpret: on any device, for tests."""
    B, _, _, _ = q_BLHK.shape
    mesh, groups = jax.typeof(q_BLHK).sharding.mesh, k_BLGK.shape[2]
    local = functools.partial(_attend, mask=mask, scale=scale, interpret=interpret)
    if mesh.size <= 1:
        return local(q_BLHK, k_BLGK, v_BLGK, mask.segments_BL)
    # The compiler can't divide a kernel: each device runs its own on its rows and heads.
    rows = ("data", "fsdp") if B % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
    heads = "tensor" if groups % mesh.shape["tensor"] == 0 else None
    heads_spec = PartitionSpec(rows, None, heads)
    specs = (heads_spec, heads_spec, heads_spec, PartitionSpec(rows))
    divided = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads_spec, check_vma=False)
    return divided(q_BLHK, k_BLGK, v_BLGK, mask.segments_BL)


def _attend(q_BLHK, k_BLGK, v_BLGK, segments_BL, *, mask: Mask, scale: float, interpret: bool) -> jax.Array:
    B, L, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    shape = (L, L)
    if mask.window is not None:
        reach = mask.window - 1
        of_head = kernel_masks.LocalMask(shape, (reach, 0 if mask.causal else reach), offset=0)
    else:
        of_head = kernel_masks.CausalMask(shape) if mask.causal else kernel_masks.FullMask(shape)
    of_group = kernel_masks.MultiHeadMask([of_head] * (H // G))
    kernel = kernels.make_splash_mqa_single_device(of_group, interpret=interpret)
    q_BGMLK = (scale * q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGLK, v_BGLK = k_BLGK.swapaxes(1, 2), v_BLGK.swapaxes(1, 2)
    segments = None if segments_BL is None else kernels.SegmentIds(segments_BL, segments_BL)
    over_groups = jax.vmap(kernel, (0, 0, 0, None))
    out_BGMLK = jax.vmap(over_groups, (0, 0, 0, None if segments is None else 0))(q_BGMLK, k_BGLK, v_BGLK, segments)
    return out_BGMLK.transpose(0, 3, 1, 2, 4).reshape(B, L, H, K).astype(q_BLHK.dtype)

"""Fused attention kernels, which never store all logits, and the choice of an implementation for a call."""

import functools
import logging
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as kernel_masks
from jax.sharding import PartitionSpec

from mini_gpt.model.attention.masks import Context, Heads, Mask
from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

FUSED = {"cuda": "cudnn", "tpu": "splash"}  # the other implementations run on any device
DEVICES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "cpu": "CPUs"}
BLOCKWISE_FROM = {"cpu": 128}  # shortest sequence in tokens; docs/performance.md has the measurement
BLOCKWISE_FROM_ELSEWHERE = 4096  # not measured

log = functools.cache(logging.getLogger(__name__).info)  # logs each message once


def check(requested: str) -> None:
    """Raise UserError if `model.attention` names an implementation for another kind of device."""
    here = devices.platform(jax.devices()[0])
    needed = next((platform for platform, name in FUSED.items() if name == requested), here)
    if needed != here:
        possible = ", ".join(name for name in ("reference", "blockwise", FUSED.get(here)) if name)
        raise UserError(
            f"model.attention: found {requested!r}, which needs {DEVICES[needed]}; the devices here are "
            f"{DEVICES[here]}; must be {possible} or auto"
        )


def choose(requested: str, q_BLHK: jax.Array, mask: Mask, *, biased: bool, dropout: bool) -> str:
    """Return the name of an implementation; if it is not the requested one, log the reason once."""
    platform = devices.platform(jax.devices()[0])
    is_long = q_BLHK.shape[1] >= BLOCKWISE_FROM.get(platform, BLOCKWISE_FROM_ELSEWHERE)
    fallback = "blockwise" if is_long and not dropout else "reference"
    name = FUSED.get(platform, fallback) if requested == "auto" else requested
    obstacle = _obstacle(name, q_BLHK, mask, biased=biased, dropout=dropout)
    if obstacle and requested != "auto":
        log(f"model.attention: {requested} does not support {obstacle}; using {fallback}")
    return fallback if obstacle else name


def _obstacle(name: str, q_BLHK: jax.Array, mask: Mask, *, biased: bool, dropout: bool) -> str | None:
    """Return the first property of the call that the implementation does not support, or None."""
    length, width, dtype = q_BLHK.shape[1], q_BLHK.shape[3], q_BLHK.dtype.name
    fused = ("cudnn", "splash")
    obstacles = [
        (("blockwise", *fused), dropout, "dropout of attention weights"),
        (fused, biased, "a bias on the logits (alibi, t5)"),
        (("cudnn",), dtype not in ("bfloat16", "float16"), f"products in {dtype}"),
        (("cudnn",), mask.segments_BL is not None, "isolated documents"),
        (("cudnn",), mask.window is not None and not mask.causal, "two-sided windows"),
        (("cudnn",), length % 2, f"length {length}, only even lengths"),
        (("cudnn",), width % 8 or width > 128, f"heads of width {width}, only multiples of 8 up to 128"),
        (("splash",), length % 128, f"length {length}, only multiples of 128"),
        (("splash",), width % 64, f"heads of width {width}, only multiples of 64"),
    ]
    return next((obstacle for names, found, obstacle in obstacles if name in names and found), None)


def cudnn(heads: Heads, context: Context, scale: float) -> jax.Array:
    """Return out_BLHK in q's dtype, computed by cuDNN's kernel for NVIDIA GPUs."""
    mask = context.mask
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        *heads, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
    )


def splash(heads: Heads, context: Context, scale: float, *, interpret: bool = False) -> jax.Array:
    """Return out_BLHK in q's dtype, computed by JAX's Pallas kernel for TPUs. interpret: run on any device, to test."""
    batch, groups, mesh = len(heads.q_BLHK), heads.k_BSGK.shape[2], jax.typeof(heads.q_BLHK).sharding.mesh
    local = functools.partial(_splash, mask=context.mask._replace(segments_BL=None), scale=scale, interpret=interpret)
    if mesh.size <= 1:
        return local(heads, context.mask.segments_BL)
    # XLA cannot partition a Pallas kernel, so each device runs the kernel on its own rows and heads.
    rows = ("data", "fsdp") if batch % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
    heads_spec: Any = PartitionSpec(rows, None, "tensor" if groups % mesh.shape["tensor"] == 0 else None)
    specs = (Heads(heads_spec, heads_spec, heads_spec), PartitionSpec(rows))
    divided = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads_spec, check_vma=False)
    return divided(heads, context.mask.segments_BL)


def _splash(heads: Heads, segments_BL: jax.Array | None, *, mask: Mask, scale: float, interpret: bool) -> jax.Array:
    q_BLHK, k_BLGK, v_BLGK = heads
    B, L, H, K = q_BLHK.shape
    G = k_BLGK.shape[2]
    mask_of_head: Any = kernel_masks.CausalMask((L, L)) if mask.causal else kernel_masks.FullMask((L, L))
    if mask.window is not None:
        reach = mask.window - 1
        mask_of_head = kernel_masks.LocalMask((L, L), (reach, 0 if mask.causal else reach), offset=0)
    mask_of_group = kernel_masks.MultiHeadMask([mask_of_head] * (H // G))
    kernel = kernels.make_splash_mqa_single_device(mask_of_group, interpret=interpret)
    q_BGMLK = (scale * q_BLHK).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGLK, v_BGLK = k_BLGK.swapaxes(1, 2), v_BLGK.swapaxes(1, 2)
    segments = None if segments_BL is None else kernels.SegmentIds(segments_BL, segments_BL)
    over_groups = jax.vmap(kernel, (0, 0, 0, None))
    out_BGMLK = jax.vmap(over_groups, (0, 0, 0, None if segments is None else 0))(q_BGMLK, k_BGLK, v_BGLK, segments)
    return out_BGMLK.transpose(0, 3, 1, 2, 4).reshape(B, L, H, K).astype(q_BLHK.dtype)

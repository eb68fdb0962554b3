"""Which implementation of attention runs: the configured one, or the best that the device and the call allow."""

import functools
import logging

import jax

from mini_gpt.model.attention.masks import Mask
from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

FUSED = {"cuda": "cudnn", "tpu": "splash"}  # the other implementations run on any device
DEVICES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "cpu": "CPUs"}
BLOCKWISE_FROM = {"cpu": 128}  # tokens, measured: docs/performance.md
BLOCKWISE_FROM_ELSEWHERE = 4096  # not measured

log = logging.getLogger(__name__)


def check(asked: str) -> None:
    """Raise UserError if `model.attention` names an implementation for another kind of device."""
    here = devices.platform(jax.devices()[0])
    needed = next((platform for platform, name in FUSED.items() if name == asked), here)
    if needed != here:
        possible = [name for name in ("reference", "blockwise", FUSED.get(here)) if name]
        raise UserError(
            f"model.attention: found {asked!r}, which needs {DEVICES[needed]}; the devices here are {DEVICES[here]}: "
            f"must be {', '.join(possible)} or auto"
        )


def choose(asked: str, q_BLHK: jax.Array, mask: Mask, *, biased: bool, dropout: bool) -> str:
    """Return the name of an implementation; log once why it is not the one that was asked for."""
    platform, length = devices.platform(jax.devices()[0]), q_BLHK.shape[1]
    long = length >= BLOCKWISE_FROM.get(platform, BLOCKWISE_FROM_ELSEWHERE)
    general = "blockwise" if long and not dropout else "reference"
    if asked == "auto":
        fused = FUSED.get(platform)
        return fused if fused and not obstacle(fused, q_BLHK, mask, biased=biased, dropout=dropout) else general
    reason = obstacle(asked, q_BLHK, mask, biased=biased, dropout=dropout)
    if reason:
        _log_once(f"model.attention: {asked} does not support {reason}; using {general}")
        return general
    return asked


def obstacle(name: str, q_BLHK: jax.Array, mask: Mask, *, biased: bool, dropout: bool) -> str | None:
    """Return what an implementation does not support in a call, or None."""
    _, length, _, width = q_BLHK.shape
    if name == "reference":
        return None
    if dropout:
        return "dropout of attention weights"
    if name == "blockwise":
        return None
    if biased:
        return "a bias on the logits (alibi, t5)"
    if name == "cudnn":
        if q_BLHK.dtype.name not in ("bfloat16", "float16"):
            return f"products in {q_BLHK.dtype.name}"
        if mask.segments_BL is not None:
            return "isolated documents"
        if mask.window is not None and not mask.causal:
            return "windows to both sides"
        if length % 2:
            return f"length {length}, only even ones"
        if width % 8 or width > 128:
            return f"heads of width {width}, only multiples of 8 up to 128"
    if name == "splash":
        if length % 128:
            return f"length {length}, only multiples of 128"
        if width % 64:
            return f"heads of width {width}, only multiples of 64"
    return None


@functools.cache
def _log_once(line: str) -> None:
    log.info(line)

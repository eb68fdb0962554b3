"""Which implementation of attention runs: the one asked for, or the best that the device and the call admit."""

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
    """Raises UserError where the implementation that is asked for needs another kind of device."""
    here = devices.platform(jax.devices()[0])
    needed = next((platform for platform, name in FUSED.items() if name == asked), here)
    if needed != here:
        possible = [name for name in ("reference", "blockwise", FUSED.get(here)) if name]
        raise UserError(
            f"model.attention: found {asked!r}, which needs {DEVICES[needed]}; the devices here are {DEVICES[here]}: "
            f"must be {', '.join(possible)} or auto"
        )


def choose(asked: str, q_BLHK: jax.Array, mask: Mask, *, biased: bool, dropout: bool) -> str:
    """Gives the name of an implementation; logs, once, why it is not the one asked for."""
    platform, length = devices.platform(jax.devices()[0]), q_BLHK.shape[1]
    long = length >= BLOCKWISE_FROM.get(platform, BLOCKWISE_FROM_ELSEWHERE)
    general = "blockwise" if long and not dropout else "reference"
    if asked == "auto":
        fused = FUSED.get(platform)
        return fused if fused and not obstacle(fused, q_BLHK, mask, biased=biased, dropout=dropout) else general
    reason = obstacle(asked, q_BLHK, mask, biased=biased, dropout=dropout)
    if reason:
        _say(f"model.attention: {asked} has no {reason}; {general} is taken there")
        return general
    return asked


def obstacle(name: str, q_BLHK: jax.Array, mask: Mask, *, biased: bool, dropout: bool) -> str | None:
    """Gives what an implementation lacks for a call, or None."""
    _, length, _, width = q_BLHK.shape
    if name == "reference":
        return None
    if dropout:
        return "dropout of attention weights"
    if name == "blockwise":
        return None
    if biased:
        return "bias (alibi, t5) without holding it for all pairs"
    if name == "cudnn":
        if q_BLHK.dtype.name not in ("bfloat16", "float16"):
            return f"{q_BLHK.dtype.name} products"
        if mask.segments_BL is not None:
            return "isolated documents"
        if mask.window is not None and not mask.causal:
            return "windows to both sides"
        if length % 2:
            return f"length {length}, only even ones"
        if width % 8 or width > 128:
            return f"heads {width} wide, only multiples of 8 up to 128"
    if name == "splash":
        if length % 128:
            return f"length {length}, only multiples of 128"
        if width % 64:
            return f"heads {width} wide, only multiples of 64"
    return None


@functools.cache
def _say(line: str) -> None:
    log.info(line)

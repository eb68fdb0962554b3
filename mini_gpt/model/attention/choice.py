"""The choice of an implementation of attention for a call and a device."""

import functools
import logging

import jax

from mini_gpt.model.attention.masks import Mask, Scoring
from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

FUSED = {"cuda": "cudnn", "tpu": "splash"}  # the other implementations run on any device
DEVICES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "cpu": "CPUs"}
BLOCKWISE_FROM = {"cpu": 128}  # shortest sequence in tokens; docs/performance.md has the measurement
BLOCKWISE_FROM_ELSEWHERE = 4096  # not measured

log_once = functools.cache(logging.getLogger(__name__).info)


def check(requested: str) -> None:
    """Raise UserError if `model.attention` names an implementation for another kind of device."""
    here = devices.platform(jax.devices()[0])
    needed = next((platform for platform, name in FUSED.items() if name == requested), here)
    if needed != here:
        possible = ", ".join(name for name in ("reference", "blockwise", FUSED.get(here)) if name)
        raise UserError(
            f"model.attention: found {requested!r}, which needs {DEVICES[needed]}; the devices here are "
            f"{DEVICES.get(here, here)}; must be {possible} or auto"
        )


def choose(requested: str, q_BLHK: jax.Array, mask: Mask, scoring: Scoring, *, biased: bool, dropout: bool) -> str:
    """Return an implementation's name; if the requested or fastest one does not support the call, log why once."""
    platform = devices.platform(jax.devices()[0])
    is_long = q_BLHK.shape[1] >= BLOCKWISE_FROM.get(platform, BLOCKWISE_FROM_ELSEWHERE)
    unfused = "blockwise" if is_long else "reference"
    name = FUSED.get(platform, unfused) if requested == "auto" else requested
    obstacle = _obstacle(name, q_BLHK, mask, scoring, biased=biased, dropout=dropout)
    if obstacle is None:
        return name
    fallback = "reference" if dropout else unfused
    memory = ", whose memory grows with the square of the length" if fallback == "reference" else ""
    log_once(f"model.attention: {name} does not support {obstacle}; using {fallback}{memory}")
    return fallback


def _obstacle(name: str, q_BLHK: jax.Array, mask: Mask, scoring: Scoring, *, biased: bool, dropout: bool) -> str | None:
    """Return the first property of the call that the implementation does not support, or None."""
    length, width, dtype = q_BLHK.shape[1], q_BLHK.shape[3], q_BLHK.dtype.name
    fused = ("cudnn", "splash")
    obstacles = [
        (("blockwise", *fused), dropout, "dropout of attention weights"),
        (fused, biased, "a bias on the logits, such as alibi"),
        (fused, scoring.soft_cap is not None, "a soft cap"),
        (fused, scoring.sink_H is not None, "an attention sink"),
        (("cudnn",), dtype not in ("bfloat16", "float16"), f"products in {dtype}"),
        (("cudnn",), mask.segments_BL is not None, "isolated documents"),
        (("cudnn",), mask.window is not None and not mask.causal, "two-sided windows"),
        (("cudnn",), length % 2, f"length {length}, only even lengths"),
        (("cudnn",), width % 8 or width > 128, f"heads of width {width}, only multiples of 8 up to 128"),
        (("splash",), length % 128, f"length {length}, only multiples of 128"),
        (("splash",), width % 64, f"heads of width {width}, only multiples of 64"),
    ]
    return next((obstacle for names, found, obstacle in obstacles if name in names and found), None)

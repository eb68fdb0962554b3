"""The choice of an implementation of attention for a call and a device."""

import functools
import logging

import jax

from mini_gpt.model.attention.inputs import Heads, Mask, Scoring
from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

FUSED = {"cuda": "cudnn", "tpu": "splash"}  # the other implementations run on any device
DEVICES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "cpu": "CPUs"}
BLOCKWISE_FROM = {"cpu": 128}  # shortest sequence in tokens; docs/performance.md has the measurement
BLOCKWISE_FROM_ELSEWHERE = 4096  # not measured

log_once = functools.cache(logging.getLogger(__name__).info)


def check(requested: str) -> None:
    """Raise UserError if `model.attention` of a new run names an implementation for another kind of device."""
    here = devices.platform(jax.devices()[0])
    needed = next((platform for platform, name in FUSED.items() if name == requested), here)
    if needed != here:
        possible = ", ".join(name for name in ("reference", "blockwise", FUSED.get(here)) if name)
        raise UserError(
            f"model.attention: found {requested!r}, which needs {DEVICES[needed]}; the devices here are "
            f"{DEVICES.get(here, here)}; must be {possible} or auto"
        )


def choose(requested: str, heads: Heads, mask: Mask, scoring: Scoring, *, biased: bool, dropout: bool) -> str:
    """Return an implementation's name; if the requested or fastest one does not support the call, log why once.

    A run that was trained with the implementation of another kind of device is read with one that works here.
    """
    platform = devices.platform(jax.devices()[0])
    longest = max(heads.q_BLHK.shape[1], heads.k_BSGK.shape[1])
    is_long = longest >= BLOCKWISE_FROM.get(platform, BLOCKWISE_FROM_ELSEWHERE)
    unfused = "blockwise" if is_long else "reference"
    wanted = FUSED.get(platform, unfused) if requested == "auto" else requested
    reasons = []
    for name in dict.fromkeys([wanted, unfused, "reference"]):
        obstacle = _obstacle(name, heads, mask, scoring, biased=biased, dropout=dropout)
        if obstacle is None:
            break
        reasons.append(f"{name} does not support {obstacle}")
    if reasons:
        memory = ", whose memory grows with the square of the length" if name == "reference" else ""
        log_once(f"model.attention: {', and '.join(reasons)}; using {name}{memory}")
    return name


def _obstacle(name: str, heads: Heads, mask: Mask, scoring: Scoring, *, biased: bool, dropout: bool) -> str | None:
    """Return the first property of the call that the implementation does not support, or None."""
    length, width, dtype = heads.q_BLHK.shape[1], heads.q_BLHK.shape[3], heads.q_BLHK.dtype.name
    fused, all_but_reference = ("cudnn", "splash"), ("blockwise", "cudnn", "splash")
    platform = devices.platform(jax.devices()[0])
    obstacles = [
        (fused, FUSED.get(platform) != name, DEVICES.get(platform, platform)),
        (fused, mask.key_segments_BS is not None, "cross-attention"),
        (all_but_reference, dropout, "dropout of attention weights"),
        (all_but_reference, scoring.contextual_PK is not None, "the positions of cope"),
        (all_but_reference, scoring.selective, "selective attention"),
        (all_but_reference, scoring.stick_breaking, "stick-breaking"),
        (fused, biased or heads.decay_BLH is not None, "a bias on the logits, such as alibi"),
        (fused, scoring.soft_cap is not None, "a soft cap"),
        (fused, scoring.sink_H is not None, "an attention sink"),
        (fused, width != heads.v_BSGK.shape[3], "keys that are wider than values"),
        (("cudnn",), dtype != "bfloat16", f"products in {dtype}"),
        (("cudnn",), mask.segments_BL is not None, "isolated documents or padding"),
        (("cudnn",), mask.window is not None and not mask.causal, "two-sided windows"),
        (("cudnn",), length % 2, f"length {length}, only even lengths"),
        (("cudnn",), width % 8 or width > 128, f"heads of width {width}, only multiples of 8 up to 128"),
        (("splash",), length % 128, f"length {length}, only multiples of 128"),
        (("splash",), width % 64, f"heads of width {width}, only multiples of 64"),
    ]
    return next((obstacle for names, found, obstacle in obstacles if name in names and found), None)

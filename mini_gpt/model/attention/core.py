"""Step 3 of attention: its settings, and the choice of an implementation for a call and a device."""

import functools
import logging
import math
import pkgutil
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import ScoreMod, Shared
from mini_gpt.runtime import devices
from mini_gpt.runtime.errors import UserError

IMPLEMENTATIONS = {  # {model.attention: its function}, which is imported when it is used
    "reference": "mini_gpt.model.attention.reference:attend",
    "blockwise": "mini_gpt.model.attention.blockwise:attend",
    "cudnn": "mini_gpt.model.attention.kernels:cudnn",
    "splash": "mini_gpt.model.attention.kernels:splash",
}
FUSED = {"cuda": "cudnn", "tpu": "splash"}  # the other implementations run on any device
DEVICES = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "tpu": "TPUs", "cpu": "CPUs"}
BLOCKWISE_MIN_LENGTH = {"cpu": 128}  # shortest sequence in tokens; docs/performance.md has the measurement
BLOCKWISE_MIN_LENGTH_ELSEWHERE = 4096  # not measured

log_once = functools.cache(logging.getLogger(__name__).info)


class Core(nnx.Module):
    """Computes weights from queries and keys, and the weighted sums of the values.

    weights = softmax(mods(scale · qkᵀ)), with zero for masked keys.

    score_mods: modules that change the logits before the mask, called in order as mod(logits_BHLS, context).
    implementation: a name in IMPLEMENTATIONS, or auto.
    sink_kind: "none", "zero" or "trained": a sink is a logit of each head that takes part in the softmax and has no
      value (Agarwal et al. 2025); zero is "softmax off by one".
    stick_breaking: replaces the softmax.
    """

    def __init__(self, config: ModelConfig, score_mods: Sequence[ScoreMod | Shared] = ()):
        self.scale = scale_of(config)
        self.score_mods = nnx.List(score_mods)
        self.platform = devices.platform(jax.devices()[0])
        self.implementation = config.attention
        self.dropout_rate = config.attention_dropout
        self.latent = config.variants.latent  # the last so many entries of a key are the value
        self.stick_breaking = config.variants.normaliser == "stick_breaking"
        self.num_heads, self.sink_kind = config.num_heads, config.variants.sink
        if self.sink_kind == "trained":
            self.sink = nnx.Param(jnp.zeros(config.num_heads, jnp.float32))

    @property
    def needs_all_keys(self) -> str | None:
        """The name in messages of a score mod that needs all keys of a query at once; None if there is no such mod."""
        return next((mod.needs_all_keys for mod in self.score_mods if mod.needs_all_keys), None)

    @property
    def sink_H(self) -> jax.Array | None:
        """The sink of each head, float32, or None."""
        if self.sink_kind == "none":
            return None
        return self.sink[...] if self.sink_kind == "trained" else jnp.zeros(self.num_heads)

    def choose(
        self, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, context: Context, dropout_key: jax.Array | None
    ) -> Callable[..., jax.Array]:
        """Return attend(q_BLHK, k_BSGK, v_BSGK, context) -> out_BLHK: the requested or the fastest implementation.

        If the call or the device does not allow it, return another one and log why, once. Only shapes and dtypes count.
        """
        platform = self.platform
        longest = max(q_BLHK.shape[1], k_BSGK.shape[1])
        is_long = longest >= BLOCKWISE_MIN_LENGTH.get(platform, BLOCKWISE_MIN_LENGTH_ELSEWHERE)
        fallback = "blockwise" if is_long else "reference"
        wanted = FUSED.get(platform, fallback) if self.implementation == "auto" else self.implementation
        has_dropout = dropout_key is not None and self.dropout_rate > 0
        reasons = []
        for name in dict.fromkeys([wanted, fallback, "reference"]):
            reason = self._unsupported(name, q_BLHK, v_BSGK, context, has_dropout)
            if reason is None:  # always for the reference
                break
            reasons.append(f"{name} does not support {reason}")
        if reasons:
            memory = ", whose memory grows with the square of the length" if name == "reference" else ""
            log_once(f"model.attention: {', and '.join(reasons)}; using {name}{memory}")
        options = {"dropout_key": dropout_key} if has_dropout else {}  # only the reference takes it
        return functools.partial(implementation(name), self, **options)

    def _unsupported(
        self, name: str, q_BLHK: jax.Array, v_BSGK: jax.Array, context: Context, has_dropout: bool
    ) -> str | None:
        """Return the first property of the call that the implementation does not support, or None."""
        length, width, dtype = q_BLHK.shape[1], q_BLHK.shape[3], q_BLHK.dtype.name
        fused, all_but_reference = ("cudnn", "splash"), ("blockwise", "cudnn", "splash")
        mask, has_segments = context.mask, context.queries.segments_BL is not None
        unsupported_if = [  # (implementations, condition, what they do not support then)
            (fused, FUSED.get(self.platform) != name, DEVICES.get(self.platform, self.platform)),
            (fused, context.queries is not context.keys, "cross-attention"),
            (all_but_reference, has_dropout, "dropout of attention weights"),
            (all_but_reference, self.needs_all_keys is not None, self.needs_all_keys),
            (all_but_reference, self.stick_breaking, "stick-breaking"),
            (fused, len(self.score_mods) > 0, "changes of the logits, such as alibi or a soft cap"),
            (fused, self.sink_kind != "none", "an attention sink"),
            (fused, width != v_BSGK.shape[3], "keys and values of different widths"),
            (("cudnn",), dtype != "bfloat16", f"products in {dtype}"),
            (("cudnn",), has_segments, "isolated documents or padding"),
            (("cudnn",), mask.window is not None and not mask.causal, "two-sided windows"),
            (("cudnn",), length % 2, f"length {length}, only even lengths"),
            (("cudnn",), width % 8 or width > 128, f"heads of width {width}, only multiples of 8 up to 128"),
            (("splash",), length % 128, f"length {length}, only multiples of 128"),
            (("splash",), width % 64, f"heads of width {width}, only multiples of 64"),
        ]
        for names, condition, reason in unsupported_if:
            if name in names and condition:
                return reason
        return None


def scale_of(config: ModelConfig) -> float:
    """Return the factor of the products of queries and keys."""
    return 1 / math.sqrt(config.scale_width) if config.scale_attention else 1.0


def implementation(name: str) -> Callable[..., jax.Array]:
    """Return the function of an implementation."""
    return pkgutil.resolve_name(IMPLEMENTATIONS[name])


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

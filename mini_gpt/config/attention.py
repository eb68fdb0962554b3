"""The config fields of positional encodings and of variants of attention."""

import dataclasses
import math
import pkgutil
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from mini_gpt.config.fields import (
    Count,
    Epsilon,
    OptionalSize,
    Positive,
    Section,
    ShareAbove0,
    Size,
    Values,
    above,
    at_least,
    field,
)

ENCODINGS = {  # {model.position: its class}, which is imported when a config chooses it
    "none": "mini_gpt.model.positions.base:NoEncoding",
    "learned": "mini_gpt.model.positions.absolute:Learned",
    "sinusoidal": "mini_gpt.model.positions.absolute:Sinusoidal",
    "rope": "mini_gpt.model.positions.rotary:Rope",
    "pope": "mini_gpt.model.positions.rotary:Pope",
    "alibi": "mini_gpt.model.positions.biases:Alibi",
    "hard_alibi": "mini_gpt.model.positions.biases:HardAlibi",
    "t5": "mini_gpt.model.positions.biases:T5",
    "kerple": "mini_gpt.model.positions.biases:Kerple",
    "fire": "mini_gpt.model.positions.biases:Fire",
    "fox": "mini_gpt.model.positions.contextual:Fox",
    "cope": "mini_gpt.model.positions.contextual:Cope",
    "accumulated": "mini_gpt.model.positions.accumulated:Accumulated",
    "path": "mini_gpt.model.positions.path:Path",
    "relative_logits": "mini_gpt.model.positions.relative:RelativeLogits",
}
OWN_ATTENTION = {  # {field of `model.variants`: its class of attention}
    "latent": "mini_gpt.model.attention.latent:LatentAttention",
    "differential": "mini_gpt.model.attention.differential:DifferentialAttention",
}
Base = Annotated[float, above(1)]
Factor = Annotated[float, at_least(1)]
if TYPE_CHECKING:
    Position = str
else:
    Position = Literal[tuple(ENCODINGS)]


def encoding(name: str) -> Any:
    """Return the class of an encoding, a subclass of `model.positions.base.Encoding`."""
    return pkgutil.resolve_name(ENCODINGS[name])


class LayerKind(NamedTuple):
    """The fields that may differ between layers.

    window: of attention, in tokens; None: all keys.
    heads: the numbers of the heads that the layer keeps.
    depth: the number of the layer in models whose layers differ by it (`variants.differential`), else 0.
    """

    position: str
    window: int | None
    rope_base: float
    rope_factor: float
    heads: tuple[int, ...]
    depth: int = 0


def pattern(value: object) -> tuple[Any, ...]:
    """Return a field such as model.position as a tuple. It repeats over the layers."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _original_context(values: Values) -> int:
    """context_length / model.rope.factor"""
    return max(1, round(values["context_length"] / max(pattern(values["model.rope.factor"]), default=1)))


def beta_fast(values: Values) -> float:
    """32, chosen for LLaMA; llama3: 4"""
    return 4.0 if values["model.rope.scaling"] == "llama3" else 32.0


class RopeConfig(Section, prefix="model.rope."):
    """Rotary positions (Su et al. 2021), with scaling to longer contexts."""

    base: Base | tuple[Base, ...] = field(10_000.0, "wavelengths are 2π to 2π × base; a tuple repeats over the layers")
    fraction: ShareAbove0 = field(1.0, "share of a head's dimensions that are rotated")
    turning: ShareAbove0 = field(1.0, "p-RoPE: share of the pairs, from the fastest, that turn (Barbero et al. 2025)")
    scaling: Literal["none", "linear", "ntk", "dynamic", "yarn", "yarn_by_index", "yarn_unrounded", "llama3"] = field(
        "none", "for longer contexts: linear (Chen 2023), ntk, dynamic, three forms of yarn (Peng 2023), llama3"
    )
    factor: Factor | tuple[Factor, ...] = field(1.0, "target / original context; a tuple repeats over the layers")
    original_context: Count = field(None, "tokens, before scaling", follows=_original_context)
    beta_slow: Positive = field(1.0, "yarns, llama3: pairs with fewer turns in the original context are interpolated")
    beta_fast: float = field(None, "yarns, llama3: pairs with more turns are unchanged", follows=beta_fast)
    attention_factor: Annotated[float | None, above(0)] = field(None, "yarns: factor of q and k; None: the paper's")

    @property
    def of_first_layer(self) -> "RopeConfig":
        return self.of_layer(pattern(self.base)[0], pattern(self.factor)[0])

    def of_layer(self, base: float, factor: float) -> "RopeConfig":
        """Return the fields of a layer in a pattern; a factor of 1 is no scaling, unless it is dynamic."""
        is_scaled = factor != 1 or self.scaling == "dynamic"
        return dataclasses.replace(self, base=base, factor=factor, scaling=self.scaling if is_scaled else "none")

    def check(self) -> None:
        if self.beta_fast <= self.beta_slow:
            self.refuse("beta_fast", f"must be above model.rope.beta_slow ({self.beta_slow})")


def _half_of_the_heads(values: Values) -> int:
    """model.num_heads / 2, rounded up"""
    return (values["model.num_heads"] + 1) // 2


def _half_of_the_context(values: Values) -> float:
    """context_length / 2"""
    return values["context_length"] / 2


def _at_most_64(values: Values) -> int:
    """context_length, at most 64"""
    return min(64, values["context_length"])


class SinusoidalConfig(Section, prefix="model.sinusoidal."):
    """Sinusoidal positions (Vaswani et al. 2017)."""

    base: Base = field(10_000.0, "wavelengths are between 2π and 2π × base")
    amplitude: Positive = field(1.0, "in standard deviations of the embedding's entries")
    columns: OptionalSize = field(None, "concatenated: they replace the last columns of embeddings; None: added to all")


class T5Config(Section, prefix="model.t5."):
    """T5's learned bias for each bucket of distances (Raffel et al. 2020)."""

    num_buckets: int = field(32, "a positive multiple of 4; half of the buckets hold one distance each")
    max_distance: int = field(128, "this and larger distances share the last bucket")

    def check(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 4:
            self.refuse("num_buckets", "must be a positive multiple of 4")
        if self.max_distance <= self.num_buckets:
            self.refuse("max_distance", f"must be above model.t5.num_buckets ({self.num_buckets})")


class HardAlibiConfig(Section, prefix="model.hard_alibi."):
    """Hard-ALiBi: some heads see only the last tokens (Jelassi et al. 2024)."""

    heads: Annotated[int, at_least(0)] = field(None, "head i of these sees i + 1 tokens", follows=_half_of_the_heads)


class FireConfig(Section, prefix="model.fire."):
    """FIRE: a trained function of relative distances (Li et al. 2024)."""

    width: Size = field(32, "of the hidden layer")
    threshold: Positive = field(
        None, "initial L: distances are divided by max(L, position of the query), in logs", follows=_half_of_the_context
    )


class CopeConfig(Section, prefix="model.cope."):
    """CoPE: positions that count the gates between key and query (Golovneva et al. 2024)."""

    positions: Size = field(None, "rows of the table; keys further away share the last", follows=_at_most_64)


def _at_most_1024(values: Values) -> int:
    """context_length, at most 1024"""
    return min(1024, values["context_length"])


class RelativeLogitsConfig(Section, prefix="model.relative_logits."):
    """Relative logits: biases by distance, weighted by the query's token (code of Inkling, 2026)."""

    extent: Size = field(None, "distances with a bias, from 0 on", follows=_at_most_1024)


def _ssmax_start(values: Values) -> float:
    """1 / the mean of ln n over the queries of a context that see n keys, with the largest window of the layers"""
    length = values["context_length"]
    windows = [min(window or length, length) for window in pattern(values["model.attention_window"])]
    window = max(windows, default=length)
    logs = math.lgamma(window + 1) + (length - window) * math.log(window)  # n = 1..window, then window for the others
    if not values["model.causal"]:
        short = min(window - 1, length - window)  # queries at each end whose window leaves the text: n = window, …
        logs = 2 * (math.lgamma(window + short) - math.lgamma(window))
        logs += (length - 2 * short) * math.log(min(2 * window - 1, length))
    return length / logs if logs else 1.0


class VariantsConfig(Section, prefix="model.variants."):
    """Variants of attention. By default, none."""

    qk_norm: Literal["none", "plain", "weighted", "all_heads", "layernorm"] = field(
        "none",
        "norm of queries and keys; plain: without weights; all_heads: over all heads of a token; layernorm: as in Phi",
    )
    qk_norm_epsilon: Epsilon = field(1e-6, "of qk_norm, added to the mean square or to the variance")
    clip_qkv: Annotated[float | None, above(0)] = field(None, "limit entries of q, k and v to ± this (MPT, OLMo)")
    query_scale: Literal["none", "ssmax", "llama4"] = field(
        "none", "factor of queries: s · ln(visible keys) (Nakanishi 2025), or Llama 4's by position"
    )
    ssmax_start: Positive = field(None, "initial s of ssmax", follows=_ssmax_start)
    soft_cap: Annotated[float | None, above(0)] = field(None, "c: logits become c · tanh(logits / c) (Gemma Team 2024)")
    normaliser: Literal["softmax", "stick_breaking"] = field(
        "softmax", "of the logits; stick_breaking: recent keys first (Tan et al. 2025)"
    )
    selective: bool = field(False, "a query lowers the logits of keys for later queries (Leviathan et al. 2025)")
    canon: bool = field(False, "canon-A: a causal convolution of 4 tokens, before the projections (Allen-Zhu 2025)")
    differential: bool = field(False, "pairs of heads: the first's weights minus λ times the second's (Ye et al. 2025)")
    latent: OptionalSize = field(
        None, "width of a vector that gives all keys and values, and is cached (MLA, DeepSeek-AI 2024)"
    )
    sink: Literal["none", "zero", "trained"] = field(
        "none", "a logit of each head without a value (gpt-oss); zero: softmax off by one"
    )
    gate: Literal["none", "head", "entry"] = field(
        "none", "factors σ(W x) of the heads' outputs (Qiu et al. 2025), one for each head or entry"
    )

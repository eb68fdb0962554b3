"""The fields of a model, and what must hold between them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from mini_gpt.config.fields import Count, Positive, Rate, Section, ShareAbove0, above, at_least, field, specs, up_to

Position = Literal["none", "learned", "sinusoidal", "rope", "alibi", "t5"]
INPUT_POSITIONS = ("learned", "sinusoidal")  # these act once, at the input, so never per layer
MOST_LAYERS, LARGEST = 4096, 2**24  # beyond any real model: a config from elsewhere can't ask for unlimited memory
Size = Annotated[int, up_to(LARGEST)]
OptionalSize = Annotated[int | None, up_to(LARGEST)]


def pattern(position: Any) -> tuple[Any, ...]:
    """Return model.position as a tuple, which repeats over the layers."""
    return tuple(position) if isinstance(position, list | tuple) else (position,)


def _feed_forward_width(values: Mapping[str, Any]) -> int:
    """4 × model.d_model; for swiglu 8/3 × model.d_model"""
    # SwiGLU has three matrices instead of two: 8/3 of the width keeps the count (Shazeer 2020), in multiples of 8.
    width = values["model.d_model"]
    return 8 * round(width / 3) if values["model.activation"] == "swiglu" else 4 * width


def _most_positions(values: Mapping[str, Any]) -> int:
    """model.random_positions, or else context_length"""
    return values["model.random_positions"] or values["context_length"]


def _original_context(values: Mapping[str, Any]) -> int | None:
    """context_length / model.rope.factor"""
    rotary = "rope" in pattern(values["model.position"])
    return max(1, round(values["context_length"] / values["model.rope.factor"])) if rotary else None


class RopeConfig(Section, prefix="model.rope."):
    """Rotary positions (Su et al. 2021), and how they are scaled to longer contexts."""

    base: Annotated[float, above(1)] = field(10_000.0, "wavelengths go from 2π to nearly 2π times this")
    fraction: ShareAbove0 = field(1.0, "share of a head's dimensions that are rotated")
    scaling: Literal["none", "linear", "ntk", "yarn"] = field(
        "none", "to longer contexts: linear (Chen et al. 2023), ntk, yarn (Peng et al. 2023)"
    )
    factor: Annotated[float, at_least(1)] = field(1.0, "context to reach, as a multiple of the original context")
    original_context: Annotated[int | None, at_least(1)] = field(None, "tokens, before scaling", _original_context)
    beta_slow: Positive = field(1.0, "yarn: pairs that turn less often in the original context are interpolated")
    beta_fast: float = field(32.0, "yarn: pairs that turn more often stay; 1 and 32 were chosen for LLaMA")

    def check(self) -> None:
        if self.beta_fast <= self.beta_slow:
            self.refuse("beta_fast", f"must be above model.rope.beta_slow ({self.beta_slow})")


class SinusoidalConfig(Section, prefix="model.sinusoidal."):
    """Sinusoidal positions (Vaswani et al. 2017)."""

    base: Annotated[float, above(1)] = field(10_000.0, "wavelengths go from 2π to nearly 2π times this")
    amplitude: Positive = field(1.0, "in standard deviations of an embedding's entries")


class T5Config(Section, prefix="model.t5."):
    """T5's learned bias for each bucket of distances (Raffel et al. 2020)."""

    num_buckets: int = field(32, "a positive multiple of 4; half of the buckets hold one distance each")
    max_distance: int = field(128, "distances from here on share a bucket")

    def check(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 4:
            self.refuse("num_buckets", "must be a positive multiple of 4")
        if self.max_distance <= self.num_buckets:
            self.refuse("max_distance", f"must be above model.t5.num_buckets ({self.num_buckets})")


class ModelConfig(Section, prefix="model."):
    """The decoder: its size, its variants, and its positional encoding."""

    position: Position | tuple[Position, ...] = field("rope", "positional encoding; a tuple repeats over the layers")
    max_positions: Count = field(None, "rows of the table of learned positions", _most_positions)
    dtype: Literal["auto", "float32", "bfloat16"] = field("auto", "of products; auto: bfloat16 if the hardware has it")
    attention: Literal["auto", "reference", "blockwise", "cudnn", "splash"] = field(
        "auto", "implementation: cudnn for NVIDIA GPUs, splash for TPUs, auto: the fastest", before="auto"
    )
    num_layers: Annotated[int, up_to(MOST_LAYERS)] = field(4, "blocks")
    d_model: Size = field(128, "width of the residual stream")
    num_heads: Size = field(4, "query heads; must divide d_model")
    num_kv_heads: Size = field(None, "below num_heads: grouped queries (Ainslie et al. 2023)", "model.num_heads")
    d_ff: Size = field(None, "width of the feed-forward layer", _feed_forward_width)
    dropout: Rate = field(0.0, "rate of the following three, unless they are set")
    embedding_dropout: Rate = field(None, "of the embeddings, after the positions", "model.dropout")
    sublayer_dropout: Rate = field(None, "of a sublayer's output, before it is added", "model.dropout")
    attention_dropout: Rate = field(None, "of the attention weights", "model.dropout")
    norm: Literal["layernorm", "rmsnorm"] = field("layernorm", "normalization, of the sublayers and before the output")
    norm_placement: Literal["pre", "post"] = field("pre", "pre: x + f(norm(x)); post: norm(x + f(x))")
    use_bias: bool = field(True, "in every projection, and in layernorm")
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu"] = field(
        "gelu", "gelu: tanh form, as in GPT-2; gelu_exact: by erf"
    )
    causal: bool = field(True, "false: bidirectional, for the masked objective")
    tie_embeddings: bool = field(True, "the output projection is the embedding, transposed")
    scale_embeddings: bool = field(False, "initialized at 1/sqrt(d_model) and scaled by sqrt(d_model); else at 0.02")
    scale_attention: bool = field(True, "divide the scores by sqrt(head width); false for ablation only")
    residual: bool = field(True, "residual connections; false for ablation only")
    remat: Literal["none", "dots", "block"] = field(
        "none", "recompute in the backward pass: dots (all but products with weights), block (all)", before="none"
    )
    scan_layers: bool = field(False, "loop over stacked blocks: 24 layers compile about as fast as 4", before=False)
    attention_window: OptionalSize = field(None, "keys that a query sees, with itself (Jiang et al. 2023); None: all")
    random_positions: OptionalSize = field(None, "draw ordered positions below this (Ruoss et al. 2023); None: 0, 1, …")
    rope: RopeConfig
    sinusoidal: SinusoidalConfig
    t5: T5Config

    def check(self) -> None:
        encodings, heads, period = self.position_pattern, self.num_heads, len(self.position_pattern)
        if self.d_model % heads:
            self.refuse("d_model", f"must be divisible by model.num_heads ({heads})")
        if heads % self.num_kv_heads:
            self.refuse("num_kv_heads", f"must divide model.num_heads ({heads})")
        if period == 0:
            self.refuse("position", "a pattern needs at least one encoding")
        if period == 1:
            object.__setattr__(self, "position", encodings[0])
        for name in set(encodings) & set(INPUT_POSITIONS):
            if period > 1:
                self.refuse("position", f"{name} acts once at the input and can't be part of a pattern over the layers")
        if period > self.num_layers:
            self.refuse("position", f"the pattern must not be longer than model.num_layers ({self.num_layers})")
        if self.scan_layers and self.num_layers % period:
            self.refuse("num_layers", f"model.scan_layers loops over whole patterns: must be divisible by {period}")
        if self.position == "learned" and (self.random_positions or 0) > self.max_positions:
            self.refuse("random_positions", f"learned positions end at model.max_positions ({self.max_positions})")
        if self.position == "sinusoidal" and self.d_model % 2:
            self.refuse("d_model", "sinusoidal positions need an even width")
        if "rope" in encodings:
            self._check_rope()
        else:
            for name in ("scaling", "factor", "original_context", "beta_slow", "beta_fast"):
                if getattr(self.rope, name) != specs(RopeConfig)[f"model.rope.{name}"].default:
                    self.refuse(f"rope.{name}", f"scales rotary positions, and model.position is {self.position!r}")

    def _check_rope(self) -> None:
        scaling, rotated = self.rope.scaling, self.rotated_width
        if scaling != "none" and self.rope.factor == 1:
            self.refuse(
                "rope.factor", f"model.rope.scaling={scaling} changes nothing by a factor of 1; give a larger one"
            )
        if scaling == "ntk" and rotated <= 2:
            self.refuse("rope.scaling", f"needs more than one pair of dimensions, and {rotated} dimensions are rotated")
        if rotated == 0 or rotated % 2:
            self.refuse(
                "d_model",
                f"rope turns pairs of dimensions: with model.num_heads={self.num_heads} and model.rope.fraction="
                f"{self.rope.fraction} it turns {rotated} of a head's {self.head_width}, which must be even",
            )

    @property
    def position_pattern(self) -> tuple[str, ...]:
        return pattern(self.position)

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def rotated_width(self) -> int:
        return int(self.head_width * self.rope.fraction)

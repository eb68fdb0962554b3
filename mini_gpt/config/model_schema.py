"""The fields of a model: their types, their ranges, and what must hold between them."""

import dataclasses
import difflib
from typing import Literal

from mini_gpt.runtime.errors import UserError, require, shown

POSITIONS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
INPUT_POSITIONS = ("learned", "sinusoidal")  # these act once, at the input, so never per layer
MOST_LAYERS, LARGEST = 4096, 2**24  # what no model has, so that a config from elsewhere can't ask for any memory


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    base: float
    fraction: float
    scaling: Literal["none", "linear", "ntk", "yarn"]
    factor: float
    original_context: int | None
    beta_slow: float
    beta_fast: float

    def __post_init__(self):
        require(self.base > 1, "model.rope.base", self.base, "must be above 1")
        require(0 < self.fraction <= 1, "model.rope.fraction", self.fraction, "must be in (0, 1]")
        require(self.factor >= 1, "model.rope.factor", self.factor, "must be at least 1")
        require(
            self.original_context is None or self.original_context >= 1,
            "model.rope.original_context",
            self.original_context,
            "must be at least 1",
        )
        require(self.beta_slow > 0, "model.rope.beta_slow", self.beta_slow, "must be above 0")
        require(
            self.beta_fast > self.beta_slow,
            "model.rope.beta_fast",
            self.beta_fast,
            f"must be above model.rope.beta_slow ({self.beta_slow})",
        )


@dataclasses.dataclass(frozen=True)
class SinusoidalConfig:
    base: float
    amplitude: float

    def __post_init__(self):
        require(self.base > 1, "model.sinusoidal.base", self.base, "must be above 1")
        require(self.amplitude > 0, "model.sinusoidal.amplitude", self.amplitude, "must be above 0")


@dataclasses.dataclass(frozen=True)
class T5Config:
    num_buckets: int
    max_distance: int

    def __post_init__(self):
        require(
            self.num_buckets >= 4 and self.num_buckets % 4 == 0,
            "model.t5.num_buckets",
            self.num_buckets,
            "must be a positive multiple of 4",
        )
        require(
            self.max_distance > self.num_buckets,
            "model.t5.max_distance",
            self.max_distance,
            f"must be above model.t5.num_buckets ({self.num_buckets})",
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    position: str | tuple[str, ...]
    max_positions: int
    dtype: Literal["auto", "float32", "bfloat16"]
    attention: Literal["auto", "reference", "blockwise", "cudnn", "splash"]
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    dropout: float
    embedding_dropout: float
    sublayer_dropout: float
    attention_dropout: float
    norm: Literal["layernorm", "rmsnorm"]
    norm_placement: Literal["pre", "post"]
    use_bias: bool
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu"]
    causal: bool
    tie_embeddings: bool
    scale_embeddings: bool
    scale_attention: bool
    residual: bool
    remat: Literal["none", "dots", "block"]
    scan_layers: bool
    attention_window: int | None
    random_positions: int | None
    rope: RopeConfig
    sinusoidal: SinusoidalConfig
    t5: T5Config

    def __post_init__(self):
        for name in ("max_positions", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff"):
            most = {"num_layers": MOST_LAYERS, "max_positions": 2**31 - 1}.get(name, LARGEST)
            require(1 <= getattr(self, name) <= most, f"model.{name}", getattr(self, name), f"must be in 1..{most}")
        for name in ("dropout", "embedding_dropout", "sublayer_dropout", "attention_dropout"):
            require(0 <= getattr(self, name) < 1, f"model.{name}", getattr(self, name), "must be in [0, 1)")
        require(
            self.d_model % self.num_heads == 0,
            "model.d_model",
            self.d_model,
            f"must be divisible by model.num_heads ({self.num_heads})",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"must divide model.num_heads ({self.num_heads})",
        )
        pattern = self.position_pattern
        require(len(pattern) > 0, "model.position", self.position, "a pattern needs at least one encoding")
        for name in pattern:
            if name not in POSITIONS:
                near = difflib.get_close_matches(name, POSITIONS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(
                    f"model.position: found {shown(name)}; must be one of {', '.join(POSITIONS)}, or a tuple of "
                    f"them{hint}"
                )
            require(
                len(pattern) == 1 or name not in INPUT_POSITIONS,
                "model.position",
                self.position,
                f"{name} acts once at the input and can't be part of a pattern over the layers",
            )
        require(
            self.num_layers >= len(pattern),
            "model.position",
            self.position,
            f"the pattern must not be longer than model.num_layers ({self.num_layers})",
        )
        require(
            not self.scan_layers or self.num_layers % len(pattern) == 0,
            "model.num_layers",
            self.num_layers,
            f"model.scan_layers goes over whole periods of model.position: must be divisible by {len(pattern)}",
        )
        for name in ("attention_window", "random_positions"):
            value = getattr(self, name)
            require(value is None or 1 <= value <= LARGEST, f"model.{name}", value, f"must be in 1..{LARGEST}, or None")
        if "learned" in pattern and self.random_positions is not None:
            require(
                self.random_positions <= self.max_positions,
                "model.random_positions",
                self.random_positions,
                f"learned positions end at model.max_positions ({self.max_positions})",
            )
        if "rope" not in pattern:
            plain_rope = {
                "scaling": "none",
                "factor": 1.0,
                "original_context": None,
                "beta_slow": 1.0,
                "beta_fast": 32.0,
            }
            for name, plain in plain_rope.items():
                value = getattr(self.rope, name)
                require(
                    value == plain,
                    f"model.rope.{name}",
                    value,
                    f"scales rotary positions, and model.position is {self.position!r}",
                )
        if "rope" in pattern:
            require(
                self.rope.scaling == "none" or self.rope.factor > 1,
                "model.rope.factor",
                self.rope.factor,
                f"model.rope.scaling={self.rope.scaling} changes nothing by a factor of 1; give a larger one",
            )
            require(
                self.rope.scaling != "ntk" or self.rotated_width > 2,
                "model.rope.scaling",
                self.rope.scaling,
                f"needs more than one pair of dimensions to turn, and there are {self.rotated_width} dimensions",
            )
            require(
                self.rotated_width % 2 == 0 and self.rotated_width > 0,
                "model.d_model",
                self.d_model,
                f"rope turns pairs of dimensions: with model.num_heads={self.num_heads} and model.rope.fraction="
                f"{self.rope.fraction} it turns {self.rotated_width} of a head's {self.head_width}, which must be even",
            )
        if "sinusoidal" in pattern:
            require(self.d_model % 2 == 0, "model.d_model", self.d_model, "sinusoidal positions need an even width")

    @property
    def position_pattern(self) -> tuple[str, ...]:
        return (self.position,) if isinstance(self.position, str) else self.position

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def rotated_width(self) -> int:
        return int(self.head_width * self.rope.fraction)

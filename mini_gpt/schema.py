"""Every config field: its type, its range, and what must hold between fields. Defaults stand in configs/default.py."""

import dataclasses
import difflib
from typing import Any, Literal

from mini_gpt.errors import UserError

POSITIONS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
TASK = "task:"  # what the name of a corpus of task examples begins with
INPUT_POSITIONS = ("learned", "sinusoidal")  # these act once, at the input, so never per layer


def _require(condition: bool, field: str, found: Any, right: str) -> None:
    if not condition:
        raise UserError(f"{field}: found {found!r}; {right}")


def batch_problem(train: "TrainConfig", data: int, fsdp: int) -> str | None:
    """Says what is wrong where the devices that split the batch, and the parts of a step, do not divide it evenly."""
    shares = data * fsdp * train.accumulation_steps
    if train.batch_size % shares == 0:
        return None
    return (
        f"train.batch_size: found {train.batch_size}; must be divisible by {shares}: {data * fsdp} devices "
        f"(mesh.data × mesh.fsdp) × {train.accumulation_steps} train.accumulation_steps"
    )


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
        _require(self.base > 1, "model.rope.base", self.base, "must be above 1")
        _require(0 < self.fraction <= 1, "model.rope.fraction", self.fraction, "must be in (0, 1]")
        _require(self.factor >= 1, "model.rope.factor", self.factor, "must be at least 1")
        _require(
            self.original_context is None or self.original_context >= 1,
            "model.rope.original_context",
            self.original_context,
            "must be at least 1",
        )
        _require(self.beta_slow > 0, "model.rope.beta_slow", self.beta_slow, "must be above 0")
        _require(
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
        _require(self.base > 1, "model.sinusoidal.base", self.base, "must be above 1")
        _require(self.amplitude > 0, "model.sinusoidal.amplitude", self.amplitude, "must be above 0")


@dataclasses.dataclass(frozen=True)
class T5Config:
    num_buckets: int
    max_distance: int

    def __post_init__(self):
        _require(
            self.num_buckets >= 4 and self.num_buckets % 4 == 0,
            "model.t5.num_buckets",
            self.num_buckets,
            "must be a positive multiple of 4",
        )
        _require(
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
    activation: Literal["gelu", "relu", "swiglu"]
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
            _require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        for name in ("dropout", "embedding_dropout", "sublayer_dropout", "attention_dropout"):
            _require(0 <= getattr(self, name) < 1, f"model.{name}", getattr(self, name), "must be in [0, 1)")
        _require(
            self.d_model % self.num_heads == 0,
            "model.d_model",
            self.d_model,
            f"must be divisible by model.num_heads ({self.num_heads})",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"must divide model.num_heads ({self.num_heads})",
        )
        pattern = self.position_pattern
        _require(len(pattern) > 0, "model.position", self.position, "a pattern needs at least one encoding")
        for name in pattern:
            if name not in POSITIONS:
                near = difflib.get_close_matches(name, POSITIONS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(
                    f"model.position: found {name!r}; must be one of {', '.join(POSITIONS)}, or a tuple of them{hint}"
                )
            _require(
                len(pattern) == 1 or name not in INPUT_POSITIONS,
                "model.position",
                self.position,
                f"{name} acts once at the input and can't be part of a pattern over the layers",
            )
        _require(
            self.num_layers >= len(pattern),
            "model.position",
            self.position,
            f"the pattern must not be longer than model.num_layers ({self.num_layers})",
        )
        _require(
            not self.scan_layers or self.num_layers % len(pattern) == 0,
            "model.num_layers",
            self.num_layers,
            f"model.scan_layers goes over whole periods of model.position: must be divisible by {len(pattern)}",
        )
        for name in ("attention_window", "random_positions"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"model.{name}", value, "must be at least 1, or None")
        if "learned" in pattern and self.random_positions is not None:
            _require(
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
                _require(
                    value == plain,
                    f"model.rope.{name}",
                    value,
                    f"scales rotary positions, and model.position is {self.position!r}",
                )
        if "rope" in pattern:
            _require(
                self.rope.scaling == "none" or self.rope.factor > 1,
                "model.rope.factor",
                self.rope.factor,
                f"model.rope.scaling={self.rope.scaling} changes nothing by a factor of 1; give a larger one",
            )
            _require(
                self.rope.scaling != "ntk" or self.rotated_width > 2,
                "model.rope.scaling",
                self.rope.scaling,
                f"needs more than one pair of dimensions to turn, and there are {self.rotated_width} dimensions",
            )
            _require(
                self.rotated_width % 2 == 0 and self.rotated_width > 0,
                "model.d_model",
                self.d_model,
                f"rope turns pairs of dimensions: with model.num_heads={self.num_heads} and model.rope.fraction="
                f"{self.rope.fraction} it turns {self.rotated_width} of a head's {self.head_width}, which must be even",
            )
        if "sinusoidal" in pattern:
            _require(self.d_model % 2 == 0, "model.d_model", self.d_model, "sinusoidal positions need an even width")

    @property
    def position_pattern(self) -> tuple[str, ...]:
        return (self.position,) if isinstance(self.position, str) else self.position

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def rotated_width(self) -> int:
        return int(self.head_width * self.rope.fraction)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    corpus: str
    path: str | None
    split: Literal["documents", "contiguous"]
    split_fractions: tuple[float, float, float]
    tokenizer: Literal["bytes", "characters", "bpe"]
    vocab_size: int
    task_length: int
    isolate_documents: bool
    cache_dir: str | None

    def __post_init__(self):
        fractions = self.split_fractions
        _require(
            all(f >= 0 for f in fractions) and abs(sum(fractions) - 1) < 1e-6 and fractions[0] > 0,
            "data.split_fractions",
            fractions,
            "(train, validation, test) must be non-negative, sum to 1, and leave something to train on",
        )
        _require(
            self.vocab_size > 257,
            "data.vocab_size",
            self.vocab_size,
            "bpe needs more than 257: 256 bytes, a separator, and merges",
        )
        _require(self.task_length >= 1, "data.task_length", self.task_length, "must be at least 1")
        if self.is_task:
            _require(
                self.tokenizer == "characters",
                "data.tokenizer",
                self.tokenizer,
                "the tasks have a fixed vocabulary: must be characters",
            )
        if self.corpus == "text":
            _require(
                self.path is not None, "data.path", self.path, "data.corpus=text needs a glob, such as 'books/**/*.txt'"
            )

    @property
    def is_task(self) -> bool:
        return self.corpus.startswith(TASK)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    objective: Literal["next_token", "masked"]
    mask_rate: float
    steps: int
    batch_size: int
    accumulation_steps: int
    label_smoothing: float
    log_every: int

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation_steps", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        _require(0 <= self.label_smoothing < 1, "train.label_smoothing", self.label_smoothing, "must be in [0, 1)")
        _require(0 < self.mask_rate < 1, "train.mask_rate", self.mask_rate, "must be in (0, 1)")
        _require(
            self.batch_size % self.accumulation_steps == 0,
            "train.batch_size",
            self.batch_size,
            f"must be divisible by train.accumulation_steps ({self.accumulation_steps})",
        )


@dataclasses.dataclass(frozen=True)
class MuonConfig:
    adam_learning_rate: float | None
    momentum: float
    newton_schulz_steps: int

    def __post_init__(self):
        rate, steps = self.adam_learning_rate, self.newton_schulz_steps
        _require(rate is None or rate > 0, "optimizer.muon.adam_learning_rate", rate, "must be above 0, or None")
        _require(0 <= self.momentum < 1, "optimizer.muon.momentum", self.momentum, "must be in [0, 1)")
        _require(steps >= 1, "optimizer.muon.newton_schulz_steps", steps, "must be at least 1")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"]
    learning_rate: float
    schedule: Literal["inverse_sqrt", "cosine", "wsd", "constant"]
    warmup_steps: int
    decay_fraction: float
    final_fraction: float
    weight_decay: float
    b1: float
    b2: float
    clip_norm: float
    muon: MuonConfig

    def __post_init__(self):
        _require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "must be above 0")
        _require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "must be above 0")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must be at least 0")
        _require(
            self.schedule != "inverse_sqrt" or self.warmup_steps > 0,
            "optimizer.warmup_steps",
            self.warmup_steps,
            "inverse_sqrt needs at least 1: its scale is the warm-up's length",
        )
        for name in ("decay_fraction", "final_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"optimizer.{name}", getattr(self, name), "must be in [0, 1]")
        for name in ("b1", "b2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "must be in [0, 1)")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be at least 0")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int
    tokens: int
    sample_tokens: int

    def __post_init__(self):
        for name in ("every", "tokens"):
            _require(getattr(self, name) >= 1, f"eval.{name}", getattr(self, name), "must be at least 1")
        _require(self.sample_tokens >= 0, "eval.sample_tokens", self.sample_tokens, "must be at least 0")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int

    def __post_init__(self):
        for name in ("every", "keep"):
            _require(getattr(self, name) >= 1, f"checkpoint.{name}", getattr(self, name), "must be at least 1")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int
    tensor: int

    def __post_init__(self):
        _require(
            self.data == -1 or self.data >= 1, "mesh.data", self.data, "must be at least 1, or -1 for all devices left"
        )
        for name in ("fsdp", "tensor"):
            _require(getattr(self, name) >= 1, f"mesh.{name}", getattr(self, name), "must be at least 1")


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int
    context_length: int
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig

    def __post_init__(self):
        _require(0 <= self.seed < 2**31, "seed", self.seed, "must be in [0, 2**31)")
        _require(self.context_length >= 1, "context_length", self.context_length, "must be at least 1")
        if self.model.position == "learned":
            _require(
                self.context_length <= self.model.max_positions,
                "context_length",
                self.context_length,
                f"learned positions end at model.max_positions ({self.model.max_positions})",
            )
        if self.model.random_positions is not None:
            _require(
                self.context_length <= self.model.random_positions,
                "model.random_positions",
                self.model.random_positions,
                f"must leave room for context_length ({self.context_length}) different positions",
            )
        _require(
            self.data.isolate_documents or not self.data.is_task or self.train.objective == "next_token",
            "data.isolate_documents",
            self.data.isolate_documents,
            "must be True for a task with masked answers: both sides of the text see what fills up the row",
        )
        causal, objective = self.model.causal, self.train.objective
        _require(
            causal or objective == "masked",
            "train.objective",
            objective,
            "model.causal is False, and a bidirectional model sees the next token: must be masked",
        )
        _require(
            not causal or objective == "next_token",
            "train.objective",
            objective,
            "masked prediction needs both sides of the text: set model.causal=False",
        )
        self._check_mesh()

    def _check_mesh(self) -> None:
        """Names all sizes that the mesh does not divide, in one line; how many devices there are is asked later."""
        problems = [
            f"{name}: found {size}; must be divisible by mesh.{axis} ({getattr(self.mesh, axis)})"
            for name, size, axis in (
                ("model.num_heads", self.model.num_heads, "tensor"),
                ("model.num_kv_heads", self.model.num_kv_heads, "tensor"),
                ("model.d_ff", self.model.d_ff, "tensor"),
                ("model.d_model", self.model.d_model, "fsdp"),
            )
            if size % getattr(self.mesh, axis)
        ]
        batch = None if self.mesh.data == -1 else batch_problem(self.train, self.mesh.data, self.mesh.fsdp)
        if problems or batch:
            raise UserError("; ".join([*problems, batch] if batch else problems))

    @property
    def batch_tokens(self) -> int:
        """How many tokens go through the model at a time in training; more need not fit the devices."""
        return self.train.batch_size // self.train.accumulation_steps * self.context_length

"""Every config field: its type, its range, and what must hold between fields; defaults stand in configs/default.py."""

import dataclasses
from typing import Literal

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.runtime.errors import UserError, require

MOST_BATCH_TOKENS = 2**28  # at a time
TASK = "task:"  # what the name of a corpus of task examples begins with


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
        require(
            all(f >= 0 for f in fractions) and abs(sum(fractions) - 1) < 1e-6 and fractions[0] > 0,
            "data.split_fractions",
            fractions,
            "(train, validation, test) must be non-negative, sum to 1, and leave something to train on",
        )
        require(
            self.vocab_size > 257,
            "data.vocab_size",
            self.vocab_size,
            "bpe needs more than 257: 256 bytes, a separator, and merges",
        )
        require(self.task_length >= 1, "data.task_length", self.task_length, "must be at least 1")
        if self.is_task:
            require(
                self.tokenizer == "characters",
                "data.tokenizer",
                self.tokenizer,
                "the tasks have a fixed vocabulary: must be characters",
            )
        if self.corpus == "text":
            require(
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
    nonfinite: Literal["stop", "skip", "rewind"]
    nonfinite_limit: int

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation_steps", "log_every", "nonfinite_limit"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        require(0 <= self.label_smoothing < 1, "train.label_smoothing", self.label_smoothing, "must be in [0, 1)")
        require(0 < self.mask_rate < 1, "train.mask_rate", self.mask_rate, "must be in (0, 1)")
        require(
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
        require(rate is None or rate > 0, "optimizer.muon.adam_learning_rate", rate, "must be above 0, or None")
        require(0 <= self.momentum < 1, "optimizer.muon.momentum", self.momentum, "must be in [0, 1)")
        require(steps >= 1, "optimizer.muon.newton_schulz_steps", steps, "must be at least 1")


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
        require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "must be above 0")
        require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "must be above 0")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must be at least 0")
        require(
            self.schedule != "inverse_sqrt" or self.warmup_steps > 0,
            "optimizer.warmup_steps",
            self.warmup_steps,
            "inverse_sqrt needs at least 1: its scale is the warm-up's length",
        )
        for name in ("decay_fraction", "final_fraction"):
            require(0 <= getattr(self, name) <= 1, f"optimizer.{name}", getattr(self, name), "must be in [0, 1]")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "must be in [0, 1)")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "must be at least 0")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int
    tokens: int
    sample_tokens: int

    def __post_init__(self):
        for name in ("every", "tokens"):
            require(getattr(self, name) >= 1, f"eval.{name}", getattr(self, name), "must be at least 1")
        require(self.sample_tokens >= 0, "eval.sample_tokens", self.sample_tokens, "must be at least 0")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int

    def __post_init__(self):
        for name in ("every", "keep"):
            require(getattr(self, name) >= 1, f"checkpoint.{name}", getattr(self, name), "must be at least 1")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int
    tensor: int

    def __post_init__(self):
        require(
            self.data == -1 or self.data >= 1, "mesh.data", self.data, "must be at least 1, or -1 for all devices left"
        )
        for name in ("fsdp", "tensor"):
            require(getattr(self, name) >= 1, f"mesh.{name}", getattr(self, name), "must be at least 1")

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.fsdp, self.tensor


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
        require(0 <= self.seed < 2**31, "seed", self.seed, "must be in [0, 2**31)")
        require(self.context_length >= 1, "context_length", self.context_length, "must be at least 1")
        if self.model.position == "learned":
            require(
                self.context_length <= self.model.max_positions,
                "context_length",
                self.context_length,
                f"learned positions end at model.max_positions ({self.model.max_positions})",
            )
        if self.model.random_positions is not None:
            require(
                self.context_length <= self.model.random_positions,
                "model.random_positions",
                self.model.random_positions,
                f"must leave room for context_length ({self.context_length}) different positions",
            )
        require(
            self.data.isolate_documents or not self.data.is_task or self.train.objective == "next_token",
            "data.isolate_documents",
            self.data.isolate_documents,
            "must be True for a task with masked answers: both sides of the text see what fills up the row",
        )
        causal, objective = self.model.causal, self.train.objective
        require(
            causal or objective == "masked",
            "train.objective",
            objective,
            "model.causal is False, and a bidirectional model sees the next token: must be masked",
        )
        require(
            not causal or objective == "next_token",
            "train.objective",
            objective,
            "masked prediction needs both sides of the text: set model.causal=False",
        )
        require(
            self.batch_tokens <= MOST_BATCH_TOKENS,
            "train.batch_size",
            self.train.batch_size,
            f"batch_size × context_length / accumulation_steps must be at most {MOST_BATCH_TOKENS} tokens",
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

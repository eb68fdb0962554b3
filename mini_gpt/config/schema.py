"""All config fields: the sections besides the model's, and what must hold between sections."""

from typing import Annotated, Literal

from mini_gpt.config.fields import Count, Positive, Range, Rate, Section, Share, above, at_least, field
from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.runtime.errors import UserError

MOST_BATCH_TOKENS = 2**28  # in one pass through the model
TASK = "task:"  # the names of the corpora of task examples begin so


def batch_problem(train: "TrainConfig", data: int, fsdp: int) -> str | None:
    """Return the message for a batch that the devices and the parts of a step do not divide evenly, or None."""
    shares = data * fsdp * train.accumulation_steps
    if train.batch_size % shares == 0:
        return None
    return (
        f"train.batch_size: found {train.batch_size}; must be divisible by {shares}: {data * fsdp} devices "
        f"(mesh.data × mesh.fsdp) × {train.accumulation_steps} train.accumulation_steps"
    )


class DataConfig(Section, prefix="data."):
    """The text: its source, its split, and its tokens."""

    corpus: str = field("python_stdlib", "python_stdlib, tiny_shakespeare, text, tfds:NAME[/CONFIG] or task:NAME")
    path: str | None = field(None, "text: a glob; tiny_shakespeare: the file; tfds: TFDS's data directory")
    split: Literal["documents", "contiguous"] = field(
        "documents", "by a hash of each document, or by place in the text"
    )
    split_fractions: tuple[float, float, float] = field((0.9, 0.05, 0.05), "of train, validation and test; sum to 1")
    tokenizer: Literal["bytes", "characters", "bpe"] = field("bytes", "how text becomes tokens")
    vocab_size: Annotated[int, above(257)] = field(8192, "of bpe: 256 bytes, a separator, and merges")
    task_length: Count = field(20, "task:NAME: length of the longest training problems, in the task's own unit")
    isolate_documents: bool = field(False, "attention stays inside a document, and positions restart in each")
    cache_dir: str | None = field(None, "None: mini_gpt under $XDG_CACHE_HOME or ~/.cache")

    def check(self) -> None:
        shares = self.split_fractions
        if min(shares) < 0 or abs(sum(shares) - 1) >= 1e-6 or shares[0] == 0:
            self.refuse("split_fractions", "must be non-negative, sum to 1, and leave something to train on")
        if self.is_task and self.tokenizer != "characters":
            self.refuse("tokenizer", "the tasks have a fixed vocabulary: must be characters")
        if self.corpus == "text" and self.path is None:
            self.refuse("path", "data.corpus=text needs a glob, such as 'books/**/*.txt'")

    @property
    def is_task(self) -> bool:
        return self.corpus.startswith(TASK)


class TrainConfig(Section, prefix="train."):
    """The objective, the batches, and the length of training."""

    objective: Literal["next_token", "masked"] = field(
        "next_token", "what is predicted; masked: with model.causal=false"
    )
    mask_rate: Annotated[float, Range("in (0, 1)", lambda rate: 0 < rate < 1)] = field(
        0.15, "masked: share of tokens to predict"
    )
    steps: Count = field(1000, "optimizer steps")
    batch_size: Count = field(16, "sequences over all devices, for one optimizer step")
    accumulation_steps: Count = field(1, "parts of a step's batch, computed one after the other")
    label_smoothing: Rate = field(0.0, "in the objective only; reported losses are unsmoothed")
    log_every: Count = field(10, "steps between two rows of metrics.jsonl")
    nonfinite: Literal["stop", "skip", "rewind"] = field(
        "stop", "at a non-finite loss or gradient; rewind: to the last checkpoint, skipping that batch", before="stop"
    )
    nonfinite_limit: Count = field(10, "skip, rewind: how many such steps a run may have", before=10)

    def check(self) -> None:
        if self.batch_size % self.accumulation_steps:
            self.refuse("batch_size", f"must be divisible by train.accumulation_steps ({self.accumulation_steps})")


class MuonConfig(Section, prefix="optimizer.muon."):
    """Muon, for the matrices of the blocks; embeddings, norms and biases have AdamW."""

    adam_learning_rate: Annotated[float | None, above(0)] = field(
        None, "AdamW's peak; None: optimizer.learning_rate", before=None
    )
    momentum: Rate = field(0.95, "of the gradient's mean, Nesterov's", before=0.95)
    newton_schulz_steps: Count = field(5, "fewer are faster, and leave the update less orthogonal", before=5)


class OptimizerConfig(Section, prefix="optimizer."):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = field("adamw", "the optimizer")
    learning_rate: Positive = field(1e-3, "the peak; Muon's updates are as large as AdamW's, so it serves both")
    schedule: Literal["inverse_sqrt", "cosine", "wsd", "constant"] = field("inverse_sqrt", "after a linear warm-up")
    warmup_steps: Annotated[int, at_least(0)] = field(100, "linear, from nearly 0 to the peak")
    decay_fraction: Share = field(0.2, "wsd: share of the steps in which it decays")
    final_fraction: Share = field(0.1, "cosine, wsd: the last learning rate, as a share of the peak")
    weight_decay: Annotated[float, at_least(0)] = field(0.1, "on matrices only")
    b1: Rate = field(0.9, "AdamW: decay of the gradient's mean")
    b2: Rate = field(0.95, "AdamW: decay of the squared gradient's mean")
    clip_norm: Positive = field(1.0, "largest norm of the gradient, over all parameters")
    muon: MuonConfig

    def check(self) -> None:
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            self.refuse("warmup_steps", "inverse_sqrt needs at least 1: its scale is the warm-up's length")


class EvalConfig(Section, prefix="eval."):
    """Evaluations while training."""

    every: Count = field(250, "optimizer steps between two evaluations")
    tokens: Count = field(65_536, "of the validation split, while training; the end scores all of it")
    sample_tokens: Annotated[int, at_least(0)] = field(128, "tokens of text generated at each evaluation; 0: none")


class CheckpointConfig(Section, prefix="checkpoint."):
    """When checkpoints are saved, and how many are kept."""

    every: Count = field(250, "optimizer steps between two; a better evaluation is saved too")
    keep: Count = field(2, "the last ones; the best by validation loss is kept too")


class MeshConfig(Section, prefix="mesh."):
    """The mesh of devices; the product of the three sizes is their number."""

    data: int = field(-1, "devices that split the batch; -1: all that are left")
    fsdp: Count = field(1, "devices that split batch, parameters and optimizer state; must divide model.d_model")
    tensor: Count = field(1, "devices that split heads and feed-forward units; must divide num_kv_heads and d_ff")

    def check(self) -> None:
        if self.data != -1 and self.data < 1:
            self.refuse("data", "must be at least 1, or -1 for all devices left")

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.fsdp, self.tensor


class Config(Section):
    """A run."""

    seed: Annotated[int, at_least(0)] = field(0, "of the initial parameters, the order of the data, and dropout")
    context_length: Count = field(256, "tokens in a training window")
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig

    def check(self) -> None:
        model, length, masked = self.model, self.context_length, self.train.objective == "masked"
        if model.position == "learned" and length > model.max_positions:
            self.refuse("context_length", f"learned positions end at model.max_positions ({model.max_positions})")
        if model.random_positions is not None and length > model.random_positions:
            self.refuse("model.random_positions", f"must leave room for context_length ({length}) different positions")
        if masked and self.data.is_task and not self.data.isolate_documents:
            right = "must be True for a task with masked answers: both sides of the text see the padding of the row"
            self.refuse("data.isolate_documents", right)
        if not masked and not model.causal:
            right = "model.causal is False, and a bidirectional model sees the next token: must be masked"
            self.refuse("train.objective", right)
        if masked and model.causal:
            self.refuse("train.objective", "masked prediction needs both sides of the text: set model.causal=False")
        if self.batch_tokens > MOST_BATCH_TOKENS:
            right = f"batch_size × context_length / accumulation_steps must be at most {MOST_BATCH_TOKENS} tokens"
            self.refuse("train.batch_size", right)
        self._check_mesh()

    def _check_mesh(self) -> None:
        """Name all sizes that the mesh does not divide, in one line; the number of devices is checked later."""
        model, mesh = self.model, self.mesh
        divided = {"num_heads": "tensor", "num_kv_heads": "tensor", "d_ff": "tensor", "d_model": "fsdp"}
        problems = [
            f"model.{name}: found {getattr(model, name)}; must be divisible by mesh.{axis} ({getattr(mesh, axis)})"
            for name, axis in divided.items()
            if getattr(model, name) % getattr(mesh, axis)
        ]
        if mesh.data != -1 and (batch := batch_problem(self.train, mesh.data, mesh.fsdp)):
            problems.append(batch)
        if problems:
            raise UserError("; ".join(problems))

    @property
    def batch_tokens(self) -> int:
        """Tokens in one pass through the model in training; more may not fit in the devices' memory."""
        return self.train.batch_size // self.train.accumulation_steps * self.context_length

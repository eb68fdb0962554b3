"""The whole config: the sections of training, and the checks that involve several sections."""

import functools
import pkgutil
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mini_gpt.config.data import DataConfig
from mini_gpt.config.fields import (
    LARGEST,
    Count,
    OptionalSize,
    Positive,
    Range,
    Rate,
    Section,
    Share,
    ShareInside,
    Size,
    above,
    at_least,
    field,
)
from mini_gpt.config.model import ModelConfig

OBJECTIVES = {  # {train.objective: its class for texts}, which is imported when a config chooses it
    "next_token": "mini_gpt.objectives.text:TextObjective",
    "masked": "mini_gpt.objectives.masked:MaskedObjective",
    "span_corruption": "mini_gpt.objectives.spans:SpanObjective",
}


def check_batch(train: "TrainConfig", data: int, fsdp: int) -> None:
    """Raise UserError if devices × accumulation steps does not divide the batch size."""
    shares = data * fsdp * train.accumulation_steps
    product = f"{data * fsdp} devices (mesh.data × mesh.fsdp) × {train.accumulation_steps} train.accumulation_steps"
    if train.batch_size % shares:
        train.refuse("batch_size", f"must be divisible by {shares}: {product}")


def _is_expression(text: str) -> bool:
    try:
        return re.compile(text) is not None
    except re.error:
        return False


Expression = Annotated[str, Range("a regular expression", _is_expression)]
if TYPE_CHECKING:
    Objective = str
else:
    Objective = Literal[tuple(OBJECTIVES)]


class TrainConfig(Section, prefix="train."):
    """The objective, the batches, and the length of training."""

    objective: Objective = field(
        "next_token", "masked needs model.causal=false, span_corruption model.encoder_layers (Raffel et al. 2020)"
    )
    mask_rate: ShareInside = field(0.15, "masked, span_corruption: share of tokens to predict")
    mean_span: Annotated[float, Range(f"in 1..{LARGEST}", lambda value: 1 <= value <= LARGEST)] = field(
        3.0, "span_corruption: mean length of a span, in tokens"
    )
    steps: Count = field(1000, "optimizer steps")
    batch_size: Count = field(16, "sequences over all devices, for one optimizer step")
    accumulation_steps: Count = field(1, "microbatches of a step, computed one after the other")
    random_offsets: OptionalSize = field(
        None, "rows start at a random position and end below this (Huang et al. 2025); None: 0"
    )
    trainable: Expression = field(
        "", "training changes only parameters whose names contain a match; empty: all, or with lora_rank the adapters"
    )
    lora_rank: Annotated[int, at_least(0)] = field(0, "of LoRA adapters (Hu et al. 2022), with --init_from; 0: none")
    lora_alpha: Positive = field(8.0, "an adapter's output is multiplied by lora_alpha / lora_rank")
    lora_layers: Expression = field("attention/(query|value)$", "linear layers with this in their names have adapters")
    label_smoothing: Rate = field(0.0, "in the training objective only, not in reported losses")
    log_every: Count = field(10, "steps between two rows of metrics.jsonl")
    logger: Literal["none", "wandb", "trackio"] = field("none", "a service that gets the rows too")
    nonfinite: Literal["stop", "skip"] = field("stop", "on a step with a non-finite loss or gradient")
    nonfinite_limit: Count = field(10, "skip: maximum number of non-finite steps in a run")

    def check(self) -> None:
        if self.batch_size % self.accumulation_steps:
            self.refuse("batch_size", f"must be divisible by train.accumulation_steps ({self.accumulation_steps})")
        if self.trainable and self.lora_rank:
            self.refuse("trainable", "must be empty with train.lora_rank; train.lora_layers chooses the adapters")

    @property
    def trained_pattern(self) -> str:
        """The regular expression in the names of the parameters that training changes; empty: all."""
        return "lora/" if self.lora_rank else self.trainable


class MuonConfig(Section, prefix="optimizer.muon."):
    """Muon updates the matrices of the blocks; AdamW updates embeddings, norms and biases."""

    adam_learning_rate: Annotated[float | None, above(0)] = field(None, "AdamW's peak; None: Muon's peak")
    momentum: Rate = field(0.95, "Nesterov momentum")
    newton_schulz_steps: Count = field(5, "fewer are faster, but the update is less orthogonal")


class OptimizerConfig(Section, prefix="optimizer."):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = field("adamw", "the optimizer")
    learning_rate: Positive = field(1e-3, "peak; fits both optimizers, since Muon's updates are as large as AdamW's")
    schedule: Literal["inverse_sqrt", "cosine", "wsd", "constant"] = field("inverse_sqrt", "after a linear warm-up")
    warmup_steps: Annotated[int, at_least(0)] = field(100, "linear, from nearly 0 to the peak")
    decay_fraction: Share = field(0.2, "wsd: share of the steps, at the end, with decay")
    final_fraction: Share = field(0.1, "cosine, wsd: the last learning rate, as a share of the peak")
    weight_decay: Annotated[float, at_least(0)] = field(0.1, "on matrices only")
    b1: Rate = field(0.9, "AdamW: decay of the gradient's mean")
    b2: Rate = field(0.95, "AdamW: decay of the squared gradient's mean")
    clip_norm: Positive = field(1.0, "clip the gradient to this norm, over all parameters")
    muon: MuonConfig

    def check(self) -> None:
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            self.refuse("warmup_steps", "inverse_sqrt needs at least 1, since it scales with the warm-up's length")


class EvalConfig(Section, prefix="eval."):
    """Evaluation during training."""

    every: Count = field(250, "optimizer steps between two evaluations")
    tokens: Count = field(65_536, "tokens of the validation split per evaluation; the summary at the end uses all")
    sample_tokens: Annotated[int, at_least(0)] = field(128, "tokens to generate at each evaluation; 0: none")


class CheckpointConfig(Section, prefix="checkpoint."):
    """When checkpoints are saved, and how many are kept."""

    every: Count = field(250, "optimizer steps between two checkpoints; a new best validation loss also saves one")
    keep: Count = field(2, "number of last checkpoints to keep, besides the best by validation loss")


class MeshConfig(Section, prefix="mesh."):
    """The device mesh. The product of its three sizes is the number of devices."""

    data: int = field(-1, "devices that split the batch; -1: all remaining devices")
    fsdp: Count = field(1, "devices that split batch, parameters and optimizer state; must divide model.d_model")
    tensor: Count = field(1, "devices that split heads and feed-forward units; must divide num_kv_heads and d_ff")

    def check(self) -> None:
        if self.data != -1 and self.data < 1:
            self.refuse("data", "must be at least 1, or -1 for all remaining devices")

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.data, self.fsdp, self.tensor


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, at_least(0)] = field(0, "for the initial parameters, dropout and random positions")
    context_length: Size = field(256, "tokens per training sequence; with an encoder, of the target")
    source_length: Size = field(
        None, "tokens per training sequence of the encoder, if there is one", follows="context_length"
    )
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig

    def check(self) -> None:
        model, length = self.model, self.context_length
        self.objective_class.check(self)
        if length > (model.table_length or length):
            self.refuse("context_length", f"learned positions end at model.max_positions ({model.max_positions})")
        if model.random_positions is not None and length > model.random_positions:
            self.refuse("model.random_positions", f"must be at least context_length ({length})")
        if self.data.position_ids != "sequence" and (model.table_length is None or model.random_positions is not None):
            self.refuse("data.position_ids", "needs model.position=learned, without model.random_positions")
        if self.data.position_ids != "sequence" and length >= model.max_positions:
            self.refuse("model.max_positions", f"must be above context_length ({length}) with data.position_ids")
        if self.data.isolate_documents and model.rope.scaling == "dynamic":
            remedy = "must be False with model.rope.scaling=dynamic, which scales by the length of the row"
            self.refuse("data.isolate_documents", remedy)
        if self.optimizer.name == "muon" and self.train.lora_rank:
            self.refuse("optimizer.name", "must be adamw with train.lora_rank")
        if self.optimizer.name == "muon" and len(model.position_pattern) > 1 and model.own_encodings:
            reason = f"model.position is a pattern with {model.own_encodings[0]}, and Muon needs equal layers"
            self.refuse("optimizer.name", f"must be adamw: {reason}")
        self._check_encoder()
        self._check_mesh()

    def _check_encoder(self) -> None:
        """Raise UserError for data and positions that a model with an encoder does not support."""
        model, data = self.model, self.data
        if not model.has_encoder:
            if data.has_pairs:
                self.refuse("model.encoder_layers", "must be above 0 for pairs of a source and a target")
            return
        not_supported = {
            "data.isolate_documents": (data.isolate_documents, "must be False"),
            "data.position_ids": (data.position_ids != "sequence", "must be sequence"),
            "model.rope.scaling": (model.rope.scaling == "dynamic", "must not be dynamic"),  # scales by the source
            "train.random_offsets": (self.train.random_offsets is not None, "must be None"),
        }
        for name, (found, remedy) in not_supported.items():
            if found:
                self.refuse(name, f"{remedy} with model.encoder_layers")
        if self.source_length > (model.table_length or self.source_length):
            self.refuse("source_length", f"learned positions end at model.max_positions ({model.max_positions})")

    def _check_mesh(self) -> None:
        """Raise UserError for a size that the mesh does not divide. The number of devices is checked later."""
        model, mesh = self.model, self.mesh
        divided = {"num_heads": "tensor", "num_kv_heads": "tensor", "d_ff": "tensor", "d_model": "fsdp"}
        for name, axis in divided.items():
            if getattr(model, name) % (size := getattr(mesh, axis)):
                self.refuse(f"model.{name}", f"must be divisible by mesh.{axis} ({size})")
        if mesh.data != -1:
            check_batch(self.train, mesh.data, mesh.fsdp)

    @functools.cached_property
    def objective_class(self) -> Any:
        """The class of `train.objective`: `objectives.text.TextObjective` or a subclass; the first use imports it."""
        return pkgutil.resolve_name(OBJECTIVES[self.train.objective])

    @property
    def text_length(self) -> int:
        """The tokens of text in one row of a text."""
        return self.objective_class.text_length(self)

    @property
    def batch_tokens(self) -> int:
        """Return the tokens of one forward pass in training, over all devices; with an encoder, of the longer side."""
        return self.train.batch_size // self.train.accumulation_steps * self.longest_row

    @property
    def longest_row(self) -> int:
        """Return the tokens of a training row; with an encoder, of the longer side."""
        return max(self.context_length, self.source_length if self.model.has_encoder else 0)

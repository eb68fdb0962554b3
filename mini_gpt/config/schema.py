"""All config fields, in sections, with the checks that involve several fields."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from mini_gpt.config.attention import (
    PER_LAYER,
    ROPE_FREQUENCIES,
    FireConfig,
    HardAlibiConfig,
    Position,
    RopeConfig,
    SinusoidalConfig,
    T5Config,
    VariantsConfig,
    pattern,
)
from mini_gpt.config.fields import (
    Count,
    OptionalSize,
    Positive,
    Rate,
    Section,
    Share,
    ShareInside,
    Size,
    above,
    at_least,
    field,
    specs,
    up_to,
)
from mini_gpt.runtime.errors import UserError

INPUT_POSITIONS = ("learned", "sinusoidal")  # added once, at the input, so not allowed in a pattern of layers
MOST_LAYERS = 4096  # above any real model, as LARGEST; they bound the memory that a config can ask for
MOST_BATCH_TOKENS = 2**28  # in one pass through the model
TASK = "task:"  # prefix of the corpora of task problems


def _feed_forward_width(values: Mapping[str, Any]) -> int:
    """4 × model.d_model; for swiglu 8/3 × model.d_model"""
    # SwiGLU has three matrices, not two. 8/3 × d_model keeps the parameter count (Shazeer 2020).
    width = values["model.d_model"]
    return 8 * round(width / 3) if values["model.activation"] == "swiglu" else 4 * width


def _most_positions(values: Mapping[str, Any]) -> int:
    """model.random_positions, or else context_length"""
    return values["model.random_positions"] or values["context_length"]


class ModelConfig(Section, prefix="model."):
    """The decoder: its size, its variants, and its positional encoding."""

    position: Position | tuple[Position, ...] = field("rope", "positional encoding; a tuple repeats over the layers")
    max_positions: Size = field(None, "rows of the table of learned positions", _most_positions)
    dtype: Literal["auto", "float32", "bfloat16"] = field("auto", "of matmuls; auto: bfloat16 if the hardware has it")
    attention: Literal["auto", "reference", "blockwise", "cudnn", "splash"] = field(
        "auto", "implementation: cudnn for NVIDIA GPUs, splash for TPUs, auto: the fastest", before="auto"
    )
    num_layers: Annotated[int, up_to(MOST_LAYERS)] = field(4, "Transformer blocks")
    d_model: Size = field(128, "width of the residual stream")
    num_heads: Size = field(4, "query heads; must divide d_model")
    num_kv_heads: Size = field(None, "< num_heads: grouped-query attention (Ainslie et al. 2023)", "model.num_heads")
    d_ff: Size = field(None, "width of the feed-forward layer", _feed_forward_width)
    dropout: Rate = field(0.0, "default of the three dropout rates below")
    embedding_dropout: Rate = field(None, "of the embeddings, after positions are added", "model.dropout")
    sublayer_dropout: Rate = field(None, "of a sublayer's output, before the residual sum", "model.dropout")
    attention_dropout: Rate = field(None, "of the attention weights", "model.dropout")
    norm: Literal["layernorm", "rmsnorm"] = field("layernorm", "in blocks; pre: also after the last block")
    norm_placement: Literal["pre", "post"] = field("pre", "pre: x + f(norm(x)); post: norm(x + f(x))")
    use_bias: bool = field(True, "bias in every projection and in layernorm")
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu"] = field("gelu", "gelu: tanh, as in GPT-2; exact: erf")
    causal: bool = field(True, "false: bidirectional, for the masked objective")
    tie_embeddings: bool = field(True, "the output projection is the transposed embedding")
    scale_embeddings: bool = field(False, "multiply by sqrt(d_model), with initial std 1/sqrt(d_model) instead of 0.02")
    scale_attention: bool = field(True, "divide the scores by sqrt(head width); false for ablation only")
    residual: bool = field(True, "residual connections; false for ablation only")
    remat: Literal["none", "dots", "block"] = field(
        "none", "recompute activations: dots (all except outputs of weight matmuls), block (all)", before="none"
    )
    scan_layers: bool = field(False, "loop over stacked blocks: 24 layers compile about as fast as 4", before=False)
    attention_window: OptionalSize = field(None, "keys per query, including its own (Jiang et al. 2023); None: all")
    random_positions: OptionalSize = field(None, "draw sorted positions below this (Ruoss et al. 2023); None: 0, 1, …")
    rope: RopeConfig
    sinusoidal: SinusoidalConfig
    hard_alibi: HardAlibiConfig
    t5: T5Config
    fire: FireConfig
    variants: VariantsConfig

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
            self.refuse("num_layers", f"with model.scan_layers it must be divisible by {period}, the pattern's length")
        if self.scan_layers and period > 1 and self.own_encodings:
            reason = f"{self.own_encodings[0]} has parameters in each layer, and the scan needs the same in every layer"
            self.refuse("position", f"with model.scan_layers, {reason}")
        if "hard_alibi" in encodings:
            self._check_hard_alibi()
        if self.position == "learned" and (self.random_positions or 0) > self.max_positions:
            self.refuse("random_positions", f"learned positions end at model.max_positions ({self.max_positions})")
        if "rope" in encodings:
            self._check_rope()
        else:
            unused = {name: specs(RopeConfig)[f"model.rope.{name}"].default for name in ROPE_FREQUENCIES}
            for name, default in (unused | {"beta_fast": 32.0}).items():
                if getattr(self.rope, name) != default:
                    self.refuse(f"rope.{name}", f"it is for rotary positions, but model.position is {self.position!r}")

    def _check_hard_alibi(self) -> None:
        if self.hard_alibi.heads > self.num_heads:
            self.refuse("hard_alibi.heads", f"must be at most model.num_heads ({self.num_heads})")
        if self.random_positions is not None:
            self.refuse("random_positions", "must be None for hard_alibi, which counts tokens by their positions")
        if self.variants.query_scale == "ssmax":
            self.refuse("variants.query_scale", "must be none for hard_alibi: its heads see different numbers of keys")

    def _check_rope(self) -> None:
        scaling, rotated = self.rope.scaling, self.rotated_width
        if scaling != "none" and self.rope.factor == 1:
            self.refuse("rope.factor", f"model.rope.scaling={scaling} changes nothing with a factor of 1; raise it")
        if scaling == "ntk" and rotated <= 2:
            self.refuse("rope.scaling", f"needs more than one pair of dimensions, but {rotated} dimensions are rotated")
        if rotated == 0 or rotated % 2:
            fields = f"model.num_heads={self.num_heads} and model.rope.fraction={self.rope.fraction}"
            count = f"{fields} give {rotated} of {self.head_width} per head"
            self.refuse("d_model", f"rope needs an even number of rotated dimensions, at least 2; {count}")
        if int(self.rope.turning * rotated / 2) == 0:
            self.refuse("rope.turning", f"none of the {rotated // 2} pairs of dimensions would turn; raise it")

    @property
    def position_pattern(self) -> tuple[str, ...]:
        return pattern(self.position)

    @property
    def own_encodings(self) -> list[str]:
        """The encodings in the pattern that have parameters in each layer."""
        return [name for name in self.position_pattern if name in PER_LAYER]

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads

    @property
    def rotated_width(self) -> int:
        return int(self.head_width * self.rope.fraction)


def batch_problem(train: "TrainConfig", data: int, fsdp: int) -> str | None:
    """Return an error message if devices × accumulation steps does not divide the batch size, else None."""
    shares = data * fsdp * train.accumulation_steps
    product = f"{data * fsdp} devices (mesh.data × mesh.fsdp) × {train.accumulation_steps} train.accumulation_steps"
    remedy = f"must be divisible by {shares}: {product}"
    return f"train.batch_size: found {train.batch_size}; {remedy}" if train.batch_size % shares else None


class DataConfig(Section, prefix="data."):
    """The text: source, split and tokenization."""

    corpus: str = field("python_stdlib", "python_stdlib, tiny_shakespeare, text, tfds:NAME[/CONFIG] or task:NAME")
    path: str | None = field(None, "text: a glob; tiny_shakespeare: the file; tfds: TFDS's data directory")
    split: Literal["documents", "contiguous"] = field("documents", "by a hash of each document, or by text position")
    split_fractions: tuple[float, float, float] = field((0.9, 0.05, 0.05), "for train, validation and test; sum to 1")
    tokenizer: Literal["bytes", "characters", "bpe"] = field("bytes", "unit of a token")
    vocab_size: Annotated[int, above(257)] = field(8192, "for bpe: 256 bytes, a document separator, and merges")
    task_length: Count = field(20, "task:NAME: length of the longest training problems, in the task's own unit")
    seed: Annotated[int, at_least(0)] = field(None, "for the order of the training data, and their masks", "seed", None)
    isolate_documents: bool = field(False, "attention stays inside a document, and positions restart in each")
    cache_dir: str | None = field(None, "None: mini_gpt under $XDG_CACHE_HOME or ~/.cache")

    def check(self) -> None:
        shares = self.split_fractions
        if min(shares) < 0 or abs(sum(shares) - 1) >= 1e-6 or shares[0] == 0:
            self.refuse("split_fractions", "must be non-negative and sum to 1, with more than 0 for train")
        if self.is_task and self.tokenizer != "characters":
            self.refuse("tokenizer", "the tasks have a fixed vocabulary: must be characters")
        if self.corpus == "text" and self.path is None:
            self.refuse("path", "data.corpus=text needs a glob, such as 'books/**/*.txt'")

    @property
    def is_task(self) -> bool:
        return self.corpus.startswith(TASK)


class TrainConfig(Section, prefix="train."):
    """The objective, the batches, and the length of training."""

    objective: Literal["next_token", "masked"] = field("next_token", "targets; masked needs model.causal=false")
    mask_rate: ShareInside = field(0.15, "masked: share of tokens to predict")
    steps: Count = field(1000, "optimizer steps")
    batch_size: Count = field(16, "sequences over all devices, for one optimizer step")
    accumulation_steps: Count = field(1, "microbatches of a step, computed one after the other")
    label_smoothing: Rate = field(0.0, "in the training objective only, not in reported losses")
    log_every: Count = field(10, "steps between two rows of metrics.jsonl")
    nonfinite: Literal["stop", "skip", "rewind"] = field(
        "stop", "on a non-finite loss or gradient; rewind: go to the last checkpoint, skip that batch", before="stop"
    )
    nonfinite_limit: Count = field(10, "skip, rewind: maximum number of non-finite steps in a run", before=10)

    def check(self) -> None:
        if self.batch_size % self.accumulation_steps:
            self.refuse("batch_size", f"must be divisible by train.accumulation_steps ({self.accumulation_steps})")


class MuonConfig(Section, prefix="optimizer.muon."):
    """Muon updates the matrices of the blocks; AdamW updates embeddings, norms and biases."""

    adam_learning_rate: Annotated[float | None, above(0)] = field(None, "AdamW's peak; None: Muon's peak", before=None)
    momentum: Rate = field(0.95, "Nesterov momentum", before=0.95)
    newton_schulz_steps: Count = field(5, "fewer are faster, but the update is less orthogonal", before=5)


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
    context_length: Count = field(256, "tokens per training sequence")
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
            self.refuse("model.random_positions", f"must be at least context_length ({length})")
        if masked and self.data.is_task and not self.data.isolate_documents:
            self.refuse("data.isolate_documents", "must be True for a task with masked answers, to mask the padding")
        if self.optimizer.name == "muon" and len(model.position_pattern) > 1 and model.own_encodings:
            reason = f"model.position is a pattern with {model.own_encodings[0]}, and Muon needs equal layers"
            self.refuse("optimizer.name", f"must be adamw: {reason}")
        if not masked and not model.causal:
            self.refuse("train.objective", "must be masked: with model.causal=False a token attends to its target")
        if masked and model.causal:
            self.refuse("train.objective", "masked prediction needs bidirectional attention: set model.causal=False")
        if self.batch_tokens > MOST_BATCH_TOKENS:
            remedy = f"batch_size × context_length / accumulation_steps must be at most {MOST_BATCH_TOKENS} tokens"
            self.refuse("train.batch_size", remedy)
        self._check_mesh()

    def _check_mesh(self) -> None:
        """Raise UserError with all sizes that the mesh does not divide. The number of devices is checked later."""
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
        """Return the tokens of one forward pass in training, over all devices."""
        return self.train.batch_size // self.train.accumulation_steps * self.context_length

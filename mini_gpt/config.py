"""Frozen configs: a ConfigDict from configs/*.py, or a run's config.json, checked field by field.

`configs/default.py` holds every default; the dataclasses here hold every type and range. A field left at None
there is filled in here from the fields that it follows, so that a loaded config has no open question but
`model.dtype=auto`, which is answered when the model is built.
"""

import ast
import dataclasses
import difflib
import importlib.util
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union

from mini_gpt.errors import UserError

POSITIONS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
INPUT_POSITIONS = ("learned", "sinusoidal")  # these act once, at the input, so never per layer


def _require(condition: bool, field: str, found: Any, right: str) -> None:
    if not condition:
        raise UserError(f"{field}: found {found!r}; {right}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    base: float
    fraction: float

    def __post_init__(self):
        _require(self.base > 1, "model.rope.base", self.base, "must be above 1")
        _require(0 < self.fraction <= 1, "model.rope.fraction", self.fraction, "must be in (0, 1]")


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
        if "rope" in pattern:
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
        if self.corpus == "text":
            _require(
                self.path is not None, "data.path", self.path, "data.corpus=text needs a glob, such as 'books/**/*.txt'"
            )


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
class OptimizerConfig:
    name: Literal["adamw"]
    learning_rate: float
    schedule: Literal["inverse_sqrt", "cosine", "wsd", "constant"]
    warmup_steps: int
    decay_fraction: float
    final_fraction: float
    weight_decay: float
    b1: float
    b2: float
    clip_norm: float

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
        _require(
            self.optimizer.schedule not in ("cosine", "wsd") or self.optimizer.warmup_steps < self.train.steps,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"must be below train.steps ({self.train.steps}) for the schedule {self.optimizer.schedule}",
        )


def load(path: str | Path, overrides: Mapping[str, Any] = types.MappingProxyType({})) -> Config:
    """Reads a config file (`configs/tiny.py`, or `configs/presets.py:gpt3_175b`) and applies overrides by dotted name.

    Override values may be typed or text. Raises UserError for an unknown field, a wrong type or a value out of range.
    """
    return from_dict(_overridden(_run_config_file(str(path)), overrides))


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Gives the config with some fields replaced, checked as a whole again. Raises UserError."""
    return from_dict(_overridden(to_dict(config), overrides))


def parse_override(text: str) -> tuple[str, str]:
    """Splits FIELD=VALUE. Raises UserError where there is no '='."""
    name, equals, value = text.partition("=")
    _require(bool(equals and name), "override", text, "must be FIELD=VALUE, such as model.position=rope")
    return name, value


def to_dict(config: Config) -> dict[str, Any]:
    """Gives nested plain dicts, as config.json holds them."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Builds the config from nested plain dicts, filling what is None. Raises UserError naming the field."""
    return _build(Config, _filled(values), "")


def read(path: Path) -> Config:
    """Reads a run's config.json, as data. Raises UserError naming the file."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: not found; a run directory holds the config.json of its run") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    try:
        return from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Gives {dotted name: (value in a, value in b)} for every field that differs."""
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Gives {dotted name: value} for nested dicts."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _run_config_file(path: str) -> dict[str, Any]:
    file, _, argument = path.partition(":")
    if not Path(file).is_file():
        raise UserError(f"--config: {file} not found; name a file such as configs/tiny.py")
    spec = importlib.util.spec_from_file_location(f"config_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        values = module.get_config(argument) if argument else module.get_config()
    except UserError:
        raise
    except Exception as error:  # whatever a config file raises is for its author, in one line
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{file}: {type(error).__name__}: {reason}") from error
    return values.to_dict()


def _overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    hints = _leaf_types(Config)
    for name, value in overrides.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{name}: no such config field{hint}")
        *sections, leaf = name.split(".")
        node = values
        for section in sections:
            node[section] = dict(node[section])
            node = node[section]
        node[leaf] = _parse(value, hints[name], name) if isinstance(value, str) else value
    return values


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Answers each None that follows from other fields; what is missing or of a wrong type, _build names."""
    values = dict(values)
    model = dict(values["model"]) if isinstance(values.get("model"), Mapping) else None
    if model is None:
        return values

    def fill(name: str, value: Any) -> None:
        if name in model and model[name] is None:
            model[name] = value

    width = model.get("d_model")
    if isinstance(width, int):
        # SwiGLU has three matrices instead of two: 8/3 of the width keeps the count (Shazeer 2020), in multiples of 8.
        fill("d_ff", 8 * round(width / 3) if model.get("activation") == "swiglu" else 4 * width)
    fill("max_positions", values.get("context_length"))
    fill("num_kv_heads", model.get("num_heads"))
    for name in ("embedding_dropout", "sublayer_dropout", "attention_dropout"):
        fill(name, model.get("dropout"))
    return values | {"model": model}


def _leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    leaves = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            leaves.update(_leaf_types(hint, f"{prefix}{name}."))
        else:
            leaves[prefix + name] = hint
    return leaves


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{prefix.rstrip('.')}: found {values!r}; must be a section of fields")
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise UserError(f"{prefix}{name}: no such config field{hint}")
    fields = {}
    for name, hint in hints.items():
        if name not in values:
            raise UserError(f"{prefix}{name}: missing; configs/default.py holds every field")
        if dataclasses.is_dataclass(hint):
            fields[name] = _build(hint, values[name], f"{prefix}{name}.")
        else:
            fields[name] = _checked(values[name], hint, prefix + name)
    return cls(**fields)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """Gives the value in the field's type (an int for a float, a list for a tuple are taken), or raises UserError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _checked(value, option, name)
            except UserError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple) and (arguments[-1] is ... or len(value) == len(arguments)):
            inner = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
            return tuple(_checked(item, kind, name) for item, kind in zip(value, inner, strict=True))
    elif hint is types.NoneType:
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is bool or hint is str:
        if isinstance(value, hint):
            return value
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise UserError(f"{name}: found {value!r}; must be {_describe(hint)}")


def _parse(text: str, hint: Any, name: str) -> Any:
    """Reads a value typed on a command line, by the field's type; an unreadable text is left for _checked to name."""
    arguments = typing.get_args(hint)
    if hint is str or (typing.get_origin(hint) is Literal):
        return text
    if types.NoneType in arguments and text == "None":
        return None
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if str in arguments and not text.startswith(("(", "[")):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} of "
        return f"a tuple of {count}{_describe(arguments[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "None"}
    return names[hint]

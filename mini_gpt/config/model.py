"""The config fields of the model, with the checks that involve several of them."""

import copy
import dataclasses
import functools
import itertools
import math
import operator
import pkgutil
from typing import Annotated, Any, Literal

import mini_gpt.config.attention as sections
from mini_gpt.config.fields import (
    Epsilon,
    OptionalSize,
    Positive,
    Rate,
    Section,
    Size,
    Values,
    above,
    field,
    specs,
    up_to,
)
from mini_gpt.runtime.errors import UserError

PATTERNS = ("position", "attention_window", "rope.base", "rope.factor")  # their tuples repeat over the layers
GATED = ("swiglu", "geglu")  # activations of two arrays, gate and up
MOST_LAYERS = 4096  # above any real model, as LARGEST; they bound the memory that a config can ask for
MOST_HEADS = 4096  # the time of some checks grows with its square
CAUSAL = {"causal": True, "encoder_layers": 0}  # a causal mask in every layer
PARALLEL = {"encoder_layers": 0, "norm_placement": "pre", "residual": True}
NEEDS: dict[str, dict[Any, dict[str, Any]]] = {  # {field: {value: {another field: the value that it must have}}}
    "scan_layers": {True: {"heads": None}},
    "parallel_residual": {"two_norms": PARALLEL, "one_norm": PARALLEL},
    "prediction_head": {True: {"output_bias": False}},  # it has a bias of the logits
    "variants.qk_norm": {"all_heads": {"heads": None}},
    "variants.selective": {True: CAUSAL | {"heads": None}},
    "variants.canon": {True: CAUSAL},
    "variants.normaliser": {"stick_breaking": CAUSAL | {"variants.sink": "none"}},  # the rest goes to the token itself
}


def _feed_forward_width(values: Values) -> int:
    """4 × model.d_model; for swiglu and geglu 8/3 × model.d_model"""
    # They have three matrices, not two. 8/3 × d_model keeps the parameter count (Shazeer 2020).
    width = values["model.d_model"]
    return 8 * round(width / 3) if values["model.activation"] in GATED else 4 * width


def _head_width(values: Values) -> int:
    """model.d_model / model.num_heads"""
    return max(1, values["model.d_model"] // values["model.num_heads"])


def _scale_width(values: Values) -> float:
    """model.head_width; 1.5 times it with model.variants.latent"""
    return values["model.head_width"] * (1 if values["model.variants.latent"] is None else 1.5)


def _most_positions(values: Values) -> int:
    """model.random_positions, train.random_offsets, or the larger of both lengths (1 more with data.position_ids)"""
    source = values["source_length"] if values["model.encoder_layers"] else 0
    length = max(values["context_length"], source) + (values["data.position_ids"] != "sequence")
    return values["model.random_positions"] or values["train.random_offsets"] or length


class ModelConfig(Section, prefix="model."):
    """The model: its size, its variants, and its positional encoding."""

    position: sections.Position | tuple[sections.Position, ...] = field("rope", "encoding; a tuple repeats over layers")
    max_positions: Size = field(None, "rows of the table of learned positions", follows=_most_positions)
    dtype: Literal["auto", "float32", "bfloat16"] = field("auto", "of matmuls; auto: bfloat16 if the hardware has it")
    param_dtype: Literal["float32", "bfloat16"] = field("float32", "of parameters; bfloat16 only to evaluate or sample")
    block: Literal["attention", "gru"] = field(
        "attention", "gru: a recurrent unit instead of attention (Cho et al. 2014)"
    )
    attention: Literal["auto", "reference", "blockwise", "cudnn", "splash"] = field(
        "auto", "implementation: cudnn for NVIDIA GPUs, splash for TPUs, auto: the fastest"
    )
    num_layers: Annotated[int, up_to(MOST_LAYERS)] = field(4, "number of blocks; with an encoder, of the decoder")
    encoder_layers: Annotated[int, up_to(MOST_LAYERS, least=0)] = field(
        0, "blocks of an encoder, which the decoder reads by cross-attention; 0: none (Vaswani et al. 2017)"
    )
    share_embeddings: bool = field(True, "encoder and decoder have one table of embeddings")
    cross_positions: bool = field(
        False, "relative positions in cross-attention too: place in target minus place in source"
    )
    d_model: Size = field(128, "width of the residual stream")
    num_heads: Annotated[int, up_to(MOST_HEADS)] = field(
        4, "query heads; must divide d_model, unless head_width is given"
    )
    num_kv_heads: Size = field(
        None, "< num_heads: grouped-query attention (Ainslie et al. 2023)", follows="model.num_heads"
    )
    head_width: Size = field(None, "width of a head's queries, keys and values", follows=_head_width)
    heads: tuple[tuple[int, ...], ...] | None = field(None, "numbers of the heads that each layer keeps; None: all")
    d_ff: Size = field(None, "width of the feed-forward layer", follows=_feed_forward_width)
    dropout: Rate = field(0.0, "default of the three dropout rates below")
    embedding_dropout: Rate = field(None, "of the embeddings, after positions are added", follows="model.dropout")
    sublayer_dropout: Rate = field(None, "of a sublayer's output, before the residual sum", follows="model.dropout")
    attention_dropout: Rate = field(None, "of the attention weights", follows="model.dropout")
    norm: Literal["layernorm", "rmsnorm"] = field(
        "layernorm", "the kind of norm; with norm_placement=pre also after the last block"
    )
    norm_placement: Literal["pre", "post", "none"] = field(
        "pre", "pre: x + f(norm(x)); post: norm(x + f(x)); none: x + f(x), for output_norm"
    )
    output_norm: bool = field(False, "a norm of each sublayer's output (Gemma 2; OLMo 2 with norm_placement none)")
    parallel_residual: Literal["none", "two_norms", "one_norm"] = field(
        "none", "x + attention(norm(x)) + feed_forward(norm(x)), with a norm for each or one (GPT-J, 2021)"
    )
    norm_weights: bool = field(True, "trained weights of norms, and biases of layernorm with use_bias")
    norm_epsilon: Epsilon = field(1e-5, "of all norms but QK-norm, added to the mean square")
    embedding_norm: bool = field(False, "a norm of the embeddings, after positions are added")
    use_bias: bool = field(True, "bias in every projection and in layernorm; default of the two biases below")
    qkv_bias: bool = field(None, "bias of the projections to queries, keys and values", follows="model.use_bias")
    attention_out_bias: bool = field(None, "bias of the output projection of attention", follows="model.use_bias")
    activation: Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu"] = field(
        "gelu",
        "gelu: tanh, as in GPT-2; exact: erf; relu2: relu² (So et al. 2021); swiglu, geglu: a gate (Shazeer 2020)",
    )
    causal: bool = field(True, "false: bidirectional, for the masked objective")
    tie_embeddings: bool = field(True, "the output projection is the transposed embedding")
    output_bias: bool = field(False, "a bias of the logits")
    output_soft_cap: Annotated[float | None, above(0)] = field(None, "c: logits become c · tanh(logits / c) (Gemma 2)")
    prediction_head: bool | None = field(False, "a layer and a norm before the logits (BERT); None: no logits (MiniLM)")
    scale_embeddings: bool = field(False, "multiply by sqrt(d_model), with initial std 1/sqrt(d_model) instead of 0.02")
    scale_attention: bool = field(True, "divide the scores by sqrt(scale_width); false for ablation only")
    scale_width: Positive = field(None, "its root divides scores (Gemma: query_pre_attn_scalar)", follows=_scale_width)
    residual: bool = field(True, "residual connections; false for ablation only")
    remat: Literal["none", "dots", "block"] = field("none", "recompute activations: block: all; dots: all but products")
    scan_layers: bool = field(False, "loop over stacked blocks: 24 layers compile about as fast as 4")
    attention_window: OptionalSize | tuple[OptionalSize, ...] = field(
        None, "keys per query, including its own (Jiang et al. 2023); None: all; a tuple repeats over the layers"
    )
    alibi_exponent: Positive = field(8.0, "ALiBi's last slope is 2 to the power of minus this (MPT: alibi_bias_max)")
    random_positions: OptionalSize = field(None, "draw sorted positions below this (Ruoss et al. 2023); None: 0, 1, …")
    rope: sections.RopeConfig
    sinusoidal: sections.SinusoidalConfig
    hard_alibi: sections.HardAlibiConfig
    t5: sections.T5Config
    fire: sections.FireConfig
    cope: sections.CopeConfig
    relative_logits: sections.RelativeLogitsConfig
    variants: sections.VariantsConfig

    def __post_init__(self):
        for name, values in zip(PATTERNS, self._patterns, strict=True):
            if len(values) == 1:  # a pattern of one value becomes this value
                section = self.rope if name.startswith("rope.") else self
                object.__setattr__(section, name.removeprefix("rope."), values[0])
        super().__post_init__()

    def check(self) -> None:
        for name, values in zip(PATTERNS, self._patterns, strict=True):
            if not values:
                self.refuse(name, "a pattern needs at least one value")
            if len(values) > self.num_layers:
                self.refuse(name, f"the pattern must not be longer than model.num_layers ({self.num_layers})")
        if self.d_model % self.num_heads and self.head_width == self.d_model // self.num_heads:
            self.refuse("d_model", f"must be divisible by model.num_heads ({self.num_heads})")
        if self.num_heads % self.num_kv_heads:
            self.refuse("num_kv_heads", f"must divide model.num_heads ({self.num_heads})")
        if self.heads is not None:
            self._check_heads(self.heads)
        if self.prediction_head and self.gated:
            self.refuse("prediction_head", f"must be False with model.activation={self.activation}, which needs a gate")
        if self.block == "gru":
            self._check_gru()
        if self.own_attention:
            self.own_attention.check(self)
        for name, needs_of in NEEDS.items():
            self.check_needs(name, needs_of.get(operator.attrgetter(name)(self), {}))
        for name, encoding in self.encodings.items():
            if encoding.stage == "embeddings" and len(self.position_pattern) > 1:
                self.refuse("position", f"{name} acts once at the input and can't be part of a pattern over the layers")
            self.check_needs("position", CAUSAL if encoding.causal_only else {})
            encoding.check(self)
        if self.scan_layers and self.num_layers % self.period:
            reason = f"it must be divisible by {self.period}, the pattern's length"
            self.refuse("num_layers", f"with model.scan_layers {reason}")
        if self.scan_layers and len(self.position_pattern) > 1 and self.own_encodings:
            reason = f"{self.own_encodings[0]} has parameters in each layer, and the scan needs the same in every layer"
            self.refuse("position", f"with model.scan_layers, {reason}")
        self._check_encoder()
        if (self.random_positions or 0) > (self.table_length or math.inf):
            self.refuse("random_positions", f"learned positions end at model.max_positions ({self.max_positions})")

    def check_needs(self, chosen: str, needs: Values) -> None:
        """Raise UserError for the field `chosen` if another field does not have the value that it needs."""
        for name, needed in needs.items():
            if operator.attrgetter(name)(self) != needed:
                self.refuse(chosen, f"needs model.{name}={needed}")

    def _check_heads(self, heads: tuple[tuple[int, ...], ...]) -> None:
        """Raise UserError for heads that do not exist, or that leave groups of different sizes."""
        self.check_needs("heads", {"encoder_layers": 0})
        numbers, groups = set(range(self.num_heads)), self.num_kv_heads
        if len(heads) != self.num_layers or any(sorted(numbers & {*kept}) != [*kept] or not kept for kept in heads):
            self.refuse("heads", f"needs for each of {self.num_layers} layers numbers below {len(numbers)}, in order")
        for shared in ([head * groups // len(numbers) for head in kept] for kept in heads):
            if len({shared.count(group) for group in shared}) > 1:
                self.refuse("heads", "a layer must keep equally many heads in each of its groups: remove whole groups")

    def _check_encoder(self) -> None:
        """Raise UserError for a part that the encoder or cross-attention does not support."""
        if not self.has_encoder:
            for name, without in {"share_embeddings": True, "cross_positions": False}.items():
                if getattr(self, name) != without:
                    self.refuse(name, "needs an encoder: set model.encoder_layers")
            return
        for name, encoding in self.encodings.items():
            if self.cross_positions and not encoding.in_cross:
                self.refuse("cross_positions", f"must be False with model.position={name}")
        if not self.causal:
            self.refuse("encoder_layers", "must be 0 with model.causal=False, which makes the whole model an encoder")
        if self.encoder_layers % self.period:
            self.refuse("encoder_layers", f"must be divisible by {self.period}, the length of the layers' pattern")
        if self.random_positions is not None:
            self.refuse("random_positions", "must be None with model.encoder_layers")

    def _check_gru(self) -> None:
        """Raise UserError for a part of attention, or one that the recurrent block does not have."""
        needs = CAUSAL | {"parallel_residual": "none", "output_norm": False, "use_bias": True, "qkv_bias": True}
        needs |= {"attention": "auto", "attention_out_bias": True, "attention_dropout": self.dropout, "heads": None}
        needs |= {"scale_attention": True, "scale_width": self.head_width, "attention_window": None}
        variants = specs(sections.VariantsConfig)
        needs |= {name.removeprefix(self.prefix): spec.default for name, spec in variants.items() if not spec.follows}
        self.check_needs("block", needs)
        if any(encoding.stage not in ("nowhere", "embeddings") for encoding in self.encodings.values()):
            self.refuse("position", "must be none, or added to the embeddings, with model.block=gru")

    def check_length(self, length: int) -> None:
        """Raise UserError if a length needs more positions than the model has; JAX would silently clamp indices."""
        count = self.random_positions
        if count is not None and length > count:
            raise UserError(f"model.random_positions: found {count}; must be at least the length {length}")
        if length > (self.table_length or math.inf):
            raise UserError(
                f"model.max_positions: the learned table has {self.max_positions} positions; found a length of "
                f"{length}; use at most as many, or train with a larger model.max_positions"
            )

    @property
    def has_encoder(self) -> bool:
        """Whether there are two stacks: an encoder, and a decoder that reads it by cross-attention."""
        return self.encoder_layers > 0

    @functools.cached_property
    def encoder(self) -> "ModelConfig":
        """The config of the encoder's stack."""
        no_cross: dict[str, Any] = {"encoder_layers": 0, "share_embeddings": True, "cross_positions": False}
        return dataclasses.replace(self, num_layers=self.encoder_layers, causal=False, **no_cross)

    @functools.cached_property
    def layer_kinds(self) -> tuple[sections.LayerKind, ...]:
        """The kind of each layer."""
        depths = range(self.num_layers) if self.variants.differential else (0,)
        repeated = [itertools.cycle(values) for values in (*self._patterns, self.head_numbers, depths)]
        return tuple(sections.LayerKind(*map(next, repeated)) for _ in range(self.num_layers))

    @property
    def head_numbers(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the heads of each layer."""
        return self.heads or (tuple(range(self.num_heads)),) * self.num_layers

    def of_layer(self, kind: sections.LayerKind) -> "ModelConfig":
        """Return the config of one layer's attention: its heads are those that the layer keeps."""
        groups = {head * self.num_kv_heads // self.num_heads for head in kind.heads}
        kept = tuple(head in kind.heads for head in range(self.num_heads))
        layer = copy.copy(self)  # not dataclasses.replace: the checks of a whole model do not hold for one layer
        vars(layer).update(num_heads=len(kind.heads), num_kv_heads=len(groups), kept=kept)
        return layer

    @functools.cached_property
    def kept(self) -> tuple[bool, ...]:
        """Whether each head is kept: in a whole model all are, in the config of one layer those that it keeps."""
        return (True,) * self.num_heads

    @property
    def period(self) -> int:
        """The number of layers after which all patterns repeat."""
        return math.lcm(*map(len, self._patterns))

    @property
    def _patterns(self) -> list[tuple]:
        return [sections.pattern(operator.attrgetter(name)(self)) for name in PATTERNS]

    @property
    def position_pattern(self) -> tuple[str, ...]:
        return sections.pattern(self.position)

    @functools.cached_property
    def encodings(self) -> dict[str, Any]:
        """The classes of the layers' encodings, by name; subclasses of `model.positions.base.Encoding`."""
        return {name: sections.encoding(name) for name in self.position_pattern}

    @functools.cached_property
    def own_attention(self) -> Any:
        """The class of attention that a variant has, a subclass of `MultiHeadAttention`; None: it has none."""
        chosen = [name for field, name in sections.OWN_ATTENTION.items() if getattr(self.variants, field)]
        return pkgutil.resolve_name(chosen[0]) if chosen else None

    @property
    def table_length(self) -> int | None:
        """The number of positions that the encodings have; None: any number."""
        return self.max_positions if any(encoding.has_table for encoding in self.encodings.values()) else None

    @property
    def uses_rope(self) -> bool:
        """Whether an encoding reads the fields of RoPE."""
        return any(encoding.uses_rope for encoding in self.encodings.values())

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate, which has a matrix of its own in the feed-forward layer."""
        return self.activation in GATED

    @property
    def own_encodings(self) -> list[str]:
        """The encodings in the pattern that have parameters in each layer."""
        return [name for name, encoding in self.encodings.items() if encoding.own_parameters]

    @property
    def attention_width(self) -> int:
        """The width of all heads together."""
        return self.num_heads * self.head_width

    @property
    def rotated_width(self) -> int:
        """The rotated entries of a head; latent attention has half as many more entries for them."""
        return int(self.head_width * self.rope.fraction) if self.variants.latent is None else self.head_width // 2

"""The base class of the supported Transformers architectures."""

import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.fields import Field
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.tensors import Shape, Tensor

Arrays = dict[str, np.ndarray]
Ids = Mapping[str, Any]  # {field of config.json: id, list of ids or None}
# Values that architectures need, unless their `needs` has others. Fields for training only are not checked.
NEEDED = {
    "block": "attention",
    "sinusoidal.columns": None,
    "causal": True,
    "encoder_layers": 0,
    "norm_placement": "pre",
    "residual": True,
    "embedding_norm": False,
    "prediction_head": False,
    "parallel_residual": "none",
    "output_bias": False,
    "output_norm": False,
    "output_soft_cap": None,
    "norm_weights": True,
    "share_embeddings": True,
    "scale_attention": True,  # GPT-2's config can express False, but some versions of Transformers ignore it
    "attention_window": None,
    "random_positions": None,
    "cross_positions": False,
    "variants.qk_norm": "none",
    "variants.clip_qkv": None,
    "variants.query_scale": "none",
    "variants.soft_cap": None,
    "variants.normaliser": "softmax",
    "variants.selective": False,
    "variants.canon": False,
    "variants.differential": False,
    "variants.latent": None,
    "variants.sink": "none",
    "variants.gate": "none",
}
GELUS = {"gelu_new": "gelu", "gelu": "gelu_exact", "relu": "relu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
SIZES = ("d_model", "num_layers", "num_heads", "d_ff")
DROPOUTS = ("embedding_dropout", "sublayer_dropout", "attention_dropout")
FOUR_WIDTHS = lambda fields: 4 * fields["model.d_model"]
QKV = "attention/query attention/key attention/value"
QK_NORM = "attention/on_heads/0/query_norm attention/on_heads/0/key_norm"
JOINED = f"attention_norm {QKV.replace(' ', '+')} attention/out mlp_norm mlp/up mlp/down"
SEPARATE = JOINED.replace("+", " ")


class Architecture:
    """The fields of config.json and the tensors of one architecture. Most dicts map Transformers' names to mini_gpt's.

    family: values of fields of `ModelConfig` that an architecture needs, if its `needs` has no others.
    needs: values that differ from `family`.
    pipeline, auto_class: for the model card.
    context: the field of the context length, and its default.
    sizes: the fields for SIZES; the last may be missing.
    aliases: {other name of a field in Transformers: its name here}.
    epsilon: the field of the norms' epsilon, and its default; None without one.
    fixed: {field: its only supported value}.
    neutral: the same, for fields that an export does not write.
    table: the fields that are read and written.
    dropouts: fields for DROPOUTS, which an export writes; None without one.
    activations: an export writes the first name that matches.
    prefix: start of all tensor names except the output layer's; missing in files without that layer.
    buffers: pattern of tensors to skip.
    layer: the module for each entry of `parameters`, which may join several modules by plus signs.
    final_norm: None without one.
    table_copies: tensors that may repeat the first of `tables`.
    """

    model_type: str  # in config.json
    title: str
    class_name: str
    auto_class = "AutoModelForCausalLM"
    pipeline = "text-generation"
    objective = "next_token"  # of training
    has_targets = False  # an encoder-decoder
    position: str
    family: ClassVar[dict[str, Any]] = NEEDED
    needs: ClassVar[dict[str, Any]] = {}
    norm = "layernorm"
    activation_field: str | None = None  # None: config.json has no field for the activation
    activation_by_default = "gelu"
    activations: ClassVar[dict[str, str]] = GELUS
    always_biased = False
    scales_embeddings = False  # by sqrt(d_model); if not, an export multiplies the factor into the table
    tied_by_default = False
    context: tuple[str, int]
    limits_length = False  # Transformers reads no longer texts, although the positions have no limit
    sizes: tuple[str, ...]
    sizes_by_default: tuple[int, ...]
    aliases: ClassVar[dict[str, str]] = {}
    epsilon: tuple[str, float] | None
    fixed: ClassVar[dict[str, Any]] = {}
    neutral: ClassVar[dict[str, Any]] = {}
    table: ClassVar[tuple[Field, ...]] = ()
    dropouts: tuple[str | None, ...] = ()

    prefix: str
    buffers = "(?!)"  # none
    tables: ClassVar[dict[str, str]]
    layers: str
    layer: str
    parameters = SEPARATE  # of a layer
    final_norm: str | None
    head = "lm_head"
    transposed = True  # matrices are stored [out, in], as in torch.nn.Linear
    table_copies: tuple[str, ...] = ()
    interleaved = False  # queries, keys and values are interleaved by head

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the architecture of a config.json, for an import."""
        del settings
        return cls()

    @classmethod
    def with_ids(cls, ids: Ids) -> Self:
        """Return the architecture for an export with these token ids. Raises UserError if they do not fit."""
        del ids
        return cls()

    @property
    def needed(self) -> dict[str, Any]:
        """The only supported values of fields of `ModelConfig`."""
        return self.family | self.needs

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        """Return the supported values of fields of `ModelConfig`."""
        activations = tuple(dict.fromkeys(self.activations.values()))
        own = {"norm": (self.norm,), "activation": activations, "num_kv_heads": (model.num_heads,)}
        own |= {"position": (self.position,), "head_width": (model.d_model // model.num_heads,)}
        for name, value in (("rope.base", model.rope.base), ("rope.factor", model.rope.factor)):
            own[name] = ("one number for all layers",) if isinstance(value, tuple) else (value,)
        if not self.always_biased:
            own |= {"qkv_bias": (model.use_bias,), "attention_out_bias": (model.use_bias,)}
        needed = {name: (value,) for name, value in self.needed.items()}
        own |= {name: needed[name] for name in self.family.keys() - NEEDED.keys()}
        for field in self.table:
            own |= field.supported(model)
        own["heads"] = (None if model.heads is None else "equally many heads in each layer, without alibi",)
        own["scale_width"] = (float(model.head_width),)
        own |= {name: needed[name] for name in self.needs}
        norms = own.get("variants.qk_norm", ("none",))
        if norms != ("none",) and (model.variants.qk_norm != "none" or "none" not in norms):
            own["variants.qk_norm_epsilon"] = (model.norm_epsilon,)
        return needed | own

    def needs_table(self, model: ModelConfig) -> bool:
        """Whether an export writes the positions of a model without learned ones as a table of learned ones."""
        del model
        return False

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        """Return the fields of config.json that depend on the architecture. ids: the token ids in config.json."""
        del ids
        model = config.model
        pairs = [*zip(self.sizes, SIZES, strict=False), *zip(self.dropouts, DROPOUTS, strict=False)]
        values = {theirs: operator.attrgetter(ours)(model) for theirs, ours in pairs if theirs}
        if self.activation_field:
            matching = (theirs for theirs, ours in self.activations.items() if ours == model.activation)
            values[self.activation_field] = next(matching)
        if self.epsilon:
            values[self.epsilon[0]] = model.norm_epsilon
        for field in self.table:
            values |= field.write(model)
        length = model.max_positions if self.position == "learned" else config.context_length
        return {self.context[0]: length} | values | self.fixed

    def fields(self, settings: Settings) -> dict[str, Any]:
        """Return the equivalent fields of mini_gpt's config. Raises UserError for an unsupported setting."""
        settings.require(self.fixed | self.neutral)
        if self.needed["causal"]:
            settings.require({"is_causal": True})
        sizes = map(settings.whole, self.sizes, self.sizes_by_default)
        given = {f"model.{ours}": size for ours, size in zip(SIZES, sizes, strict=False)}
        activation = self.activations[self.activation_by_default]
        if self.activation_field:
            activation = settings.one_of(self.activation_field, self.activations, self.activation_by_default)
        fields = {
            "context_length": settings.whole(*self.context),
            "model.position": self.position,
            "model.num_kv_heads": given["model.num_heads"],
            "model.norm": self.norm,
            "model.use_bias": self.always_biased,
            "model.activation": activation,
            "model.tie_embeddings": settings.boolean("tie_word_embeddings", self.tied_by_default),
            "model.scale_embeddings": False,
        }
        if self.position == "learned":
            fields["model.max_positions"] = fields["context_length"]
        if self.epsilon:
            fields["model.norm_epsilon"] = settings.number(*self.epsilon)
        fields |= given | {f"model.{name}": value for name, value in self.needed.items()}
        for field in self.table:
            fields |= field.read(settings, fields)
        fields |= {f"model.{name}": value for name, value in self.needs.items()}
        if fields["model.variants.qk_norm"] != "none":
            fields["model.variants.qk_norm_epsilon"] = fields["model.norm_epsilon"]
        return fields

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        """Return all tensors of a model, and the parameters that they hold."""
        listed = [Tensor(f"{self.prefix}{theirs}.weight", (ours,)) for theirs, ours in self.tables.items()]
        for layer in range(model.num_layers):
            for theirs, ours in zip(self.layer.split(), self.parameters.split(), strict=True):
                paths = [f"blocks/{layer}/{path}" for path in ours.split("+")]
                listed += self._module(f"{self.prefix}{self.layers}.{layer}.{theirs}", paths, model)
        if self.final_norm is not None:
            listed += self._module(f"{self.prefix}{self.final_norm}", ["final_norm"], model)
        return listed + ([] if model.tie_embeddings else [Tensor(self.head_tensor, ("unembedding",))])

    def shapes(self, model: ModelConfig) -> dict[str, Shape]:
        """Return the shapes of parameters that only the files have; `fold` replaces them."""
        del model
        return {}

    def fold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        """Return the parameters of mini_gpt, from those of the files."""
        del model
        return arrays

    def unfold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        """Return the parameters of the files, from those of mini_gpt."""
        del model
        return arrays

    @property
    def head_tensor(self) -> str:
        """The name of the output layer's matrix."""
        return f"{self.head}.weight"

    def _module(self, name: str, paths: list[str], model: ModelConfig) -> list[Tensor]:
        """Return the weight, and the bias if any, of a norm or of a linear layer that joins `paths`."""
        is_norm = paths[0].endswith("norm")
        if is_norm and not model.norm_weights:
            return []
        heads = model.num_heads if self.interleaved and len(paths) > 1 else None
        weights = tuple(f"{path}/{'scale' if is_norm else 'kernel'}" for path in paths)
        weight = Tensor(f"{name}.weight", weights, self.transposed, heads)
        biased = model.use_bias
        if paths[0].endswith(("attention/query", "attention/key", "attention/value")):
            biased = model.qkv_bias
        if paths[0].endswith("attention/out"):
            biased = model.attention_out_bias
        if not biased or (is_norm and self.norm == "rmsnorm"):
            return [weight]
        return [weight, Tensor(f"{name}.bias", tuple(f"{path}/bias" for path in paths), heads=heads)]

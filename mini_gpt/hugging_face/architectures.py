"""The supported Transformers architectures: their fields of config.json and their tensor names."""

import operator
from typing import Any, ClassVar

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.tensors import Tensor
from mini_gpt.runtime.errors import UserError, shown

# Values that all architectures need. Fields for training only, such as dropout, are not checked.
NEEDED = {
    "causal": True,
    "encoder_layers": 0,
    "norm_placement": "pre",
    "residual": True,
    "scale_attention": True,  # GPT-2's config can express False, but some versions of Transformers ignore it
    "attention_window": None,
    "random_positions": None,
    "variants.qk_norm": "none",
    "variants.query_scale": "none",
    "variants.soft_cap": None,
    "variants.normaliser": "softmax",
    "variants.selective": False,
    "variants.canon": False,
    "variants.sink": "none",
    "variants.gate": "none",
}
GELUS = {"gelu_new": "gelu", "gelu": "gelu_exact", "relu": "relu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
SIZES = ("d_model", "num_layers", "num_heads", "d_ff")
QKV = "attention/query attention/key attention/value"
LAYER = ("attention_norm", QKV, "attention/out", "mlp_norm", "mlp/up", "mlp/down")


class Architecture:
    """The fields of config.json and the tensors of one architecture. Most dicts map Transformers' names to mini_gpt's.

    context: the field of the context length, and its default. sizes: the fields for SIZES; the last may be missing.
    fixed: {field: its only supported value}. if_missing: Transformers' defaults that differ from `fixed`.
    exported: other fields that an export writes. activations: an export writes the first name that matches.
    prefix: start of all tensor names except the output layer's; missing in files without that layer. buffers: pattern
    of tensors to skip. layer: the module for each entry of `parameters`; it may join several modules of mini_gpt.
    """

    model_type: str  # in config.json
    title: str
    class_name: str
    position: str
    norm = "layernorm"
    activation_field: str | None = None  # None: config.json has no field for the activation
    activation_by_default = "gelu"
    activations: ClassVar[dict[str, str]] = GELUS
    always_biased = False
    tied_by_default = False
    context: tuple[str, int]
    sizes: tuple[str, ...]
    sizes_by_default: tuple[int, ...]
    fixed: ClassVar[dict[str, Any]]
    if_missing: ClassVar[dict[str, Any]] = {}
    exported: ClassVar[dict[str, str]] = {}

    prefix: str
    buffers = "(?!)"  # none
    tables: ClassVar[dict[str, str]]
    layers: str
    layer: tuple[str, ...]
    parameters: tuple[str, ...] = LAYER  # of a layer
    final_norm: str
    head = "lm_head"
    transposed = True  # matrices are stored [out, in], as in torch.nn.Linear
    interleaved = False  # queries, keys and values are interleaved by head

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        """Return the supported values of fields of `ModelConfig`."""
        activations = tuple(dict.fromkeys(self.activations.values()))
        own = {"norm": (self.norm,), "activation": activations, "num_kv_heads": (model.num_heads,)}
        return {name: (value,) for name, value in NEEDED.items()} | own

    def describe(self, config: Config) -> dict[str, Any]:
        """Return the fields of config.json that depend on the architecture."""
        model = config.model
        names = dict(zip(self.sizes, SIZES, strict=False)) | self.exported
        values = {theirs: operator.attrgetter(ours)(model) for theirs, ours in names.items()}
        if self.activation_field:
            matching = (theirs for theirs, ours in self.activations.items() if ours == model.activation)
            values[self.activation_field] = next(matching)
        return {self.context[0]: config.context_length} | values | self.fixed

    def fields(self, settings: Settings) -> dict[str, Any]:
        """Return the equivalent fields of mini_gpt's config. Raises UserError for an unsupported setting."""
        settings.require(self.fixed, self.if_missing)
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
        return {f"model.{name}": value for name, value in NEEDED.items()} | given | fields

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        """Return all tensors of a model, and the parameters that they hold."""
        listed = [Tensor(f"{self.prefix}{theirs}.weight", (ours,)) for theirs, ours in self.tables.items()]
        for layer in range(model.num_layers):
            for theirs, ours in zip(self.layer, self.parameters, strict=True):
                paths = [f"blocks/{layer}/{path}" for path in ours.split()]
                listed += self._module(f"{self.prefix}{self.layers}.{layer}.{theirs}", paths, model)
        listed += self._module(f"{self.prefix}{self.final_norm}", ["final_norm"], model)
        return listed + ([] if model.tie_embeddings else [Tensor(self.head_tensor, ("unembedding",))])

    @property
    def head_tensor(self) -> str:
        """The name of the output layer's matrix."""
        return f"{self.head}.weight"

    def _module(self, name: str, paths: list[str], model: ModelConfig) -> list[Tensor]:
        """Return the weight, and the bias if any, of a norm or of a linear layer that joins `paths`."""
        is_norm = paths[0].endswith("norm")
        heads = model.num_heads if self.interleaved and len(paths) > 1 else None
        weights = tuple(f"{path}/{'scale' if is_norm else 'kernel'}" for path in paths)
        weight = Tensor(f"{name}.weight", weights, self.transposed, heads)
        if not model.use_bias or (is_norm and self.norm == "rmsnorm"):
            return [weight]
        return [weight, Tensor(f"{name}.bias", tuple(f"{path}/bias" for path in paths), heads=heads)]


class Rotary(Architecture):
    """An architecture with RoPE. Queries and keys are half-split, as in mini_gpt."""

    position = "rope"
    activation_field = "hidden_act"
    context = ("max_position_embeddings", 2048)
    sizes: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    layers = "layers"
    base_field: str
    fraction_field: str
    fraction_by_default: float

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        # No YaRN: Transformers' ramp is linear in the pair index. The ramp of the paper is linear in rotations.
        return super().supported(model) | {"rope.scaling": ("none", "linear", "ntk"), "rope.turning": (1.0,)}

    def describe(self, config: Config) -> dict[str, Any]:
        rope, width = config.model.rope, config.model.rotated_width
        base = rope.base * rope.factor ** (width / (width - 2)) if rope.scaling == "ntk" else rope.base
        linear = {"rope_type": "linear", "type": "linear", "factor": rope.factor}  # "type": for versions before 4.45
        scaling = linear if rope.scaling == "linear" else None
        return super().describe(config) | {self.base_field: base, "rope_scaling": scaling}

    def fields(self, settings: Settings) -> dict[str, Any]:
        """Return also the fields of RoPE, from rope_scaling or from rope_parameters (Transformers 5)."""
        old = settings.section("rope_scaling")
        found = old if old.values else settings.section("rope_parameters")  # as Transformers 5 does
        kind_field = "type" if found.get("rope_type") is None else "rope_type"  # null counts as missing
        kind = found.get(kind_field, "default")
        if kind not in ("default", "linear"):
            raise found.error(kind_field, "must be default or linear to be imported")
        factor = found.number("factor", 0.0) if kind == "linear" else 1.0
        if factor < 1:
            raise found.error("factor", "must be at least 1")
        fraction = settings.number(self.fraction_field, self.fraction_by_default)
        return super().fields(settings) | {
            "model.rope.base": found.number("rope_theta", settings.number(self.base_field, 10_000.0)),
            "model.rope.fraction": found.number("partial_rotary_factor", fraction),
            "model.rope.scaling": "linear" if factor > 1 else "none",
            "model.rope.factor": factor,
        }


class GPT2(Architecture):
    """GPT-2 (Radford et al. 2019): learned positions. Matrices are stored [in, out], as in mini_gpt."""

    model_type, title, class_name, position = "gpt2", "GPT-2", "GPT2LMHeadModel", "learned"
    always_biased = tied_by_default = True
    activation_field, activation_by_default = "activation_function", "gelu_new"
    context = ("n_positions", 1024)
    sizes, sizes_by_default = ("n_embd", "n_layer", "n_head"), (768, 12, 12)
    fixed: ClassVar = {"layer_norm_epsilon": 1e-5}
    exported: ClassVar = {
        "n_positions": "max_positions",
        "n_inner": "d_ff",
        "embd_pdrop": "embedding_dropout",
        "resid_pdrop": "sublayer_dropout",
        "attn_pdrop": "attention_dropout",
    }
    prefix, buffers = "transformer.", r"h\.\d+\.attn\.(masked_)?bias"
    tables: ClassVar = {"wte": "embedding", "wpe": "positions/learned/embedding"}
    layers, final_norm, transposed = "h", "ln_f", False
    layer = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

    def fields(self, settings: Settings) -> dict[str, Any]:
        neutral = {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "add_cross_attention": False}
        settings.require(neutral)
        fields = super().fields(settings)
        d_ff = settings.whole("n_inner", 4 * fields["model.d_model"])
        return fields | {"model.max_positions": fields["context_length"], "model.d_ff": d_ff}


class GPTNeoX(Rotary):
    """GPT-NeoX (Black et al. 2022) with sequential residuals: RoPE, LayerNorm, an MLP of two matrices."""

    model_type, title, class_name = "gpt_neox", "GPT-NeoX", "GPTNeoXForCausalLM"
    always_biased = True
    sizes_by_default = (6144, 44, 64, 24_576)
    fixed: ClassVar = {"layer_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": False}
    if_missing: ClassVar = {"use_parallel_residual": True}
    exported: ClassVar = {
        "hidden_dropout": "sublayer_dropout",
        "attention_dropout": "attention_dropout",
        "rotary_pct": "rope.fraction",
    }
    base_field, fraction_field, fraction_by_default = "rotary_emb_base", "rotary_pct", 0.25
    prefix, buffers = "gpt_neox.", r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    tables: ClassVar = {"embed_in": "embedding"}
    final_norm, head, interleaved = "final_layer_norm", "embed_out", True
    layer = (
        *("input_layernorm", "attention.query_key_value", "attention.dense"),
        *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    )


class Llama(Rotary):
    """Llama (Touvron et al. 2023): RoPE, RMSNorm, SwiGLU."""

    model_type, title, class_name, norm = "llama", "Llama", "LlamaForCausalLM", "rmsnorm"
    activation_by_default = "silu"
    activations: ClassVar = {"silu": "swiglu", "swish": "swiglu"}
    sizes_by_default = (4096, 32, 32, 11_008)
    fixed: ClassVar = {"rms_norm_eps": 1e-5}
    if_missing: ClassVar = {"rms_norm_eps": 1e-6}
    exported: ClassVar = {
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_width",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
        "attention_dropout": "attention_dropout",
    }
    base_field, fraction_field, fraction_by_default = "rope_theta", "partial_rotary_factor", 1.0
    prefix, buffers = "model.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    tables: ClassVar = {"embed_tokens": "embedding"}
    final_norm = "norm"
    layer = (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    parameters = ("attention_norm", *QKV.split(), "attention/out", "mlp_norm", "mlp/gate", "mlp/up", "mlp/down")

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | {"num_kv_heads": (model.num_kv_heads,), "rope.fraction": (1.0,)}

    def fields(self, settings: Settings) -> dict[str, Any]:
        for where in (settings, settings.section("rope_parameters")):  # Transformers' Llama ignores this field
            where.require({"partial_rotary_factor": 1.0})
        fields, biased = super().fields(settings), settings.boolean("attention_bias", False)
        heads = fields["model.num_heads"]
        settings.require({"head_dim": fields["model.d_model"] // heads})
        settings.require({"mlp_bias": biased}, if_missing={"mlp_bias": False})
        kv_heads = settings.whole("num_key_value_heads", heads)
        return fields | {"model.num_kv_heads": kv_heads, "model.use_bias": biased}


class MPT(Architecture):
    """MPT (MosaicML 2023) without biases: ALiBi with the paper's slopes for any number of heads."""

    model_type, title, class_name, position = "mpt", "MPT", "MptForCausalLM", "alibi"
    tied_by_default = True
    activations: ClassVar = {"gelu": "gelu_exact"}
    context = ("max_seq_len", 2048)
    sizes, sizes_by_default = ("d_model", "n_layers", "n_heads"), (2048, 24, 16)
    fixed: ClassVar = {"expansion_ratio": 4, "layer_norm_epsilon": 1e-5, "no_bias": True}
    attention: ClassVar = {"alibi": True, "alibi_bias_max": 8}
    prefix = "transformer."
    tables: ClassVar = {"wte": "embedding"}
    layers, final_norm = "blocks", "norm_f"
    layer = ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj")

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | {"d_ff": (4 * model.d_model,), "use_bias": (False,)}

    def describe(self, config: Config) -> dict[str, Any]:
        return super().describe(config) | {"attn_config": self.attention}

    def fields(self, settings: Settings) -> dict[str, Any]:
        neutral = {"qk_ln": False, "prefix_lm": False, "clip_qkv": None, "softmax_scale": None}
        settings.section("attn_config").require(self.attention | neutral)
        settings.require({"logit_scale": None})
        fields = super().fields(settings)
        return fields | {"model.d_ff": 4 * fields["model.d_model"]}


ARCHITECTURES = {each.model_type: each for each in (GPT2(), Llama(), GPTNeoX(), MPT())}


def choose(model: ModelConfig) -> Architecture:
    """Return the architecture that can express a model. Raises UserError, naming the fields, if there is none."""
    by_position = {"learned": GPT2(), "alibi": MPT(), "rope": Llama() if model.norm == "rmsnorm" else GPTNeoX()}
    if model.position not in by_position:
        right = f"which can't be exported; must be one of {', '.join(by_position)}"
        raise UserError(f"model.position: found {shown(model.position)}, {right}")
    architecture, problems = by_position[model.position], []
    if isinstance(model.rope.base, tuple):
        problems.append(f"model.rope.base: found {shown(model.rope.base)}; must be one number for all layers")
    for name, values in architecture.supported(model).items():
        found = operator.attrgetter(name)(model)
        if found not in values:
            problems.append(f"model.{name}: found {shown(found)}; must be {' or '.join(map(str, values))}")
    if problems:
        written = f"a model with {model.position} positions and {model.norm} is exported as {architecture.title}"
        raise UserError("; ".join([*problems, written]))
    return architecture


def find(settings: Settings) -> Architecture:
    """Return the architecture that a config.json names. Raises UserError if it is not supported."""
    if "optimizer" in settings.values:
        raise UserError(f"{settings.path}: found the config of a run of mini_gpt; it needs no import")
    architecture = ARCHITECTURES[settings.one_of("model_type", {name: name for name in ARCHITECTURES}, default="")]
    settings.require({"quantization_config": None})
    return architecture

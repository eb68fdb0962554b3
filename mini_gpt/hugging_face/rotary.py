"""The base class of architectures with RoPE, and Llama."""

from typing import Any, ClassVar

from mini_gpt.config.attention import RopeConfig
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import NEEDED, SEPARATE, Architecture, Ids
from mini_gpt.hugging_face.fields import Field, Read
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.model.positions.waves import yarn_scale

# Transformers' rope_type of model.rope.scaling. ntk is exported as the equivalent base. The paper's ramp of yarn is
# linear in the turns, and has no rope_type: that of Transformers is linear in the index of the pair.
TYPES = {
    "none": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn_by_index": "yarn",
    "yarn_unrounded": "yarn",
    "llama3": "llama3",
}
EXPORTED = (*TYPES, "ntk")
PROPORTIONAL = "proportional"  # p-RoPE with linear scaling, in Transformers since Gemma 4
LIMIT, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"


class Rotary(Architecture):
    """An architecture with RoPE. Queries and keys are half-split, as in mini_gpt."""

    position = "rope"
    activation_field = "hidden_act"
    context = ("max_position_embeddings", 2048)
    sizes: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    prefix, buffers = "model.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    tables: ClassVar = {"embed_tokens": "embedding"}
    layers = "layers"
    base_field, base_by_default = "rope_theta", 10_000.0
    fraction_field = "partial_rotary_factor"
    fraction_by_default = 1.0
    rotates_all = False  # dimensions of a head; some versions of Transformers ignore a fraction

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        # With YaRN, Transformers scales only the rotated dimensions, and mini_gpt the logits.
        scalings = tuple(name for name in EXPORTED if not name.startswith("yarn") or model.rope.fraction == 1)
        fraction = {"rope.fraction": (1.0,)} if self.rotates_all else {}
        proportional = self.rotates_all and model.rope.scaling in ("none", "linear")
        turning = {"rope.turning": (model.rope.turning if proportional else 1.0,)}
        return super().supported(model) | {"rope.scaling": scalings} | turning | fraction

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        rope = _described_rope(config.model.rope, config.model.rotated_width, self.base_field)
        fraction = {} if self.rotates_all else {self.fraction_field: config.model.rope.fraction}
        return super().describe(config, ids) | rope | fraction

    def fields(self, settings: Settings) -> dict[str, Any]:
        """Return also the fields of RoPE."""
        settings.require({"partial_rotary_factor": 1.0} if self.rotates_all else {})
        fraction = settings.number(self.fraction_field, self.fraction_by_default)
        base = settings.number(self.base_field, self.base_by_default)
        rope = _rope_fields(settings, base, self.context, None if self.rotates_all else fraction)
        return super().fields(settings) | rope


def kv_heads(default: int | None = None) -> Field:
    """Return the number of groups. null: as many as heads, also the default if it is None."""
    return KvHeads("num_key_value_heads", "num_kv_heads", default)


class KvHeads(Field):
    def read(self, settings: Settings, fields: Read) -> dict[str, Any]:
        is_null = self.theirs in settings.values  # if it has no value
        default = fields["model.num_heads"] if is_null or self.default is None else self.default
        return {f"model.{self.ours}": settings.whole(self.theirs, default)}


def head_width(default: int | None = None, *, written: bool = True) -> Field:
    """Return the width of a head; by default it is that of the model divided by the heads."""
    usual = lambda fields: default or max(1, fields["model.d_model"] // fields["model.num_heads"])
    return Field("head_dim", "head_width", usual, written=written)


BIAS = Field("attention_bias", "qkv_bias attention_out_bias", False, "boolean")
MLP_BIAS = Field("mlp_bias", "use_bias", False, "boolean")


class Llama(Rotary):
    """Llama (Touvron et al. 2023): RoPE, RMSNorm, SwiGLU."""

    model_type, title, class_name, norm = "llama", "Llama", "LlamaForCausalLM", "rmsnorm"
    family: ClassVar = NEEDED | {"use_bias": False, "qkv_bias": False, "attention_out_bias": False}
    activation_by_default = "silu"
    activations: ClassVar = {"silu": "swiglu", "swish": "swiglu"}
    sizes_by_default = (4096, 32, 32, 11_008)
    epsilon: tuple[str, float] | None = ("rms_norm_eps", 1e-6)
    rotates_all = True
    table: ClassVar[tuple[Field, ...]] = (kv_heads(), head_width(), BIAS, MLP_BIAS)
    dropouts = (None, None, "attention_dropout")
    final_norm = "norm"
    layer = (
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"
    )
    parameters = SEPARATE.replace("mlp/up", "mlp/gate mlp/up")


def _described_rope(rope: RopeConfig, width: int, base_field: str) -> dict[str, Any]:
    """Return the fields of config.json. width: rotated dimensions of a head."""
    if rope.scaling == "ntk":
        assert isinstance(rope.base, float) and isinstance(rope.factor, float)
        return {base_field: rope.base * rope.factor ** (width / (width - 2)), "rope_scaling": None}
    if rope.scaling == "none" and rope.turning == 1:
        return {base_field: rope.base, "rope_scaling": None}
    kind = TYPES[rope.scaling] if rope.turning == 1 else PROPORTIONAL
    scaling: dict[str, Any] = {"rope_type": kind, "type": kind, "factor": rope.factor}  # "type": before 4.45
    described = {base_field: rope.base, "rope_scaling": scaling}
    if kind == PROPORTIONAL:
        scaling |= {"partial_rotary_factor": rope.turning}
        if rope.factor == 1:  # of another factor, which it reads, Transformers warns
            del scaling["factor"]
    if kind == "llama3":
        scaling |= {"low_freq_factor": rope.beta_slow, "high_freq_factor": rope.beta_fast}
    if kind == "yarn":
        scaling |= {"beta_slow": rope.beta_slow, "beta_fast": rope.beta_fast}
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
        scaling |= {"truncate": False} if rope.scaling == "yarn_unrounded" else {}
    if kind in ("llama3", "yarn"):
        scaling |= {ORIGINAL: rope.original_context}
    assert rope.original_context is not None
    if kind == "yarn" and isinstance(rope.factor, float):  # Transformers 4 reads the factor from these lengths
        described |= {LIMIT: round(rope.factor * rope.original_context)}
    if kind == "dynamic":
        described |= {LIMIT: rope.original_context}
    return described


def _rope_fields(settings: Settings, base: float, limit: tuple[str, int], fraction: float | None) -> dict[str, Any]:
    """Return the fields of mini_gpt's config, from rope_scaling or from rope_parameters (Transformers 5).

    base, fraction: those of the model, which rope_parameters may replace. None: all dimensions of a head are rotated.
    limit: the field of the context length, and its default.

    Raises UserError for an unsupported setting.
    """
    old = settings.section("rope_scaling")
    found = old if old.values else settings.section("rope_parameters")  # as Transformers 5 does
    kind_field = "type" if found.get("rope_type") is None else "rope_type"  # null counts as missing
    kind = found.get(kind_field, "default")
    known = [*dict.fromkeys(TYPES.values()), *([PROPORTIONAL] if fraction is None else [])]
    if kind not in known:
        raise found.error(kind_field, f"must be {', '.join(known)} to be imported")
    factor = 1.0 if kind == "default" else found.number("factor", float(kind == PROPORTIONAL))  # others need it
    turning = 1.0
    if kind == PROPORTIONAL:
        kind, turning = "linear", found.number("partial_rotary_factor", 1.0)
    elif fraction is None:
        for where in (found, settings.section("rope_parameters")):
            where.require({"partial_rotary_factor": 1.0})
    else:
        old.require({"partial_rotary_factor": fraction})
        fraction = found.number("partial_rotary_factor", fraction)
    if factor < 1:
        raise found.error("factor", "must be at least 1")
    if factor == 1 and kind == "yarn":
        found.require({"attention_factor": 1})
    if factor == 1 and kind != "dynamic":  # dynamic changes the base of longer texts with any factor
        kind = "default"
    fraction = 1.0 if fraction is None else fraction
    scaling = next(ours for ours, theirs in TYPES.items() if theirs == kind)
    read = {"base": found.number("rope_theta", base), "scaling": scaling, "factor": factor, "fraction": fraction}
    read |= {"turning": turning}
    if kind == "llama3":
        read |= {"beta_slow": found.number("low_freq_factor", 1.0), "beta_fast": found.number("high_freq_factor", 4.0)}
        read |= {"original_context": settings.whole(ORIGINAL, found.get(ORIGINAL))}
    if kind == "yarn":
        read |= _yarn_fields(found, factor, fraction)
        read |= {"original_context": settings.whole(ORIGINAL, found.whole(ORIGINAL, settings.whole(*limit)))}
    if kind == "dynamic":
        read |= {"original_context": settings.whole(*limit)}
        for where in (settings, found):
            where.require({ORIGINAL: read["original_context"]})
    return {f"model.rope.{name}": value for name, value in read.items()}


def _yarn_fields(found: Settings, factor: float, fraction: float) -> dict[str, Any]:
    """Return the fields of YaRN. Transformers rounds the bounds, unless truncate is false or null.

    attention_factor is by default the paper's, or with mscale and mscale_all_dim a quotient of two like it.
    """
    if fraction != 1:  # Transformers scales only the rotated dimensions, and mini_gpt the logits
        raise found.error("rope_type", "must not be yarn, because only a part of the dimensions is rotated")
    usual = yarn_scale(factor)
    mscale, of_all = (found.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    by_mscale = (1 + mscale * (usual - 1)) / (1 + of_all * (usual - 1)) if mscale and of_all else usual
    scale = found.number("attention_factor", by_mscale)
    if scale == 0:
        raise found.error("attention_factor", "must be above 0")
    is_rounded = found.boolean("truncate", "truncate" not in found.values)
    return {
        "scaling": "yarn_by_index" if is_rounded else "yarn_unrounded",
        "attention_factor": None if scale == usual else scale,
        "beta_slow": found.number("beta_slow", 1.0),
        "beta_fast": found.number("beta_fast", 32.0),
    }

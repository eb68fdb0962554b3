"""Gemma 1 to 3."""

from typing import Any, ClassVar

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import QK_NORM, QKV, Arrays, Ids
from mini_gpt.hugging_face.fields import FULL, SLIDING, Field, Windows, shortest
from mini_gpt.hugging_face.rotary import BIAS, Llama, head_width, kv_heads
from mini_gpt.hugging_face.settings import Settings


class Gemma(Llama):
    """Gemma (Gemma Team 2024): Llama with GEGLU and scaled embeddings. Files hold the weights of norms minus 1."""

    model_type, title, class_name = "gemma", "Gemma", "GemmaForCausalLM"
    needs: ClassVar = {"scale_embeddings": True}
    scales_embeddings = tied_by_default = True
    activation_by_default = "gelu_pytorch_tanh"
    activations: ClassVar = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}  # both are the tanh form there
    context = ("max_position_embeddings", 8192)
    sizes_by_default = (3072, 28, 16, 24_576)
    fixed: ClassVar = {"use_bidirectional_attention": False}
    table: ClassVar[tuple[Field, ...]] = (kv_heads(16), head_width(256), BIAS)

    def fold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        return _moved(arrays, 1)

    def unfold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        return _moved(arrays, -1)


class Gemma2(Gemma):
    """Gemma 2 (Gemma Team 2024): also norms of the sublayers' outputs, soft caps, and windows in half of the layers."""

    model_type, title, class_name = "gemma2", "Gemma 2", "Gemma2ForCausalLM"
    needs: ClassVar = {"scale_embeddings": True, "output_norm": True}
    activation_field = "hidden_activation"
    activations: ClassVar = {"gelu_pytorch_tanh": "geglu"}
    sizes_by_default = (2304, 26, 8, 9216)
    windows: ClassVar = Windows(by_default=lambda settings, layers: _periodic(2, layers))
    table: ClassVar[tuple[Field, ...]] = (
        *(kv_heads(4), head_width(256), BIAS, windows),
        Field("final_logit_softcapping", "output_soft_cap", 30.0, "number", nullable=True),
        Field("attn_logit_softcapping", "variants.soft_cap", 50.0, "number", nullable=True),
    )
    layer = (
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj post_attention_layernorm "
        "pre_feedforward_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj post_feedforward_layernorm"
    )
    parameters = (
        f"attention_norm {QKV} attention/out attention/output_norm mlp_norm mlp/gate mlp/up mlp/down mlp/output_norm"
    )

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        whole = (model.scale_width if model.scale_width.is_integer() else "a whole number",)
        return super().supported(model) | {"scale_width": whole}

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        return super().describe(config, ids) | {"query_pre_attn_scalar": int(config.model.scale_width)}

    def fields(self, settings: Settings) -> dict[str, Any]:
        width = float(settings.whole("query_pre_attn_scalar", 256))
        return super().fields(settings) | {"model.scale_width": width}


class Gemma3(Gemma2):
    """Gemma 3 (Gemma Team 2025), text: QK-norm, and other bases of RoPE in layers with a window."""

    model_type, title, class_name = "gemma3_text", "Gemma 3", "Gemma3ForCausalLM"
    needs: ClassVar = {"scale_embeddings": True, "output_norm": True, "variants.qk_norm": "weighted"}
    context = ("max_position_embeddings", 131_072)
    fixed: ClassVar = {"use_bidirectional_attention": False, "attn_logit_softcapping": None}
    windows: ClassVar = Windows(
        by_default=lambda settings, layers: _periodic(settings.whole("sliding_window_pattern", 6), layers)
    )
    table: ClassVar = (
        *(kv_heads(4), head_width(256), BIAS, windows),
        Field("final_logit_softcapping", "output_soft_cap", None, "number", nullable=True),
    )
    layer, parameters = f"{Gemma2.layer} self_attn.q_norm self_attn.k_norm", f"{Gemma2.parameters} {QK_NORM}"
    # The fields of the bases and their defaults, before Transformers 5 and since.
    bases: ClassVar = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        found, rope = _rope_of(model), model.rope
        fits = all(len(pairs) == 1 for pairs in found.values())
        base = rope.base if fits else "one number for layers with a window, and one for others"
        unscaled = all(factor == 1 for _, factor in found.get(SLIDING, ()))
        factor = rope.factor if fits and unscaled else "1 for layers with a window, and one number for others"
        allowed = {"rope.base": base, "rope.factor": factor}
        one_value = {name: (value,) for name, value in allowed.items()}
        return super().supported(model) | one_value | {"rope.scaling": ("none", "linear"), "rope.turning": (1.0,)}

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        found = {kind: next(iter(pairs)) for kind, pairs in _rope_of(config.model).items()}
        bases = {field: found.get(kind, (by_default, 1.0))[0] for kind, (field, by_default) in self.bases.items()}
        factor = found.get(FULL, (0.0, 1.0))[1]
        scaling = None if factor == 1 else {"rope_type": "linear", "factor": factor}
        return super().describe(config, ids) | bases | {"rope_scaling": scaling}

    def fields(self, settings: Settings) -> dict[str, Any]:
        sections = settings.section("rope_parameters")
        sections.require(dict.fromkeys(("rope_type", "type", "rope_theta", "factor")))  # its sections have these
        if sections.values:  # Transformers would mix both
            settings.require({"rope_scaling": None})
        fields = super().fields(settings)
        if fields["model.rope.scaling"] not in ("none", "linear") or fields["model.rope.turning"] != 1:
            raise settings.error("rope_scaling", "must be null or linear to be imported")
        factors, bases = {FULL: fields["model.rope.factor"], SLIDING: 1.0}, {}
        for kind, (field, by_default) in self.bases.items():
            section = sections.section(kind)
            type_field = "type" if section.get("rope_type") is None else "rope_type"
            known = {"default": "none"} | ({"linear": "linear"} if kind == FULL else {})
            if section.one_of(type_field, known, "default") == "linear":
                factors[kind] = section.number("factor", 0.0)
            bases[kind] = section.number("rope_theta", settings.number(field, by_default))
        kinds = self.windows.kinds(settings, fields["model.num_layers"])
        factor = shortest([factors[kind] for kind in kinds])
        return fields | {
            "model.rope.base": shortest([bases[kind] for kind in kinds]),
            "model.rope.factor": factor,
            "model.rope.scaling": "none" if factor == 1 else "linear",
        }


def _rope_of(model: ModelConfig) -> dict[str, set[tuple[float, float]]]:
    """Return the pairs (base, factor) of RoPE in each kind of layers."""
    found: dict[str, set[tuple[float, float]]] = {}
    for kind in model.layer_kinds:
        pairs = found.setdefault(FULL if kind.window is None else SLIDING, set())
        pairs.add((kind.rope_base, kind.rope_factor))
    return found


def _moved(arrays: Arrays, by: int) -> Arrays:
    """Return the arrays, with `by` added to the weights of norms."""
    return {name: array + np.float32(by) if name.endswith("norm/scale") else array for name, array in arrays.items()}


def _periodic(period: int, layers: int) -> list[str]:
    """Return the kinds of layers, of which the last of each period has no window."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]

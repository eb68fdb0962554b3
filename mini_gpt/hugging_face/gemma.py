"""Gemma 1 to 3."""

from typing import Any, ClassVar

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import FULL, QKV, SLIDING, Arrays, Ids, shortest, window_in_some_layers
from mini_gpt.hugging_face.rotary import GROUPED, Llama
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
    kv_heads_by_default = 16
    head_width_by_default = 256
    fixed: ClassVar = {"use_bidirectional_attention": False}
    exported: ClassVar = GROUPED | {"head_dim": "head_width", "attention_bias": "qkv_bias"}

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
    kv_heads_by_default = 4
    fixed: ClassVar = {"use_bidirectional_attention": False}
    exported: ClassVar = {
        **Gemma.exported,
        "final_logit_softcapping": "output_soft_cap",
        "attn_logit_softcapping": "variants.soft_cap",
    }
    layer: tuple[str, ...] = (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("post_attention_layernorm", "pre_feedforward_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        "post_feedforward_layernorm",
    )
    parameters: tuple[str, ...] = (
        *("attention_norm", *QKV.split(), "attention/out", "attention/output_norm"),
        *("mlp_norm", "mlp/gate", "mlp/up", "mlp/down", "mlp/output_norm"),
    )
    soft_caps: ClassVar[dict[str, tuple[str, float | None]]] = {
        "output_soft_cap": ("final_logit_softcapping", 30.0),
        "variants.soft_cap": ("attn_logit_softcapping", 50.0),
    }
    period_field: str | None = None
    period_by_default = 2  # the last layer of each period has no window

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        caps = {"output_soft_cap": (model.output_soft_cap,), "variants.soft_cap": (model.variants.soft_cap,)}
        whole = (model.scale_width if model.scale_width.is_integer() else "a whole number",)
        return super().supported(model) | caps | window_in_some_layers(model) | {"scale_width": whole}

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        windows = [kind.window for kind in config.model.layer_kinds]
        return super().describe(config, ids) | {
            "query_pre_attn_scalar": int(config.model.scale_width),
            "sliding_window": next((window for window in windows if window is not None), 4096),  # None is an error
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        window = settings.whole("sliding_window", 4096)
        windows = [window if kind == SLIDING else None for kind in self.kinds(settings)]
        fields |= {
            "model.attention_window": shortest(windows),
            "model.scale_width": float(settings.whole("query_pre_attn_scalar", 256)),
        }
        for ours, (theirs, by_default) in self.soft_caps.items():
            has_cap = settings.values.get(theirs, by_default) is not None
            fields[f"model.{ours}"] = settings.number(theirs, by_default or 0.0) if has_cap else None
        return fields

    def kinds(self, settings: Settings) -> list[str]:
        """Return the kind of each layer, FULL or SLIDING."""
        layers = settings.whole(self.sizes[1], self.sizes_by_default[1])
        period = self.period_by_default
        if self.period_field:
            period = settings.whole(self.period_field, period)
        by_default = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]
        return list(settings.of_layers("layer_types", by_default, layers, (FULL, SLIDING)))


class Gemma3(Gemma2):
    """Gemma 3 (Gemma Team 2025), text: QK-norm, and other bases of RoPE in layers with a window."""

    model_type, title, class_name = "gemma3_text", "Gemma 3", "Gemma3ForCausalLM"
    needs: ClassVar = {"scale_embeddings": True, "output_norm": True, "variants.qk_norm": "weighted"}
    context = ("max_position_embeddings", 131_072)
    fixed: ClassVar = {"use_bidirectional_attention": False, "attn_logit_softcapping": None}
    exported: ClassVar = {**Gemma.exported, "final_logit_softcapping": "output_soft_cap"}
    layer = (*Gemma2.layer, "self_attn.q_norm", "self_attn.k_norm")
    parameters = (*Gemma2.parameters, "attention/on_heads/0/query_norm", "attention/on_heads/0/key_norm")
    soft_caps: ClassVar = {"output_soft_cap": ("final_logit_softcapping", None)}
    period_field, period_by_default = "sliding_window_pattern", 6
    # The fields of the bases and their defaults, before Transformers 5 and since.
    bases: ClassVar = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        found, rope = _rope_of(model), model.rope
        fits = all(len(pairs) == 1 for pairs in found.values())
        base = rope.base if fits else "one number for layers with a window, and one for others"
        unscaled = all(factor == 1 for _, factor in found.get(SLIDING, ()))
        factor = rope.factor if fits and unscaled else "1 for layers with a window, and one number for others"
        allowed = {"rope.base": base, "rope.factor": factor, "variants.soft_cap": None}
        one_value = {name: (value,) for name, value in allowed.items()}
        return super().supported(model) | one_value | {"rope.scaling": ("none", "linear")}

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
        if fields["model.rope.scaling"] not in ("none", "linear"):
            raise settings.error("rope_scaling", "must be null or linear to be imported")
        factors, bases = {FULL: fields["model.rope.factor"], SLIDING: 1.0}, {}
        for kind, (field, by_default) in self.bases.items():
            section = sections.section(kind)
            type_field = "type" if section.get("rope_type") is None else "rope_type"
            known = {"default": "none"} | ({"linear": "linear"} if kind == FULL else {})
            if section.one_of(type_field, known, "default") == "linear":
                factors[kind] = section.number("factor", 0.0)
            bases[kind] = section.number("rope_theta", settings.number(field, by_default))
        kinds = self.kinds(settings)
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

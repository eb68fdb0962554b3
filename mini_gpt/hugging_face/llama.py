"""Models that differ from Llama in a few fields: Mistral, Qwen2, Qwen3, SmolLM3 and OLMo."""

from typing import Any, ClassVar

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import FULL, QKV, SLIDING, Ids, one_window, shortest, window_in_some_layers
from mini_gpt.hugging_face.rotary import GROUPED, Llama
from mini_gpt.hugging_face.settings import Settings


class Mistral(Llama):
    """Mistral (Jiang et al. 2023): Llama with a window, and without biases."""

    model_type, title, class_name = "mistral", "Mistral", "MistralForCausalLM"
    context = ("max_position_embeddings", 131_072)
    sizes_by_default = (4096, 32, 32, 14_336)
    kv_heads_by_default = 8
    exported: ClassVar = GROUPED | {"head_dim": "head_width", "sliding_window": "attention_window"}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | one_window(model)

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields, has_window = super().fields(settings), settings.values.get("sliding_window", 4096) is not None
        window, layers = settings.whole("sliding_window", 4096) if has_window else None, fields["model.num_layers"]
        kind = FULL if window is None else SLIDING  # with both kinds, Transformers reads the file as Ministral's
        settings.of_layers("layer_types", [kind] * layers, layers, (kind,))
        return fields | {"model.attention_window": window}


class Qwen2(Llama):
    """Qwen2 and Qwen2.5 (Qwen Team 2024): Llama with biases of queries, keys and values, and windows in some layers."""

    model_type, title, class_name = "qwen2", "Qwen2", "Qwen2ForCausalLM"
    needs: ClassVar = {"qkv_bias": True}
    context = ("max_position_embeddings", 32_768)
    sizes_by_default = (4096, 32, 32, 22_016)
    kv_heads_by_default: int | None = 32
    exported: ClassVar = GROUPED

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | window_in_some_layers(model)

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        windows = [kind.window for kind in config.model.layer_kinds]
        window = next((window for window in windows if window is not None), None)
        return super().describe(config, ids) | {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": [FULL if window is None else SLIDING for window in windows],
        }

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        layers, window = fields["model.num_layers"], None
        if settings.boolean("use_sliding_window", False) and settings.values.get("sliding_window", 4096) is not None:
            window = settings.whole("sliding_window", 4096)
        first = settings.whole("max_window_layers", 28)
        by_default = [SLIDING if layer >= first else FULL for layer in range(layers)]
        kinds = settings.of_layers("layer_types", by_default, layers, (FULL, SLIDING))
        if window is None and SLIDING in kinds and "layer_types" in settings.values:
            raise settings.error("layer_types", f"must be {FULL} without use_sliding_window")
        return fields | {"model.attention_window": shortest([window if kind == SLIDING else None for kind in kinds])}


class Qwen3(Qwen2):
    """Qwen3 (Qwen Team 2025), dense: a norm of each head's queries and keys, and a head width of its own."""

    model_type, title, class_name = "qwen3", "Qwen3", "Qwen3ForCausalLM"
    needs: ClassVar = {"variants.qk_norm": "weighted"}
    exported: ClassVar = GROUPED | {"head_dim": "head_width", "attention_bias": "qkv_bias"}
    head_width_by_default = 128
    layer = (*Llama.layer, "self_attn.q_norm", "self_attn.k_norm")
    parameters = (*Llama.parameters, "attention/on_heads/0/query_norm", "attention/on_heads/0/key_norm")


class SmolLM3(Llama):
    """SmolLM3 (Hugging Face 2025): Llama without positions in some layers."""

    model_type, title, class_name = "smollm3", "SmolLM3", "SmolLM3ForCausalLM"
    tied_by_default = True
    base_by_default = 2_000_000.0
    context = ("max_position_embeddings", 32_768)
    sizes_by_default = (2048, 36, 16, 11_008)
    kv_heads_by_default = 4
    fixed: ClassVar = {"use_sliding_window": False}
    exported: ClassVar = GROUPED | {"attention_bias": "qkv_bias", "mlp_bias": "use_bias"}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        fits = set(model.position_pattern) == {"rope", "none"}
        allowed = {"position": (model.position if fits else "a pattern of rope and none",)}
        return super().supported(model) | allowed

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        rotated = [int(kind.position == "rope") for kind in config.model.layer_kinds]
        return super().describe(config, ids) | {"no_rope_layers": rotated, "layer_types": [FULL] * len(rotated)}

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields, every = super().fields(settings), settings.whole("no_rope_layer_interval", 4)
        layers = fields["model.num_layers"]
        by_default = [int((layer + 1) % every != 0) for layer in range(layers)]
        rotated = settings.of_layers("no_rope_layers", by_default, layers, (0, 1))
        settings.of_layers("layer_types", [FULL] * layers, layers, (FULL,))
        return fields | {"model.position": shortest(["rope" if each else "none" for each in rotated])}


class Olmo(Llama):
    """OLMo (Groeneveld et al. 2024): Llama with LayerNorm without parameters."""

    model_type, title, class_name, norm = "olmo", "OLMo", "OlmoForCausalLM", "layernorm"
    needs: ClassVar = {"norm_weights": False, "norm_epsilon": 1e-5}
    epsilon = None
    exported: ClassVar = GROUPED | {"attention_bias": "qkv_bias", "clip_qkv": "variants.clip_qkv"}

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | {"variants.clip_qkv": (model.variants.clip_qkv,)}

    def fields(self, settings: Settings) -> dict[str, Any]:
        clip = settings.number("clip_qkv", 0.0) if settings.get("clip_qkv") is not None else None
        return super().fields(settings) | {"model.variants.clip_qkv": clip}


class Olmo2(Llama):
    """OLMo 2 (OLMo Team 2024): Llama with norms of the sublayers' outputs only, and QK-norm over all heads."""

    model_type, title, class_name = "olmo2", "OLMo 2", "Olmo2ForCausalLM"
    needs: ClassVar = {"norm_placement": "none", "output_norm": True, "variants.qk_norm": "all_heads"}
    epsilon = ("rms_norm_eps", 1e-5)
    exported: ClassVar = GROUPED | {"attention_bias": "qkv_bias"}
    layer = (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm", "self_attn.k_norm"),
        *("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        "post_feedforward_layernorm",
    )
    parameters = (
        *(*QKV.split(), "attention/on_heads/0/query_norm", "attention/on_heads/0/key_norm"),
        *("attention/out", "attention/output_norm", "mlp/gate", "mlp/up", "mlp/down", "mlp/output_norm"),
    )

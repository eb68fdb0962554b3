"""Models that differ from Llama in a few fields: Mistral, Qwen2, Qwen3, SmolLM3 and OLMo."""

from typing import Any, ClassVar

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import QK_NORM, QKV, Ids
from mini_gpt.hugging_face.fields import FULL, SLIDING, Field, Windows, shortest
from mini_gpt.hugging_face.rotary import BIAS, MLP_BIAS, Llama, head_width, kv_heads
from mini_gpt.hugging_face.settings import Settings


class Mistral(Llama):
    """Mistral (Jiang et al. 2023): Llama with a window, and without biases."""

    model_type, title, class_name = "mistral", "Mistral", "MistralForCausalLM"
    context = ("max_position_embeddings", 131_072)
    sizes_by_default = (4096, 32, 32, 14_336)
    table: ClassVar = (kv_heads(8), head_width(), Field("sliding_window", "attention_window", 4096, nullable=True))

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        kind, layers = FULL if fields["model.attention_window"] is None else SLIDING, fields["model.num_layers"]
        # With both kinds, Transformers reads the file as Ministral's.
        settings.of_layers("layer_types", [kind] * layers, layers, (kind,))
        return fields


def _last(settings: Settings, layers: int) -> list[str]:
    """Return the kinds of layers, of which those from max_window_layers on have a window."""
    first = settings.whole("max_window_layers", 28)
    return [SLIDING if layer >= first else FULL for layer in range(layers)]


class Qwen2(Llama):
    """Qwen2 and Qwen2.5 (Qwen Team 2024): Llama with biases of queries, keys and values, and windows in some layers."""

    model_type, title, class_name = "qwen2", "Qwen2", "Qwen2ForCausalLM"
    needs: ClassVar = {"qkv_bias": True}
    context = ("max_position_embeddings", 32_768)
    sizes_by_default = (4096, 32, 32, 22_016)
    windows: ClassVar = Windows(by_default=_last, flag="use_sliding_window")
    table: ClassVar[tuple[Field, ...]] = (kv_heads(32), head_width(written=False), windows)


class Qwen3(Qwen2):
    """Qwen3 (Qwen Team 2025), dense: a norm of each head's queries and keys, and a head width of its own."""

    model_type, title, class_name = "qwen3", "Qwen3", "Qwen3ForCausalLM"
    needs: ClassVar = {"variants.qk_norm": "weighted"}
    table: ClassVar = (kv_heads(32), head_width(128), BIAS, Qwen2.windows)
    layer, parameters = f"{Llama.layer} self_attn.q_norm self_attn.k_norm", f"{Llama.parameters} {QK_NORM}"


class SmolLM3(Llama):
    """SmolLM3 (Hugging Face 2025): Llama without positions in some layers."""

    model_type, title, class_name = "smollm3", "SmolLM3", "SmolLM3ForCausalLM"
    tied_by_default = True
    base_by_default = 2_000_000.0
    context = ("max_position_embeddings", 32_768)
    sizes_by_default = (2048, 36, 16, 11_008)
    fixed: ClassVar = {"use_sliding_window": False}
    table: ClassVar = (kv_heads(4), head_width(written=False), BIAS, MLP_BIAS)

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
    clip = Field("clip_qkv", "variants.clip_qkv", None, "number", nullable=True)
    table: ClassVar = (kv_heads(), head_width(written=False), BIAS, clip)


class Olmo2(Llama):
    """OLMo 2 (OLMo Team 2024): Llama with norms of the sublayers' outputs only, and QK-norm over all heads."""

    model_type, title, class_name = "olmo2", "OLMo 2", "Olmo2ForCausalLM"
    needs: ClassVar = {"norm_placement": "none", "output_norm": True, "variants.qk_norm": "all_heads"}
    epsilon = ("rms_norm_eps", 1e-5)
    table: ClassVar = (kv_heads(), head_width(written=False), BIAS)
    layer = (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.q_norm self_attn.k_norm self_attn.o_proj "
        "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj post_feedforward_layernorm"
    )
    parameters = f"{QKV} {QK_NORM} attention/out attention/output_norm mlp/gate mlp/up mlp/down mlp/output_norm"

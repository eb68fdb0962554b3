"""Causal language models with RoPE and LayerNorm: GPT-NeoX, Phi and StarCoder2."""

from typing import Any, ClassVar

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import GELUS, QKV, Ids, one_window
from mini_gpt.hugging_face.rotary import Rotary
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.tensors import Tensor


class GPTNeoX(Rotary):
    """GPT-NeoX (Black et al. 2022) and Pythia: RoPE, LayerNorm, parallel or sequential residuals."""

    model_type, title, class_name = "gpt_neox", "GPT-NeoX", "GPTNeoXForCausalLM"
    always_biased = True
    sizes_by_default = (6144, 44, 64, 24_576)
    epsilon = ("layer_norm_eps", 1e-5)
    fixed: ClassVar = {"attention_bias": True}
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

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        return super().supported(model) | {"parallel_residual": ("none", "two_norms")}

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        is_parallel = config.model.parallel_residual != "none"
        return super().describe(config, ids) | {"use_parallel_residual": is_parallel}

    def fields(self, settings: Settings) -> dict[str, Any]:
        is_parallel = settings.boolean("use_parallel_residual", True)
        return super().fields(settings) | {"model.parallel_residual": "two_norms" if is_parallel else "none"}


class Phi(Rotary):
    """Phi-1, 1.5 and 2 (Li et al. 2023): parallel residuals with one norm, and a bias of the logits."""

    model_type, title, class_name = "phi", "Phi", "PhiForCausalLM"
    needs: ClassVar = {"parallel_residual": "one_norm", "output_bias": True}
    always_biased = True
    activation_by_default = "gelu_new"
    sizes_by_default = (2048, 24, 32, 8192)
    epsilon = ("layer_norm_eps", 1e-5)
    exported: ClassVar = {
        "num_key_value_heads": "num_kv_heads",
        "partial_rotary_factor": "rope.fraction",
        "resid_pdrop": "sublayer_dropout",
        "embd_pdrop": "embedding_dropout",
        "attention_dropout": "attention_dropout",
    }
    fraction_by_default = 0.5
    final_norm = "final_layernorm"
    layer = (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        *("mlp.fc1", "mlp.fc2"),
    )
    parameters = ("attention_norm", *QKV.split(), "attention/out", "mlp/up", "mlp/down")

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        free: dict[str, tuple] = {"num_kv_heads": (model.num_kv_heads,), "variants.qk_norm": ("none", "layernorm")}
        if model.variants.qk_norm != "none":
            free["variants.qk_norm_epsilon"] = (model.norm_epsilon,)
        return super().supported(model) | free

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        return super().describe(config, ids) | {"qk_layernorm": config.model.variants.qk_norm == "layernorm"}

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        if settings.boolean("qk_layernorm", False):
            fields["model.variants.qk_norm"] = "layernorm"
            fields["model.variants.qk_norm_epsilon"] = fields["model.norm_epsilon"]
        return fields | {"model.num_kv_heads": settings.whole("num_key_value_heads", fields["model.num_heads"])}

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        listed = [*super().tensors(model), Tensor("lm_head.bias", ("output/bias",))]
        for layer in range(model.num_layers if model.variants.qk_norm == "layernorm" else 0):
            for theirs, ours in (("q", "query"), ("k", "key")):
                path = f"blocks/{layer}/attention/on_heads/0/{ours}_norm"
                listed += self._module(
                    f"{self.prefix}{self.layers}.{layer}.self_attn.{theirs}_layernorm", [path], model
                )
        return listed


class StarCoder2(Rotary):
    """StarCoder2 (Lozhkov et al. 2024): RoPE, LayerNorm, grouped queries, a window."""

    model_type, title, class_name = "starcoder2", "StarCoder2", "Starcoder2ForCausalLM"
    tied_by_default = True
    activation_by_default = "gelu_pytorch_tanh"
    activations: ClassVar = {"gelu_pytorch_tanh": "gelu", **GELUS}
    sizes_by_default = (3072, 30, 24, 12_288)
    epsilon = ("norm_epsilon", 1e-5)
    exported: ClassVar = {
        "num_key_value_heads": "num_kv_heads",
        "sliding_window": "attention_window",
        "residual_dropout": "sublayer_dropout",
        "embedding_dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
    }
    fixed: ClassVar = {"use_bias": True}
    always_biased = True
    final_norm = "norm"
    layer = (
        *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("post_attention_layernorm", "mlp.c_fc", "mlp.c_proj"),
    )
    parameters = ("attention_norm", *QKV.split(), "attention/out", "mlp_norm", "mlp/up", "mlp/down")

    def supported(self, model: ModelConfig) -> dict[str, tuple]:
        free = {"num_kv_heads": (model.num_kv_heads,), "rope.fraction": (1.0,)}
        return super().supported(model) | free | one_window(model)

    def fields(self, settings: Settings) -> dict[str, Any]:
        for where in (settings, settings.section("rope_parameters")):
            where.require({"partial_rotary_factor": 1.0})
        window = settings.whole("sliding_window") if settings.get("sliding_window") else None
        kv_heads = settings.whole("num_key_value_heads", 2)
        return super().fields(settings) | {"model.num_kv_heads": kv_heads, "model.attention_window": window}

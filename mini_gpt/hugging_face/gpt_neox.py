"""Causal language models with RoPE and LayerNorm: GPT-NeoX, Phi and StarCoder2."""

from typing import ClassVar

from mini_gpt.config.model import ModelConfig
from mini_gpt.hugging_face.architecture import GELUS, JOINED, QKV
from mini_gpt.hugging_face.fields import Field
from mini_gpt.hugging_face.rotary import Rotary
from mini_gpt.hugging_face.tensors import Tensor


class GPTNeoX(Rotary):
    """GPT-NeoX (Black et al. 2022) and Pythia: RoPE, LayerNorm, parallel or sequential residuals."""

    model_type, title, class_name = "gpt_neox", "GPT-NeoX", "GPTNeoXForCausalLM"
    always_biased = True
    sizes_by_default = (6144, 44, 64, 24_576)
    epsilon = ("layer_norm_eps", 1e-5)
    fixed: ClassVar = {"attention_bias": True}
    dropouts = (None, "hidden_dropout", "attention_dropout")
    base_field, fraction_field, fraction_by_default = "rotary_emb_base", "rotary_pct", 0.25
    prefix, buffers = "gpt_neox.", r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    tables: ClassVar = {"embed_in": "embedding"}
    final_norm, head, interleaved = "final_layer_norm", "embed_out", True
    layer = (
        "input_layernorm attention.query_key_value attention.dense "
        "post_attention_layernorm mlp.dense_h_to_4h mlp.dense_4h_to_h"
    )
    parameters = JOINED
    table: ClassVar = (Field("use_parallel_residual", "parallel_residual", True, {False: "none", True: "two_norms"}),)


class Phi(Rotary):
    """Phi-1, 1.5 and 2 (Li et al. 2023): parallel residuals with one norm, and a bias of the logits."""

    model_type, title, class_name = "phi", "Phi", "PhiForCausalLM"
    needs: ClassVar = {"parallel_residual": "one_norm", "output_bias": True}
    always_biased = True
    activation_by_default = "gelu_new"
    sizes_by_default = (2048, 24, 32, 8192)
    epsilon = ("layer_norm_eps", 1e-5)
    table: ClassVar = (
        Field("num_key_value_heads", "num_kv_heads", lambda fields: fields["model.num_heads"]),
        Field("qk_layernorm", "variants.qk_norm", False, {False: "none", True: "layernorm"}),
    )
    dropouts = ("embd_pdrop", "resid_pdrop", "attention_dropout")
    fraction_by_default = 0.5
    final_norm = "final_layernorm"
    layer = "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2"
    parameters = f"attention_norm {QKV} attention/out mlp/up mlp/down"

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
    table: ClassVar = (
        Field("num_key_value_heads", "num_kv_heads", 2),
        Field("sliding_window", "attention_window", nullable=True),
    )
    dropouts = ("embedding_dropout", "residual_dropout", "attention_dropout")
    fixed: ClassVar = {"use_bias": True}
    always_biased = rotates_all = True
    final_norm = "norm"
    layer = (
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "post_attention_layernorm mlp.c_fc mlp.c_proj"
    )

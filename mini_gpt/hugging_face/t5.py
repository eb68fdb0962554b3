"""T5: an encoder-decoder."""

import itertools
import math
from typing import Any, ClassVar, Self

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import Architecture, Arrays, Ids
from mini_gpt.hugging_face.fields import Field
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.tensors import Tensor

PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "out"}


class T5(Architecture):
    """T5 (Raffel et al. 2020) and T5 1.1: pre-LN with RMSNorm, a table of biases in each stack, no other biases.

    scaled: the hidden states are divided by sqrt(d_model) before the output layer, as in all tied models. An import
    multiplies the factor into the decoder's last norm.
    """

    model_type, title, class_name, position = "t5", "T5", "T5ForConditionalGeneration", "t5"
    auto_class, pipeline = "AutoModelForSeq2SeqLM", "text2text-generation"
    has_targets = True
    needs: ClassVar = {"scale_attention": False, "use_bias": False}
    norm = "rmsnorm"
    tied_by_default = True
    activation_field, activation_by_default = "feed_forward_proj", "relu"
    activations: ClassVar = {
        "relu": "relu",
        "gated-gelu": "geglu",
        "gated-gelu_new": "geglu",
        "gated-silu": "swiglu",
        "gelu_new": "gelu",
        "gelu": "gelu_exact",
    }
    context = ("n_positions", 512)
    aliases: ClassVar = {"num_hidden_layers": "num_layers", "head_dim": "d_kv"}
    sizes, sizes_by_default = ("d_model", "num_decoder_layers", "num_heads", "d_ff"), (512, 6, 8, 2048)
    epsilon = ("layer_norm_epsilon", 1e-6)
    fixed: ClassVar = {"is_encoder_decoder": True}
    table: ClassVar = (
        Field("num_layers", "encoder_layers", 6),
        Field("num_decoder_layers", "num_layers", lambda fields: fields["model.encoder_layers"]),
        Field("d_kv", "head_width", 64),
        Field("relative_attention_num_buckets", "t5.num_buckets", 32),
        Field("relative_attention_max_distance", "t5.max_distance", 128),
    )
    dropouts = (None, "dropout_rate")
    prefix = ""
    buffers = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"  # not used by T5
    tables: ClassVar = {"shared": "embedding"}
    table_copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

    def __init__(self, scaled: bool = False):
        self.scaled = scaled

    @classmethod
    def of(cls, settings: Settings) -> Self:
        tied = settings.boolean("tie_word_embeddings", cls.tied_by_default)
        if settings.values.get("scale_decoder_outputs", tied) is None:
            raise settings.error("scale_decoder_outputs", "must be true or false")
        kind = settings.get("feed_forward_proj", cls.activation_by_default)
        if isinstance(kind, str):
            function = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
            settings.require({"dense_act_fn": function, "is_gated_act": kind.startswith("gated-")})
        return cls(settings.boolean("scale_decoder_outputs", tied))

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        ends = ids.get("eos_token_id")
        start = ids.get("decoder_start_token_id", ends[0] if isinstance(ends, list) else ends)
        own = {"decoder_start_token_id": start, "scale_decoder_outputs": config.model.tie_embeddings}
        return super().describe(config, ids) | own

    def fields(self, settings: Settings) -> dict[str, Any]:
        """Return also whether the model is tied. Only the weights tell it of a model of Transformers 5."""
        tied = None if "scale_decoder_outputs" in settings.values else self.scaled
        own = {"train.objective": self.objective, "model.tie_embeddings": tied}
        return super().fields(settings) | own

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        of_self = "SelfAttention.{} attention/{}", "layer_norm attention_norm"
        of_cross = "EncDecAttention.{} cross_attention/{}", "layer_norm cross_norm"
        up = ("wi_0 mlp/gate", "wi_1 mlp/up") if model.gated else ("wi mlp/up",)
        of_mlp = *(f"DenseReluDense.{pair}" for pair in (*up, "wo mlp/down")), "layer_norm mlp_norm"
        listed = [Tensor("shared.weight", ("embedding",))]
        for stack, ours, layers, sublayers in (
            ("encoder", "encoder/", model.encoder_layers, (of_self, of_mlp)),
            ("decoder", "", model.num_layers, (of_self, of_cross, of_mlp)),
        ):
            for layer, (number, pairs) in itertools.product(range(layers), enumerate(sublayers)):
                for pair in dict.fromkeys(pair.format(*each) for pair in pairs for each in PROJECTIONS.items()):
                    theirs, path = pair.split()
                    name = f"{stack}.block.{layer}.layer.{number}.{theirs}"
                    listed += self._module(name, [f"{ours}blocks/{layer}/{path}"], model)
            table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            listed.append(Tensor(table, (f"{ours}positions/t5/bias_table",)))
            listed += self._module(f"{stack}.final_layer_norm", [f"{ours}final_norm"], model)
        return listed + ([] if model.tie_embeddings else [Tensor(self.head_tensor, ("unembedding",))])

    def fold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        return _scaled(arrays, 1 / math.sqrt(model.d_model)) if self.scaled else arrays

    def unfold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        return _scaled(arrays, math.sqrt(model.d_model)) if model.tie_embeddings else arrays


def _scaled(arrays: Arrays, factor: float) -> Arrays:
    """Return the parameters with another last norm. It is exact if d_model is a power of four, else rounded once."""
    scale_D = arrays["final_norm/scale"].astype(np.float64) * factor
    return arrays | {"final_norm/scale": scale_D.astype(np.float32)}

"""BERT and RoBERTa: encoders that predict masked tokens."""

from typing import Any, ClassVar, Self

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.hugging_face.architecture import Architecture, Arrays, Ids
from mini_gpt.hugging_face.settings import Settings
from mini_gpt.hugging_face.tensors import Shape, Tensor
from mini_gpt.runtime.errors import UserError

POSITIONS, TYPES, BIAS = "file/positions", "file/types", "output/bias"


class Bert(Architecture):
    """BERT (Devlin et al. 2019): post-LN, learned positions, and a prediction head, which imported files may lack.

    All tokens have type 0, so that an import adds the embedding of type 0 to each position.

    skipped: rows of the table of positions before that of the first token.
    types: rows of the table of types.
    """

    model_type, title, class_name, position = "bert", "BERT", "BertForMaskedLM", "learned"
    auto_class, pipeline, objective = "AutoModelForMaskedLM", "fill-mask", "masked"
    needs: ClassVar = {
        "causal": False,
        "norm_placement": "post",
        "embedding_norm": True,
        "prediction_head": True,
    }
    always_biased = tied_by_default = True
    activation_field, activation_by_default = "hidden_act", "gelu"
    context = ("max_position_embeddings", 512)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes_by_default = (768, 12, 12, 3072)
    epsilon = ("layer_norm_eps", 1e-12)
    fixed: ClassVar = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
    dropouts = (None, "hidden_dropout_prob", "attention_probs_dropout_prob")
    prefix = "bert."
    buffers = (
        r"embeddings\.(position_ids|token_type_ids)|pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
    )
    tables: ClassVar = {
        "embeddings.word_embeddings": "embedding",
        "embeddings.position_embeddings": POSITIONS,
        "embeddings.token_type_embeddings": TYPES,
    }
    layers, final_norm = "encoder.layer", None
    layer = (
        "attention.output.LayerNorm attention.self.query attention.self.key attention.self.value "
        "attention.output.dense output.LayerNorm intermediate.dense output.dense"
    )
    head, head_bias = "cls.predictions.decoder", "cls.predictions.bias"
    head_modules = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm")

    def __init__(self, skipped: int = 0, types: int = 2):
        self.skipped, self.types = skipped, types

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(types=settings.whole("type_vocab_size", 2))

    def describe(self, config: Config, ids: Ids) -> dict[str, Any]:
        rows = {self.context[0]: config.model.max_positions + self.skipped, "type_vocab_size": self.types}
        return super().describe(config, ids) | rows

    def fields(self, settings: Settings) -> dict[str, Any]:
        fields = super().fields(settings)
        rows = fields["context_length"] - self.skipped
        if rows < 1:
            raise settings.error(self.context[0], f"must be above {self.skipped}, the rows before the first token's")
        return fields | {"context_length": rows, "model.max_positions": rows, "train.objective": self.objective}

    def tensors(self, model: ModelConfig) -> list[Tensor]:
        listed = super().tensors(model)
        listed += self._module(f"{self.prefix}embeddings.LayerNorm", ["embedding_norm"], model)
        if not model.prediction_head:
            return listed
        for theirs, ours in zip(self.head_modules, ("dense", "norm"), strict=True):
            listed += self._module(theirs, [f"output/{ours}"], model)
        # Transformers adds the second of two equal biases. Its files may lack it.
        return [*listed, Tensor(self.head_bias, (BIAS,)), Tensor(f"{self.head}.bias", (BIAS,), optional=True)]

    def shapes(self, model: ModelConfig) -> dict[str, Shape]:
        return {POSITIONS: (model.max_positions + self.skipped, model.d_model), TYPES: (self.types, model.d_model)}

    def fold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        positions_PD = arrays.pop(POSITIONS)[self.skipped :] + arrays.pop(TYPES)[0]
        return arrays | {"positions/learned/embedding": positions_PD}

    def unfold(self, arrays: Arrays, model: ModelConfig) -> Arrays:
        positions_PD = np.pad(arrays["positions/learned/embedding"], ((self.skipped, 0), (0, 0)))
        return arrays | {POSITIONS: positions_PD, TYPES: np.zeros((self.types, model.d_model), np.float32)}


class Roberta(Bert):
    """RoBERTa (Liu et al. 2019): BERT with other names, and positions that start after the id of the padding token."""

    model_type, title, class_name = "roberta", "RoBERTa", "RobertaForMaskedLM"
    activations: ClassVar = {"gelu": "gelu_exact"}  # that of the prediction head in any case
    prefix, head, head_bias = "roberta.", "lm_head.decoder", "lm_head.bias"
    head_modules = ("lm_head.dense", "lm_head.layer_norm")

    @classmethod
    def of(cls, settings: Settings) -> Self:
        padding = settings.get("pad_token_id", 1)
        if padding != 0:
            padding = settings.whole("pad_token_id", 1)
        return cls(padding + 1, settings.whole("type_vocab_size", 2))

    @classmethod
    def with_ids(cls, ids: Ids) -> Self:
        padding = ids.get("pad_token_id")
        if padding is None or padding == ids.get("eos_token_id"):
            reason = "RoBERTa counts positions without padding, and needs a padding token that no text has"
            raise UserError(f"pad_token_id: found {padding}, and eos_token_id {ids.get('eos_token_id')}; {reason}")
        return cls(padding + 1, types=1)

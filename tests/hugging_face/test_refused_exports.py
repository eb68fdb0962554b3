"""Models that no architecture of Transformers can express are refused by the fields' names."""

import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import architectures, exporting
from mini_gpt.model import build
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from tests.hugging_face import models

BERT, T5 = models.BERT, models.T5 | {"activation": "relu"}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"position": "none", "norm": "rmsnorm"}, "model.norm: found 'rmsnorm'; must be layernorm; .* as GPT-2"),
        ({"position": "none", "random_positions": 512}, "model.random_positions: found 512; must be None"),
        ({"position": "none", "attention_window": 8}, "model.attention_window: found 8; must be None"),
        ({"position": ("none", "alibi")}, r"model.position: found \('none', 'alibi'\), which can't be exported"),
        (BERT | {"position": "none"}, "model.position: found 'none'; must be learned; a bidirectional model"),
        (T5 | {"position": "sinusoidal"}, "model.position: found 'sinusoidal'; must be t5; an encoder-decoder"),
        ({"position": "sinusoidal", "random_positions": 512}, "model.random_positions: found 512; must be None"),
        ({"position": "sinusoidal", "attention_window": 8}, "model.attention_window: found 8; must be None"),
        ({"position": "t5"}, "model.position: found 't5', which can"),
        ({"position": ("rope", "t5")}, r"model.position: found \('rope', 't5'\), which can"),
        ({"position": ("rope", "none")}, r"model.norm: found 'layernorm'; must be rmsnorm"),
        ({"parallel_residual": "one_norm"}, r"model.parallel_residual: found 'one_norm'; must be none or two_norms"),
        ({"position": "rope", "head_width": 8}, r"model.head_width: found 8; must be 32"),
        (
            LLAMA | {"position": "rope", "heads": ((0, 1), (3,), (2,), (1,))},
            "model.heads: found .*; must be equally many heads in each layer",
        ),
        ({"position": "learned", "output_bias": True}, r"model.output_bias: found True; must be False"),
        ({"position": "learned", "norm": "rmsnorm"}, "model.norm: found 'rmsnorm'; must be "),
        ({"position": "learned", "activation": "swiglu"}, "model.activation: found 'swiglu'; must be gelu or"),
        ({"position": "learned", "num_kv_heads": 2}, "model.num_kv_heads: found 2; must be 4"),
        ({"position": "learned", "norm_placement": "post"}, "model.norm_placement: found 'post'; must be pre"),
        ({"position": "learned", "causal": False}, "model.norm_placement: found 'pre'; must be post; model.embedding_"),
        (
            BERT | {"position": "rope"},
            "model.position: found 'rope'; must be learned; a bidirectional model is exported",
        ),
        (BERT | {"norm": "rmsnorm"}, "model.norm: found 'rmsnorm'; must be layernorm"),
        (BERT | {"prediction_head": False}, "model.prediction_head: found False; must be True; a bidirectional"),
        (T5 | {"position": "rope"}, "model.position: found 'rope'; must be t5; an encoder-decoder is exported as T5"),
        (T5 | {"position": ("t5", "none")}, r"model.position: found \('t5', 'none'\); must be t5"),
        (T5 | {"scale_attention": True}, "model.scale_attention: found True; must be False"),
        (T5 | {"use_bias": True}, "model.use_bias: found True; must be False"),
        (T5 | {"share_embeddings": False}, "model.share_embeddings: found False; must be True"),
        (T5 | {"num_kv_heads": 2}, "model.num_kv_heads: found 2; must be 4"),
        ({"position": "learned", "embedding_norm": True}, "model.embedding_norm: found True; must be False"),
        ({"position": "rope", "prediction_head": True}, "model.prediction_head: found True; must be False"),
        ({"position": "learned", "activation": "geglu"}, "model.activation: found 'geglu'; must be gelu or"),
        ({"position": "learned", "residual": False}, "model.residual: found False; must be True"),
        ({"position": "learned", "attention_window": 8}, "model.attention_window: found 8; must be None"),
        ({"position": "rope", "rope.base": (9.0, 99.0)}, r"model.rope.base: found \(9.0, 99.0\); must be one number"),
        ({"rope.scaling": "linear", "rope.factor": (1.0, 4.0)}, r"rope.factor: found \(1.0, 4.0\); must be one"),
        ({"position": "rope", "random_positions": 512}, "model.random_positions: found 512; must be None"),
        ({"position": "rope", "activation": "swiglu"}, "model.activation: found 'swiglu'; must be gelu"),
        ({"position": "rope", "rope.turning": 0.5}, "model.rope.turning: found 0.5; must be 1.0"),
        ({"position": "rope", "variants.qk_norm": "plain"}, "model.variants.qk_norm: found 'plain'; must be none"),
        ({"position": "rope", "variants.query_scale": "ssmax"}, "model.variants.query_scale: found 'ssmax'; must be"),
        ({"position": "alibi", "variants.soft_cap": 5.0}, "model.variants.soft_cap: found 5.0; must be None"),
        ({"position": "learned", "variants.sink": "zero"}, "model.variants.sink: found 'zero'; must be none"),
        ({"position": "rope", "variants.canon": True}, "model.variants.canon: found True; must be False"),
        ({"position": "rope", "variants.selective": True}, "model.variants.selective: found True; must be False"),
        ({"variants.normaliser": "stick_breaking"}, "variants.normaliser: found 'stick_breaking'; must be softmax"),
        ({"position": "rope", "output_norm": True}, "model.output_norm: found True; must be False"),
        ({"position": "alibi", "output_soft_cap": 9.0}, "model.output_soft_cap: found 9.0; must be None"),
        ({"position": "learned", "scale_width": 9.0}, "model.scale_width: found 9.0; must be 32.0"),
        ({"position": "learned", "variants.clip_qkv": 9.0}, "model.variants.clip_qkv: found 9.0; must be None"),
        (
            {"position": "rope", "rope.scaling": "yarn_by_index", "rope.factor": 2, "rope.fraction": 0.5},
            r"model.rope.scaling: found 'yarn_by_index'; must be none or linear or dynamic or llama3 or ntk",
        ),
        ({"position": "learned", "variants.gate": "head"}, "model.variants.gate: found 'head'; must be none"),
        ({"position": "kerple"}, "model.position: found 'kerple', which can't be exported"),
        ({"position": "learned", "scale_attention": False}, "model.scale_attention: found False; must be True"),
        ({"position": "rope", "rope.scaling": "yarn", "rope.factor": 2}, "model.rope.scaling: found 'yarn'; .* lin"),
        (LLAMA | {"activation": "gelu"}, "model.activation: found 'gelu'; must be swi"),
        (LLAMA | {"rope.fraction": 0.5}, "model.rope.fraction: found 0.5; must be 1.0"),
        ({"position": "alibi"}, "model.activation: found 'gelu'; must be gelu_exact"),
        ({"position": "alibi", "activation": "gelu_exact"}, "model.use_bias: found True; must be False"),
        (
            {"position": "alibi", "activation": "gelu_exact", "alibi_exponent": 16},
            "alibi_exponent: found 16.0; must be 8.0",
        ),
        (
            {"position": "alibi", "activation": "gelu_exact", "use_bias": False, "d_ff": 100},
            "model.d_ff: found 100; must be 512",
        ),
    ],
)
def test_models_that_no_architecture_supports_are_refused(fields, message):
    fields = {f"model.{name}": value for name, value in fields.items()}
    further = models.FURTHER["bert"] if fields.get("model.causal") is False else {}
    further |= models.TASK if "model.encoder_layers" in fields else {}
    config = loading.load("configs/default.py", fields | further)
    with pytest.raises(UserError, match=message):
        architectures.choose(config.model)


def test_position_ids_of_a_task_are_refused(tmp_path):
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "data.position_ids": "coupled"}
    config, drawn = models.make("learned", **fields)
    definition, mesh = build.abstract(config.model, models.VOCAB)[0], sharding.make_reading_mesh(1, 1)
    model = LoadedModel(drawn, definition, config, mesh, config.batch_tokens, PLAIN)
    with pytest.raises(UserError, match=r"^data.position_ids: found 'coupled'; must be sequence to be exported$"):
        exporting.write_model(model, tmp_path)
    assert not list(tmp_path.iterdir())

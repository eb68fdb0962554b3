"""Models that no architecture of Transformers can express are refused by the fields' names."""

import re

import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import architectures, exporting
from mini_gpt.model import build
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from tests.hugging_face import models

without = lambda fields, name: {other: value for other, value in fields.items() if other != name}
BERT, T5 = models.BERT, models.T5 | {"activation": "relu"}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu"}
MPT = {"position": "alibi", "activation": "gelu_exact"}
# Fields of a model, of which the last can't be exported.
REFUSED = [
    {"norm": "rmsnorm", "position": "kerple"},
    {"position": ("none", "alibi")},
    {"position": ("rope", "t5")},
    {"position": "none", "norm": "rmsnorm"},
    {"position": "none", "random_positions": 512},
    {"position": "sinusoidal", "attention_window": 8},
    {"parallel_residual": "one_norm"},
    {"position": "rope", "head_width": 8},
    LLAMA | {"position": "rope", "heads": ((0, 1), (3,), (2,), (1,))},
    {"position": "rope", "rope.base": (9.0, 99.0)},
    {"rope.scaling": "linear", "rope.factor": (1.0, 4.0)},
    {"rope.factor": 2, "rope.scaling": "yarn"},
    {"position": "rope", "rope.factor": 2, "rope.fraction": 0.5, "rope.scaling": "yarn_by_index"},
    {"position": "rope", "rope.turning": 0.5},
    {"position": "rope", "activation": "swiglu"},
    {"position": "rope", "variants.qk_norm": "plain"},
    {"position": "learned", "num_kv_heads": 2},
    {"position": "learned", "residual": False},
    {"position": "learned", "scale_width": 9.0},
    {"position": "learned", "variants.clip_qkv": 9.0},
    {"position": "learned", "scale_attention": False},
    LLAMA | {"activation": "gelu"},
    LLAMA | {"rope.fraction": 0.5},
    {"position": "alibi", "output_soft_cap": 9.0},
    {"position": "alibi", "activation": "gelu"},
    MPT | {"use_bias": True},
    MPT | {"alibi_exponent": 16.0},
    MPT | {"use_bias": False, "d_ff": 100},
    BERT | {"norm": "rmsnorm"},
    without(BERT, "prediction_head") | {"prediction_head": False},
    without(BERT, "position") | {"position": "rope"},
    without(T5, "position") | {"position": ("t5", "none")},
    T5 | {"share_embeddings": False},
]


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: str([*given.items()][-1]))
def test_models_that_no_architecture_supports_are_refused(given):
    name, value = [*given.items()][-1]
    fields = {f"model.{name}": value for name, value in given.items()}
    further = models.FURTHER["bert"] if fields.get("model.causal") is False else {}
    further |= models.TASK if "model.encoder_layers" in fields else {}
    config = loading.load("configs/default.py", fields | further)
    with pytest.raises(UserError, match=re.escape(f"model.{name}: found {value!r}")):
        architectures.choose(config.model)


def test_position_ids_of_a_task_are_refused(tmp_path):
    fields = {"data.corpus": "task:copy", "data.tokenizer": "characters", "data.position_ids": "coupled"}
    config, drawn = models.make("learned", **fields)
    definition, mesh = build.abstract(config.model, models.VOCAB)[0], sharding.make_reading_mesh(1, 1)
    model = LoadedModel(drawn, definition, config, mesh, config.batch_tokens, PLAIN)
    with pytest.raises(UserError, match=r"^data.position_ids: found 'coupled'; must be sequence to be exported$"):
        exporting.write_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nanochat_is_refused_with_a_factor_of_queries_and_keys():
    preset, factor = (
        "configs/presets.py:nanochat_d20",
        {"model.rope.scaling": "yarn_by_index", "model.rope.factor": 2.0},
    )
    right, yarn = (loading.load(preset, fields).model for fields in ({}, factor))
    assert architectures.choose(right, {}, "nanochat").title == architectures.choose(right).title == "NanoChat"
    with pytest.raises(UserError, match=r"^model\.rope\.scaling: found 'yarn_by_index'; must be none or linear"):
        architectures.choose(yarn, {}, "nanochat")

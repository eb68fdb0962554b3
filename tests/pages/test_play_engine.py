"""The playground's forward pass in JavaScript: its logits equal those of JAX and of the float64 oracle."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config.attention import ENCODINGS, pattern
from mini_gpt.config.fields import choices, specs
from mini_gpt.config.model import ModelConfig
from mini_gpt.data.layout import Layout
from mini_gpt.model import parameters as model_parameters
from mini_gpt.pages.play import pack
from mini_gpt.runtime.errors import UserError
from tests import oracle
from tests.model import test_gpt
from tests.pages import node, play_engine
from tests.pages.play_engine import VOCAB, make

LIMIT = 1e-4  # of the difference of logits
LENGTH = 12


def supported(fields):
    """Return whether the playground shows a model, instead of refusing it."""
    known = {*pattern(fields.get("position", "rope"))} <= {*pack.KNOWN["position"]}
    return known and all(fields.get(name, value) == value for name, value in pack.NEEDED.items())


QUICK = [
    *filter(supported, test_gpt.QUICK),
    {"parallel_residual": "one_norm", "num_layers": 1},
    {"residual": False, "num_layers": 1},
]
ALL = [
    *QUICK,
    *filter(supported, test_gpt.SLOW),
    {"position": "learned", "max_positions": 30},
    {"position": "rope", "rope.scaling": "yarn", "rope.factor": 4.0, "rope.original_context": 3, "rope.beta_slow": 0.5},
    {"position": "t5", "t5.num_buckets": 8, "t5.max_distance": 9},
    {"position": "alibi", "random_positions": 50},
    {"position": "learned", "max_positions": 90, "random_positions": 70},
    {"d_ff": 7, "activation": "relu"},
]
TOKENS = np.random.default_rng(5).integers(VOCAB, size=LENGTH)


def exact(model, tokens, config=None, **places):
    """Return the logits_LV of the float64 oracle."""
    parameters = model_parameters.with_layers(model.parameters, stacked=False)
    parameters = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters)
    return oracle.forward(config or model.config.model, parameters, tokens, **places)


def by_jax(model, tokens):
    return np.asarray(model.logits(np.asarray(tokens)[None]))[0]


def check_all(tables, reference):
    models = list(map(make, tables))
    found = play_engine.passes(models, [(n, [TOKENS], {}) for n in range(len(models))])
    for fields, model, [(logits_LV, _)] in zip(tables, models, found, strict=True):
        wanted_LV = reference(model, TOKENS)
        assert np.ptp(wanted_LV) > 1, fields
        np.testing.assert_allclose(logits_LV, wanted_LV, atol=LIMIT, rtol=0, err_msg=str(fields))


def test_logits_equal_the_float64_oracle():
    check_all(QUICK, exact)


@pytest.mark.slow
def test_logits_equal_those_of_jax():
    check_all(ALL, by_jax)


CHOICES = {
    "position": [*pack.KNOWN["position"], ("rope", "none"), ("t5", "fox"), ("alibi", "cope")],
    "num_kv_heads": [1, 2, 4],
    "head_width": [4, 6],
    "d_ff": [8, 31],
    "norm": ["layernorm", "rmsnorm"],
    "norm_placement": ["pre", "post", "none"],
    "output_norm": [False, True],
    "parallel_residual": ["none", "two_norms", "one_norm"],
    "embedding_norm": [False, True],
    "use_bias": [True, False],
    "qkv_bias": [True, False],
    "activation": ["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu"],
    "tie_embeddings": [True, False],
    "output_bias": [False, True],
    "output_soft_cap": [None, 3.0],
    "scale_embeddings": [False, True],
    "scale_attention": [True, False],
    "residual": [True, False],
    "attention_window": [None, 3, (4, None)],
    "rope.scaling": ["none", "linear", "ntk", "dynamic", "yarn", "yarn_by_index", "yarn_unrounded", "llama3"],
    "rope.attention_factor": [None, 1.5],
    "alibi_exponent": [8.0, 3.0],
    "rope.factor": [1.0, 3.0],
    "rope.original_context": [5, 100],
    "variants.qk_norm": ["none", "plain", "weighted", "all_heads", "layernorm"],
    "variants.clip_qkv": [None, 0.5],
    "variants.query_scale": ["none", "ssmax", "llama4"],
    "variants.soft_cap": [None, 2.0],
    "variants.normaliser": ["softmax", "stick_breaking"],
    "variants.selective": [False, True],
    "variants.canon": [False, True],
    "variants.sink": ["none", "zero", "trained"],
    "variants.gate": ["none", "head", "entry"],
}


@pytest.mark.slow
def test_logits_of_random_combinations_equal_the_oracle():
    """Each field has a value of its own choice with probability 0.3, else its default."""
    rng, models = np.random.default_rng(0), []
    while len(models) < 100:
        fields = {name: values[rng.integers(len(values))] for name, values in CHOICES.items() if rng.random() < 0.3}
        with contextlib.suppress(UserError):  # fields that exclude each other
            models.append(make(fields))
    layout = Layout(separator_id=18)
    models = [dataclasses.replace(model, layout=layout) for model in models]
    found = play_engine.passes(models, [(n, [TOKENS], {}) for n in range(len(models))])
    positions_BL, segments_BL = layout.positions_and_segments(models[0].config.model, jnp.asarray(TOKENS)[None])
    places = {"positions": positions_BL[0].tolist(), "segments": segments_BL[0].tolist()}
    for model, [(logits_LV, _)] in zip(models, found, strict=True):
        wanted_LV = exact(model, TOKENS, **places)
        np.testing.assert_allclose(logits_LV, wanted_LV, atol=LIMIT, rtol=1e-5, err_msg=str(model.config.model))


DERIVED = ("position", "attention_window", "rope.base", "rope.factor", "rope.fraction")  # in `layers`, `rotated_width`
IN_TABLES = (  # in `tables`, from the classes of the encodings
    *("sinusoidal.base", "sinusoidal.amplitude", "alibi_exponent"),
    *("hard_alibi.heads", "t5.num_buckets", "t5.max_distance"),
)
BY_SHAPES = (  # the engine sees them by the parameters that exist, and by their shapes
    *("max_positions", "d_ff", "norm_weights", "use_bias", "qkv_bias", "attention_out_bias", "output_bias"),
    *("fire.width", "cope.positions", "variants.canon"),
)
WITHOUT_EFFECT = (  # on the logits of a trained model, in float32
    *("dtype", "param_dtype", "attention", "dropout", "embedding_dropout", "sublayer_dropout", "attention_dropout"),
    *("remat", "scan_layers", "variants.ssmax_start"),
)


REFUSED_ENCODINGS = tuple(f"model.{name}." for name in ENCODINGS if name not in pack.KNOWN["position"])
FIELDS = {name.removeprefix("model.") for name in specs(ModelConfig) if not name.startswith(REFUSED_ENCODINGS)}


def test_each_config_field_is_read_or_refused():
    script = "".join(path.read_text(encoding="utf-8") for path in play_engine.scripts())
    others = {*DERIVED, *IN_TABLES, *BY_SHAPES, *WITHOUT_EFFECT, *pack.NEEDED}
    assert others <= FIELDS
    assert {name for name in FIELDS - others if not re.search(rf"\b{name.rpartition('.')[2]}\b", script)} == set()


def test_a_new_value_of_a_choice_is_refused(monkeypatch):
    """Fields with a choice of names are those of KNOWN, so that the engine does not take a new name for another one."""
    with_choice = {name for name, spec in specs(ModelConfig).items() if choices(spec.hint)}
    others = {f"model.{name}" for name in (*WITHOUT_EFFECT, *pack.NEEDED)}
    assert {f"model.{name}" for name in pack.KNOWN} == with_choice - others
    monkeypatch.setitem(pack.KNOWN, "position", ("rope", "alibi"))
    with pytest.raises(UserError, match=r"model\.position: found .t5.; the playground knows rope, alibi"):
        pack.described(make({"position": ("rope", "t5")}))


def test_the_table_of_configs_has_another_value_of_each_field():
    assert FIELDS - {*WITHOUT_EFFECT, *pack.NEEDED} <= {name for fields in ALL for name in fields}


# (fields of the model, other fields, the field in the message)
REFUSED = [
    ({"position": "relative_logits"}, {}, "model.position: found 'relative_logits'; the playground knows none"),
    ({"variants.differential": True}, {}, "model.variants.differential: found True; the playground needs False"),
    ({"variants.latent": 8}, {}, "model.variants.latent: found 8; the playground needs None"),
    ({"causal": False}, {"train.objective": "masked"}, "model.causal: found False; the playground needs True"),
    (
        {"encoder_layers": 1},
        {"data.corpus": "task:copy", "data.tokenizer": "characters"},
        "model.encoder_layers: found 1",
    ),
]


@pytest.mark.parametrize("fields, others, message", REFUSED, ids=str)
def test_an_unsupported_field_is_refused_by_name(fields, others, message):
    with pytest.raises(UserError, match=message):
        pack.packed(make(fields, **others))


def test_a_large_model_is_referred_to_the_server(monkeypatch):
    monkeypatch.setattr(pack, "MOST_PARAMETERS", 1000)
    with pytest.raises(UserError, match=r"at most 1,000; use python -m mini_gpt\.play"):
        pack.packed(make())


def test_packed_parameters_are_the_same_bits():
    model = make({"param_dtype": "float32", "scan_layers": True})
    script = """{
      const bits = (values) => [...new Int32Array(values.slice().buffer)];
      const entry = ([name, { shape, values }]) => [name, shape, bits(values)];
      return Model.unpack(given).then((model) => [...model.parameters].map(entry));
    }"""
    found = node.evaluate(play_engine.scripts(), script, pack.packed(model))
    separate = model_parameters.by_name(model_parameters.with_layers(model.parameters, stacked=False))
    assert [name for name, *_ in found] == list(separate)
    for name, shape, bits in found:
        array = separate[name].T if name.endswith("/kernel") else separate[name]
        np.testing.assert_array_equal(np.reshape(bits, shape), np.ascontiguousarray(array).view(np.int32), err_msg=name)

"""The playground's forward pass in JavaScript: its logits equal those of JAX and of the float64 oracle."""

import jax
import numpy as np
import pytest

from mini_gpt.config.fields import specs
from mini_gpt.config.model import ModelConfig
from mini_gpt.model import parameters as model_parameters
from mini_gpt.pages.play import pack
from mini_gpt.runtime.errors import UserError
from tests import oracle
from tests.model import test_gpt
from tests.pages import node, play_engine
from tests.pages.play_engine import VOCAB, make

LIMIT = 1e-4  # of the difference of logits
LENGTH = 12
supported = lambda fields: fields.get("causal", True)
QUICK = list(filter(supported, test_gpt.QUICK))
ALL = (
    QUICK
    + list(filter(supported, test_gpt.SLOW))
    + [
        {"position": "learned", "max_positions": 30},
        {
            "position": "rope",
            "rope.scaling": "yarn",
            "rope.factor": 4.0,
            "rope.original_context": 3,
            "rope.beta_slow": 0.5,
        },
        {"position": "t5", "t5.num_buckets": 8, "t5.max_distance": 9},
        {"d_ff": 7, "activation": "relu"},
    ]
)
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


def test_each_config_field_is_read_or_refused():
    groups = [pack.READ, pack.DERIVED, pack.BY_SHAPES, pack.WITHOUT_EFFECT, tuple(pack.NEEDED)]
    named = [f"model.{name}" for group in groups for name in group]
    assert len(named) == len(set(named))
    assert set(named) == set(specs(ModelConfig))


def test_the_engine_reads_each_packed_field():
    script = "".join(path.read_text(encoding="utf-8") for path in play_engine.scripts())
    assert [name for name in pack.READ if name.rpartition(".")[2] not in script] == []


def test_the_table_of_configs_has_another_value_of_each_field():
    varied = {name for fields in ALL for name in fields}
    assert {*pack.READ, *pack.DERIVED, *pack.BY_SHAPES} <= varied


COPY = {"data.corpus": "task:copy", "data.tokenizer": "characters"}
# (fields of the model, other fields, the field in the message)
REFUSED = [
    ({"causal": False}, {"train.objective": "masked"}, "model.causal: found False; the playground needs True"),
    ({"random_positions": 50}, {}, "model.random_positions: found 50; the playground needs None"),
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
        np.testing.assert_array_equal(np.reshape(bits, shape), np.asarray(separate[name]).view(np.int32), err_msg=name)

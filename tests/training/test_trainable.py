"""With train.trainable, training changes the parameters whose names match, as if the others were constants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mini_gpt.model.parameters import by_name, count
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, train_state, trainable
from mini_gpt.training.run import Run
from tests.training.interruption import assert_same_bits, kill_after
from tests.training.test_step import VOCAB, make_batch, run


def bits(tree):
    return {name: np.asarray(leaf).view(np.uint32) for name, leaf in by_name(tree).items()}


def gradients(config, state):
    """Return the gradient of the mean loss over all parameters, by name, and the parameters by name."""
    definition, _ = train_state.abstract(config, VOCAB, sharding.make_mesh(1, 1, 1))
    batch = make_batch(config)

    def mean(parameters):
        model = nnx.merge(definition, parameters)
        logits_BLV = model(jnp.asarray(batch["inputs"]))
        nll_BL = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, batch["targets"])
        return (nll_BL * batch["weights"]).sum() / batch["weights"].sum()

    return by_name(jax.grad(mean)(state.parameters)), by_name(state.parameters)


CASES = [
    ({}, "attention/"),
    ({"model__scan_layers": True}, "attention/"),
    ({"mesh__data": 2, "mesh__fsdp": 2}, "attention/|embedding"),
    ({"train__accumulation_steps": 2}, r"^blocks/1/"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fields, pattern", CASES)
def test_a_step_is_adamw_on_the_matching_parameters_alone(small, fields, pattern):
    o = {"clip_norm": 0.05, "weight_decay": 0.3, "learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0}
    config = small(
        train__trainable=pattern,
        model__num_layers=2,
        **{f"optimizer__{name}": value for name, value in o.items()},
        **fields,
    )
    before, _, _ = run(config, steps=0)
    after, history, _ = run(config, steps=1)
    gradient, values = gradients(config, before)
    matching = {name for name in values if name.startswith("blocks/1/") or "^" not in pattern}
    matching = {
        name for name in matching if "attention/" in name or "^" in pattern or ("|" in pattern and "embedding" in name)
    }
    assert 0 < len(matching) < len(values)
    norm = np.sqrt(sum(np.square(np.asarray(gradient[name], np.float64)).sum() for name in matching))
    np.testing.assert_allclose(history[0]["gradient_norm"], norm, rtol=1e-4)
    assert norm > 2 * o["clip_norm"], "or clipping would change nothing"
    for name, found in by_name(after.parameters).items():
        if name not in matching:
            np.testing.assert_array_equal(bits(after.parameters)[name], bits(before.parameters)[name], name)
            continue
        g = np.asarray(gradient[name], np.float64) * o["clip_norm"] / norm
        decay = o["weight_decay"] * np.asarray(values[name]) * name.endswith(("kernel", "embedding"))
        expected = values[name] - o["learning_rate"] * (g / (np.abs(g) + 1e-8) + decay)
        clear = np.abs(g) > 1e-6  # below, rounding decides the sign
        np.testing.assert_allclose(np.asarray(found)[clear], np.asarray(expected)[clear], atol=2e-4, err_msg=name)
    moments = [leaf for leaf in jax.tree.leaves(after.optimizer_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(values[name].size for name in matching)


def test_a_negative_zero_of_a_fixed_parameter_stays():
    parameters = {"a": {"kernel": jnp.ones(2)}, "b": {"bias": jnp.array([-0.0, 1.0])}}
    trained, fixed = trainable.split("kernel", parameters)
    assert count(trained) == count(fixed) == 2
    joined = trainable.join(trained, fixed)
    assert np.signbit(joined["b"]["bias"][0]) and joined["a"] is not parameters["a"] and joined["a"]["kernel"].size == 2


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"train__trainable": "atention"}, r"'atention'; must be in the name of a parameter, such as blocks/0/\S+"),
        ({"train__trainable": "^embedding$", "optimizer__name": "muon"}, "muon needs the same matrices in every layer"),
        (
            {"train__trainable": "blocks/1/attention", "optimizer__name": "muon", "model__num_layers": 2},
            "muon needs the same matrices in every layer; use adamw",
        ),
    ],
)
def test_a_pattern_without_parameters_is_refused(small, fields, message):
    config = small(**fields)
    with pytest.raises(UserError, match=message):
        train_state.abstract(config, VOCAB, sharding.make_mesh(1, 1, 1))


@pytest.mark.slow
def test_muon_trains_the_matching_matrices_only(small):
    config = small(train__trainable="attention/|norm", optimizer__name="muon", model__num_layers=2)
    before, _, _ = run(config, steps=0)
    after, _, _ = run(config, steps=2)
    for name, leaf in bits(before.parameters).items():
        is_trained = "attention/" in name or "norm" in name
        assert np.array_equal(leaf, bits(after.parameters)[name]) != is_trained, name


@pytest.mark.slow
def test_a_resumed_run_trains_the_same_parameters(small, tmp_path, caplog):
    source = loop.train(small(model__num_layers=2), tmp_path / "source", conclude=False)
    config = small(model__num_layers=2, train__trainable="attention/", checkpoint__every=2)
    with caplog.at_level("INFO", "mini_gpt"):
        whole = loop.train(config, tmp_path / "whole", init_from=tmp_path / "source")
    own = sum(leaf.size for name, leaf in by_name(source.parameters).items() if "attention/" in name)
    assert f"training changes {own:,} of these: those whose names match train.trainable='attention/'" in caplog.text
    kill_after(5, config, tmp_path / "cut", init_from=tmp_path / "source")
    assert_same_bits(whole, loop.train(config, tmp_path / "cut", init_from=tmp_path / "source"))
    for name, leaf in bits(source.parameters).items():
        assert np.array_equal(leaf, bits(Run(tmp_path / "cut").model.parameters)[name]) == ("attention/" not in name)
    with pytest.raises(UserError, match=r"train.trainable was 'attention/', is ''"):
        loop.train(small(model__num_layers=2, checkpoint__every=2), tmp_path / "cut", init_from=tmp_path / "source")

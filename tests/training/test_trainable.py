"""Parameters that training changes: those that are chosen, and adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mini_gpt.evaluation import perplexity
from mini_gpt.hugging_face import exporting, importing
from mini_gpt.model import build
from mini_gpt.model.layers import Linear
from mini_gpt.model.parameters import by_name, count
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import adapters, initial_weights, loop, train_state, trainable
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.random_models import random_parameters
from tests.training.interruption import assert_same_bits, kill_after, rows
from tests.training.test_step import VOCAB, assert_close, make_batch, run

# With train.trainable, training changes the parameters whose names match, as if the others were constants.


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


# With train.lora_rank, training changes adapters beside frozen layers, and all else reads merged weights.

LORA = {"train__lora_rank": 3, "train__lora_alpha": 6.0}
LLAMA = {"model__norm": "rmsnorm", "model__activation": "swiglu", "model__use_bias": False, "model__num_layers": 2}


def drawn(parameters):
    """Return the parameters with random adapters: new ones have B = 0."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        named = "lora" in jax.tree_util.keystr(path)
        return random.normal(size=leaf.shape).astype(np.float32) if named else leaf

    return jax.tree_util.tree_map_with_path(draw, parameters)


def assert_merged(plain, base, adapted, scale):
    """Check W + scale · A B in float64, and that all other parameters keep their bits."""
    base, plain, adapted = by_name(base), by_name(plain), by_name(adapted)
    assert plain.keys() == base.keys() < adapted.keys()
    for name, leaf in base.items():
        a, b = (adapted.get(name.replace("kernel", f"lora/lora_{letter}")) for letter in "ab")
        if not name.endswith("kernel") or a is None:
            np.testing.assert_array_equal(plain[name], leaf, name)
            continue
        product = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        np.testing.assert_allclose(plain[name], leaf + scale * product, rtol=1e-6, atol=1e-6, err_msg=name)
        assert np.abs(product).max() > 1e-4


def test_an_adapted_layer_computes_the_formula(small):
    model = adapters.adapted(small(**LORA), VOCAB)
    attention, random = model.blocks[0].attention, np.random.default_rng(0)
    names = {name for name in ("query", "key", "value", "out") if type(getattr(attention, name)) is not Linear}
    assert names == {"query", "value"} and type(model.blocks[0].mlp.up) is Linear
    layer = attention.query
    assert layer.lora.lora_a.shape == (32, 3) and not np.any(layer.lora.lora_b[...])
    for parameter in (layer.kernel, layer.bias, layer.lora.lora_a, layer.lora.lora_b):
        parameter[...] = random.normal(size=parameter.shape).astype(np.float32)
    x_BLD = random.normal(size=(2, 5, 32)).astype(np.float32)
    x, w, bias, a, b = (
        np.asarray(array, np.float64)
        for array in (x_BLD, layer.kernel[...], layer.bias[...], layer.lora.lora_a[...], layer.lora.lora_b[...])
    )
    np.testing.assert_allclose(layer(x_BLD), x @ w + bias + 6.0 / 3 * (x @ a) @ b, rtol=1e-4, atol=1e-4)


ADAPTED = [
    {},
    {**LLAMA, "model__num_kv_heads": 2, "train__lora_layers": "."},
    {"train__lora_layers": "cross_attention/|^encoder.*mlp", "model__encoder_layers": 1, "data__corpus": "task:copy"},
]


@pytest.mark.parametrize("fields", [ADAPTED[1], *slow(ADAPTED[0], ADAPTED[2])])
def test_merged_weights_give_the_outputs_of_the_adapted_model(small, fields):
    if "data__corpus" in fields:
        fields = fields | {"data__path": None, "data__tokenizer": "characters"}
    config = small(**LORA, **fields)
    definition = build.split(adapters.adapted(config, VOCAB))[0]
    plain_definition, plain = random_parameters(config.model, VOCAB, noise=0.0)
    new = adapters.inserted(plain, config)
    assert_same_bits(adapters.merged(new, config.train), plain)
    tokens_BL = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32)
    arguments = (tokens_BL, None, None, tokens_BL) if config.model.has_encoder else (tokens_BL,)
    logits = jax.jit(lambda definition, parameters: nnx.merge(definition, parameters)(*arguments), static_argnums=0)
    expected_BLV = logits(plain_definition, plain)
    np.testing.assert_array_equal(logits(definition, new), expected_BLV)
    adapted = drawn(new)
    merged = adapters.merged(adapted, config.train)
    assert_merged(merged, plain, adapted, 6.0 / 3)
    found_BLV = logits(definition, adapted)
    np.testing.assert_allclose(found_BLV, logits(plain_definition, merged), rtol=1e-3, atol=1e-3)
    assert np.abs(found_BLV - expected_BLV).max() > 0.1


@pytest.mark.slow
def test_training_changes_adapters_alone_and_resumes_with_the_same_bits(small, trained, tmp_path, caplog):
    source = trained(**LLAMA)
    config = small(**LLAMA, **LORA, checkpoint__every=2)
    with caplog.at_level("INFO", "mini_gpt"):
        whole = loop.train(config, tmp_path / "whole", init_from=source)
    count = 2 * 2 * (32 * 3 + 3 * 32)  # layers, projections, and A and B of each
    assert f"training changes {count:,} of these: the adapters\n" in caplog.text
    assert "blocks/*/attention/query/lora  2 of 32 × 3 + 3 × 32" in caplog.text
    assert sum(leaf.size for leaf in jax.tree.leaves(whole.optimizer_state) if leaf.ndim) == 2 * count
    kill_after(5, config, tmp_path / "cut", init_from=source)
    assert_same_bits(whole, loop.train(config, tmp_path / "cut", init_from=source))
    # Readers get merged weights: a run, its score, a further run, and an export.
    base, cut = Run(source).model.parameters, Run(tmp_path / "cut")
    plain = cut.model.parameters
    assert_merged(plain, base, whole.parameters, 6.0 / 3)
    tokens, sizes = cut.store.tokens("validation"), cut.tokenizer.token_bytes
    score = perplexity.score_split(cut.model, tokens, sizes, most_tokens=256)
    assert score.nll == rows(tmp_path / "whole")[-1]["validation/loss"]
    further = initial_weights.read(tmp_path / "cut", None, config, cut.mesh)[1]
    assert_same_bits(further, plain)
    exporting.export(Run(tmp_path / "cut"), tmp_path / "exported")
    data = {"data.corpus": "text", "data.path": config.data.path}
    imported = lambda name, **fields: importing.import_run(
        tmp_path / "exported", tmp_path / name, "configs/default.py", data | fields
    )
    imported("again", **{"mesh.data": 1})
    assert_same_bits(Run(tmp_path / "again").model.parameters, plain)
    with pytest.raises(UserError, match=r"train.lora_rank: found 3; must be 0 for an import; give it to train.py, wi"):
        imported("other", **{"train.lora_rank": 3})


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_initial_weights(small, trained, tmp_path):
    source = trained()
    for name, fields in (("plain", {}), ("adapted", LORA)):
        loop.train(small(train__steps=1, **fields), tmp_path / name, init_from=source, conclude=False)
    first = [rows(tmp_path / name)[0]["train/loss"] for name in ("plain", "adapted")]
    assert first[0] == first[1]


@pytest.mark.slow
def test_a_step_on_a_mesh_of_four_devices_equals_one_on_a_single_device(small):
    fields = {**LORA, "train__lora_layers": ".", "model__num_kv_heads": 4}
    single, history, _ = run(small(**fields))
    sharded, of_mesh, _ = run(small(mesh__data=1, mesh__fsdp=2, mesh__tensor=2, **fields))
    assert_close(single.parameters, sharded.parameters)
    assert_close(history, of_mesh)
    kernel = lambda state: adapters.merged(state.parameters, small(**fields).train)["blocks"][0]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(kernel(single), kernel(sharded), atol=2e-5)
    assert kernel(sharded).sharding == sharded.parameters["blocks"][0]["mlp"]["up"]["kernel"].sharding


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"train__lora_layers": "atention"}, r"lora_layers: found 'atention'; is in no name .*; there are blocks/0/"),
        ({"model__scan_layers": True}, r"model.scan_layers: found True; must be False with train.lora_rank"),
        ({"optimizer__name": "muon"}, r"optimizer.name: found 'muon'; must be adamw with train.lora_rank"),
        ({"train__trainable": "query"}, r"train.trainable: found 'query'; must be empty with train.lora_rank; train.l"),
        ({"model__variants__clip_qkv": 8.0}, r"train.lora_layers: found 'attention/\(query\|value\)\$'; is in no name"),
    ],
)
def test_adapters_that_cannot_be_are_refused(small, fields, message):
    with pytest.raises(UserError, match=message):
        train_state.abstract(small(**LORA, **fields), VOCAB, sharding.make_mesh(1, 1, 1))


def test_adapters_of_random_weights_are_refused(small, tmp_path):
    with pytest.raises(UserError, match=r"train.lora_rank: found 3; adapters need the weights of a run: --init_from"):
        loop.train(small(**LORA), tmp_path / "new")
    assert not (tmp_path / "new").exists()

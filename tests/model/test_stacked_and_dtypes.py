"""A scan over stacked layers computes the unrolled model; parameters, streams and logits have their dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.insight import observing
from mini_gpt.model import MiniGPT, build, parameters, running
from tests.model.test_gpt import VOCAB, make_model, run


@pytest.mark.slow
@pytest.mark.parametrize("activation, dtype, tolerance", [("gelu", "float32", 1e-4), ("swiglu", "bfloat16", 0.02)])
def test_a_scan_over_layers_equals_the_unrolled_model(activation, dtype, tolerance):
    fields = {"position": ("rope", "t5"), "num_layers": 4, "dropout": 0.3, "tie_embeddings": False}
    fields |= {"activation": activation, "dtype": dtype}
    definitions, first = [], []
    for scan in (False, True):
        overrides = {f"model.{name}": value for name, value in (fields | {"scan_layers": scan}).items()}
        config = loading.load("configs/default.py", {"model.d_model": 16, "context_length": 12} | overrides)
        make = lambda model=config.model: MiniGPT(model, VOCAB, rngs=nnx.Rngs(3))
        definitions.append(build.abstract(config.model, VOCAB)[0])
        first.append(jax.jit(lambda make=make: build.split(make())[1])())
    with_layers = jax.jit(parameters.with_layers, static_argnames="stacked")
    assert first[1]["blocks"]["mlp"]["up"]["kernel"].shape[:2] == (4, 16)
    jax.tree.map(np.testing.assert_array_equal, with_layers(first[1], stacked=False), first[0])
    jax.tree.map(np.testing.assert_array_equal, with_layers(first[0], stacked=True), first[1])

    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(first[0]))))
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), first[0])
    tokens = jnp.array(np.random.default_rng(0).integers(VOCAB, size=(2, 12)))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient_and_maps(definition, params):
        logit = lambda params: run(definition, params, tokens, dropout_key=jax.random.key(1))[1, 7, 3]
        maps = [layer.attention.weights_BHLS for layer in observing.layers(nnx.merge(definition, params), (tokens,))]
        return jax.value_and_grad(logit)(params), maps

    (unrolled, maps), (scanned, maps_of_scan) = (
        gradient_and_maps(definition, with_layers(params, stacked=stacked))
        for definition, stacked in zip(definitions, (False, True), strict=True)
    )
    close = lambda a, b, more=0.0: np.testing.assert_allclose(a, b, atol=tolerance * (np.abs(b).max() + more))
    gradients = [parameters.by_name(with_layers(tree, stacked=False)[1]) for tree in (scanned, unrolled)]
    largest = max(float(jnp.abs(leaf).max()) for leaf in gradients[1].values())
    for name, gradient in gradients[1].items():  # without RoPE, the gradient of key/bias is 0 up to rounding
        close(gradients[0][name], gradient, 0.01 * largest if name.endswith("key/bias") else 0.0)
    close(scanned[0], unrolled[0])
    assert len(maps) == 4
    jax.tree.map(close, maps_of_scan, maps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"position": ("alibi", "rope", "t5")}, {"attention_window": (3, None), "rope.base": (10.0, 1e4), "num_layers": 4}],
    ids=str,
)
def test_an_unrolled_scan_gives_the_same_logits(fields):
    _, definition, params = make_model(**{"num_layers": 3, "scan_layers": True, "variants.sink": "trained"} | fields)
    tokens, module = jnp.arange(12)[None], running.unstack(nnx.merge(definition, params))
    assert module.run_blocks is None and len(module.blocks) == fields.get("num_layers", 3)
    np.testing.assert_allclose(nnx.jit(module)(tokens), run(definition, params, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_scan_has_a_program_of_one_size_for_any_depth():
    """The programs for initialization and for a gradient have as many lines with 24 layers as with 4."""
    lines = []
    for layers in (4, 24):
        fields = {"model.num_layers": layers, "model.scan_layers": True, "model.position": ("rope", "none")}
        config = loading.load("configs/default.py", fields)
        definition, shapes = build.abstract(config.model, VOCAB)
        init = lambda config=config: build.split(build.make(config.model, VOCAB, rngs=nnx.Rngs(0)))[1]
        gradient = jax.grad(lambda p, d=definition: run(d, p, jnp.zeros((1, 8), int)).sum())
        lowered = jax.jit(init).lower(), jax.jit(gradient).lower(shapes)
        lines.append([len(each.as_text().splitlines()) for each in lowered])
    assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_last_hidden_states_have_the_compute_dtype(placement):
    _, definition, params = make_model(dtype="bfloat16", norm_placement=placement)
    tokens = jnp.arange(6)[None]
    model = nnx.merge(definition, params)
    assert model.hidden(tokens).dtype == jnp.bfloat16 and model(tokens).dtype == jnp.float32


@pytest.mark.slow
def test_without_residuals_the_stream_is_float32_in_a_scan_too():
    for scan in (False, True):
        _, definition, params = make_model(dtype="bfloat16", residual=False, scan_layers=scan)
        tokens = jnp.zeros((1, 4), jnp.int32)
        jax.eval_shape(nnx.merge(definition, params).hidden, tokens)  # a scan refuses a stream that changes its dtype
        observed = observing.layers(nnx.merge(definition, params), (tokens,))
        assert [layer.after_BLD.dtype for layer in observed] == [jnp.float32, jnp.float32]


def test_bfloat16_models_keep_float32_parameters():
    _, definition, params = make_model(dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    tokens = jnp.arange(12)[None]
    narrow, wide = run(definition, params, tokens), run(make_model(dtype="float32")[1], params, tokens)
    assert narrow.dtype == jnp.float32
    assert jnp.abs(narrow - wide).max() > 0
    np.testing.assert_allclose(narrow, wide, atol=0.05 * float(jnp.abs(wide).max()))

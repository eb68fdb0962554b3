"""The model against an independent forward pass: its logits, gradients, stacked layers and dtypes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.config.attention import ENCODINGS
from mini_gpt.insight import observing
from mini_gpt.model import MiniGPT, build, parameters, running
from mini_gpt.model import loss as losses
from mini_gpt.model.layers import ACTIVATIONS
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from tests import oracle
from tests.conftest import slow
from tests.random_models import random_parameters

# The model against an independent float64 forward pass, and its mathematical properties.

VOCAB = 23


def make_model(seed=0, **overrides):
    base = {"model.num_layers": 2, "model.d_model": 16, "model.num_heads": 4, "model.dtype": "float32"}
    base |= {"context_length": 12, "train.objective": "next_token" if overrides.get("causal", True) else "masked"}
    if overrides.get("encoder_layers"):
        base |= {"data.corpus": "task:copy", "data.tokenizer": "characters"}
    config = loading.load("configs/default.py", base | {f"model.{name}": value for name, value in overrides.items()})
    return config.model, *random_parameters(config.model, VOCAB, noise=0.3, seed=seed)


@functools.partial(jax.jit, static_argnums=0)
def run(definition, params, *args, **kwargs):
    return nnx.merge(definition, params)(*args, **kwargs)


BERT = {"position": "learned", "causal": False, "norm_placement": "post", "embedding_norm": True}
BERT |= {"prediction_head": True, "norm_epsilon": 1e-3}
GEMMA = {"norm": "rmsnorm", "output_norm": True, "activation": "geglu", "scale_embeddings": True, "scale_width": 5.0}
GEMMA |= {"output_soft_cap": 3.0, "variants.soft_cap": 2.0, "attention_window": (4, None), "use_bias": False}
OLMO = {"norm": "rmsnorm", "norm_placement": "none", "output_norm": True, "num_kv_heads": 2, "variants.clip_qkv": 0.05}
OLMO |= {"variants.qk_norm": "all_heads", "variants.qk_norm_epsilon": 1e-3}
BY_INDEX = {"position": "rope", "rope.scaling": "yarn_by_index", "rope.factor": 3.0, "rope.original_context": 200}
NANOCHAT = {"norm": "rmsnorm", "norm_weights": False, "embedding_norm": True, "variants.qk_norm": "plain"}
NANOCHAT |= {"activation": "relu2", "use_bias": False, "tie_embeddings": False, "output_soft_cap": 3.0}
QUICK = [{"position": name} for name in ENCODINGS] + [
    GEMMA,
    OLMO,
    NANOCHAT,
    BERT,
    {"position": "none", "block": "gru"},
    {"position": "rope", "variants.qk_norm": "weighted", "variants.query_scale": "ssmax", "num_kv_heads": 2},
    {"position": "none", "variants.normaliser": "stick_breaking", "variants.canon": True, "num_kv_heads": 2},
    {"position": "rope", "variants.differential": True, "num_kv_heads": 2, "variants.gate": "head"},
    {"position": "rope", "variants.latent": 6, "variants.gate": "entry"},
]
SLOW = [
    {"norm": "rmsnorm", "activation": "swiglu", "use_bias": False, "tie_embeddings": False},
    {"scale_attention": False, "activation": "gelu_exact"},
    {"position": "rope", "activation": "geglu", "embedding_norm": True, "norm": "rmsnorm", "norm_epsilon": 0.01},
    {
        "position": "rope",
        "d_model": 64,
        "rope.scaling": "yarn",
        "rope.factor": 3.0,
        "rope.original_context": 200,
        "rope.beta_fast": 8.0,
    },
    {"position": "sinusoidal", "sinusoidal.columns": 6},
    {"position": "alibi", "attention_window": 4},
    {"position": "alibi", "alibi_exponent": 3.0, "variants.qk_norm": "layernorm", "num_kv_heads": 2},
    BY_INDEX | {"d_model": 64, "rope.scaling": "yarn_unrounded", "rope.attention_factor": 1.5, "rope.beta_fast": 8.0},
    {"position": "t5", "num_kv_heads": 1, "causal": False},
    {"position": "alibi", "variants.soft_cap": 1.0, "variants.sink": "trained", "variants.gate": "entry"},
    {"position": ("fire", "rope", "kerple"), "num_layers": 3, "rope.turning": 0.5, "d_model": 64},
    {"position": ("fox", "cope"), "num_kv_heads": 2, "cope.positions": 5},
    {"position": "path", "num_kv_heads": 2, "scan_layers": True, "variants.query_scale": "ssmax", "scale_width": 5.0},
    {"position": ("path", "rope"), "attention_window": 4, "variants.normaliser": "stick_breaking"},
    {"position": "accumulated", "num_kv_heads": 2, "scan_layers": True, "d_model": 64, "rope.turning": 0.5},
    {"position": "relative_logits", "relative_logits.extent": 5, "num_kv_heads": 2, "scan_layers": True},
    {"position": "rope", "variants.selective": True, "num_kv_heads": 2},
    {"position": ("rope", "none"), "num_layers": 4, "attention_window": (3, None), "rope.base": (10.0, 1e4, 500.0)},
    GEMMA | {"scan_layers": True, "variants.qk_norm": "weighted", "rope.base": (100.0, 1e4), "num_kv_heads": 2},
    GEMMA | {"tie_embeddings": False, "output_bias": True, "parallel_residual": "two_norms", "norm_weights": False},
    OLMO | {"scan_layers": True, "variants.qk_norm_epsilon": 1e-6},
    OLMO | {"use_bias": False, "norm": "layernorm", "output_norm": False, "causal": False, "attention_window": 3},
    BY_INDEX | {"d_model": 64, "rope.beta_fast": 8.0},
    BY_INDEX | {"d_model": 64, "rope.factor": (1.0, 3.0), "scan_layers": True},
    {"rope.scaling": "linear", "rope.factor": (1.0, 1.0, 8.0), "rope.base": (100.0, 1e4), "num_layers": 3},
    BY_INDEX | {"d_model": 64, "num_heads": 2, "rope.fraction": 0.5, "scan_layers": True},
    BY_INDEX | {"d_model": 64, "num_heads": 2, "rope.original_context": 5},
    BERT | {"norm": "rmsnorm", "use_bias": False, "scan_layers": True, "activation": "relu", "tie_embeddings": False},
    {"prediction_head": True, "activation": "gelu_exact", "position": "sinusoidal", "embedding_norm": True},
    {"activation": "geglu", "scan_layers": True, "norm_epsilon": 1e-12},
    {"position": ("rope", "t5"), "num_layers": 4, "scan_layers": True, "norm": "rmsnorm"},
    {"position": ("rope", "none")},
    {"position": ("rope", "none"), "variants.latent": 20, "head_width": 8, "d_model": 20, "scan_layers": True},
    {"position": "none", "variants.latent": 5, "causal": False, "use_bias": False, "scale_width": 3.0},
    {"position": "fox", "variants.differential": True, "variants.sink": "zero", "attention_window": 4},
    {"position": "alibi", "variants.differential": True, "causal": False, "use_bias": False, "num_layers": 3},
    {"position": "none", "variants.qk_norm": "plain", "variants.gate": "head", "variants.sink": "zero"},
    {"position": "t5", "variants.query_scale": "ssmax", "attention_window": 3, "causal": False},
    {"position": "none", "variants.query_scale": "llama4", "variants.soft_cap": 1.0, "scan_layers": True},
    {"position": "fire", "fire.threshold": 3.0, "fire.width": 5, "scan_layers": True},
    {"position": "kerple", "num_kv_heads": 2, "causal": False},
    {"position": "hard_alibi", "hard_alibi.heads": 3, "attention_window": 3},
    {"position": "rope", "d_model": 64, "rope.scaling": "llama3", "rope.factor": 3.0, "rope.original_context": 20},
    {"position": ("t5", "alibi")},
    {"position": "fox", "attention_window": 4, "scan_layers": True, "variants.sink": "trained"},
    {"position": "pope", "num_kv_heads": 2, "rope.base": 50.0, "causal": False, "variants.qk_norm": "plain"},
    {"position": "cope", "attention_window": 4, "scan_layers": True, "variants.soft_cap": 1.0},
    {"position": "alibi", "variants.normaliser": "stick_breaking", "attention_window": 4, "scan_layers": True},
    {"position": "t5", "variants.selective": True, "attention_window": 5, "variants.sink": "zero"},
    {"d_model": 64, "rope.scaling": "dynamic", "rope.factor": 3.0, "rope.original_context": 5},
    {"d_model": 64, "rope.scaling": "dynamic", "rope.factor": 3.0, "rope.original_context": 50},
    {"d_model": 64, "rope.scaling": "dynamic", "rope.original_context": 5},
    {"attention_window": (2, 4), "rope.base": (50.0, 1e4), "num_layers": 4, "scan_layers": True},
    {"position": ("rope", "none"), "attention_window": 3, "causal": False},
    {"position": "rope", "rope.fraction": 0.5, "rope.base": 500.0},
    {"position": "sinusoidal", "scale_embeddings": True, "sinusoidal.amplitude": 0.5, "sinusoidal.base": 100.0},
    {"position": "sinusoidal", "scale_embeddings": True, "sinusoidal.columns": 5, "sinusoidal.amplitude": 0.5},
    {"position": "learned", "block": "gru", "norm_placement": "post", "scan_layers": True, "num_kv_heads": 2},
    {"position": "learned", "scale_embeddings": True},
    {"position": "rope", "num_kv_heads": 2},
    {"position": "rope", "d_model": 64, "rope.scaling": "linear", "rope.factor": 3.0},
    {"position": "rope", "d_model": 64, "rope.scaling": "ntk", "rope.factor": 3.0},
    {"position": ("rope", "none"), "d_model": 64, "rope.scaling": "yarn", "rope.factor": 2.0, "rope.fraction": 0.5},
    {"position": "rope", "attention_window": 3, "causal": False},
    {"position": "alibi", "causal": False, "norm_placement": "post"},
    {"norm_placement": "post", "activation": "relu"},
    {"residual": False},
    {"parallel_residual": "two_norms", "rope.fraction": 0.25, "d_model": 64, "scan_layers": True},
    {"parallel_residual": "one_norm", "position": "learned", "tie_embeddings": False, "output_bias": True},
    {"use_bias": False, "qkv_bias": True, "num_kv_heads": 2, "output_bias": True},
    {"qkv_bias": False, "position": "alibi", "scan_layers": True},
    {"attention_out_bias": False, "norm_weights": False},
    {"norm_weights": False, "norm": "rmsnorm", "parallel_residual": "two_norms", "scan_layers": True},
    {"d_model": 24, "num_heads": 5, "head_width": 6, "variants.gate": "entry", "variants.qk_norm": "weighted"},
]


@pytest.mark.parametrize("overrides", [*QUICK, *slow(*SLOW)], ids=str)
def test_logits_equal_an_independent_forward(overrides):
    config, definition, params = make_model(**overrides)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters.with_layers(params, stacked=False))
    tokens_BL = np.random.default_rng(0).integers(VOCAB, size=(2, 12))
    logits_BLV = run(definition, params, jnp.asarray(tokens_BL))
    assert logits_BLV.dtype == jnp.float32
    for tokens, logits in zip(tokens_BL, logits_BLV, strict=True):
        np.testing.assert_allclose(logits, oracle.forward(config, exact, tokens), atol=2e-4, rtol=2e-4)


VARIANTS = {"variants.qk_norm": "weighted", "variants.query_scale": "ssmax", "variants.soft_cap": 2.0}
VARIANTS |= {"variants.sink": "trained", "variants.gate": "head"}
GIVEN = [{"position": name} for name in ENCODINGS] + [{"position": "rope"} | VARIANTS]
GIVEN += [{"position": "none", "block": "gru"}]
GIVEN += [{"variants.canon": True, "variants.normaliser": "stick_breaking"}, {"variants.selective": True}]
FAR = list(range(8185, 8197))  # Llama 4's scale changes at 8191


@pytest.mark.parametrize("fields", [*GIVEN[1::4], *slow(*GIVEN[::4], *GIVEN[2::4], *GIVEN[3::4])], ids=str)
def test_given_positions_and_segments_are_used(fields):
    config, definition, params = make_model(**fields)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    tokens = np.random.default_rng(1).integers(VOCAB, size=12)
    places, segments = [5, 6, 7, 8, 0, 1, 2, 3, 4, 0, 1, 2], [3] * 4 + [4] * 5 + [7] * 3
    logits = run(definition, params, *(jnp.array(x)[None] for x in (tokens, places, segments)))[0]
    np.testing.assert_allclose(logits, oracle.forward(config, exact, tokens, places, segments), atol=2e-4, rtol=2e-4)


def test_the_scale_of_llama4_changes_the_logits_at_its_span():
    config, definition, params = make_model(position="alibi", **{"variants.query_scale": "llama4"})
    exact = jax.tree.map(lambda leaf: 2 * np.asarray(leaf, np.float64), params)  # larger logits show the scale
    tokens = np.random.default_rng(1).integers(VOCAB, size=12)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    near, far = (run(definition, doubled, *(jnp.array(x)[None] for x in (tokens, at)))[0] for at in (range(12), FAR))
    np.testing.assert_allclose(far, oracle.forward(config, exact, tokens, FAR), atol=1e-3, rtol=1e-3)
    assert jnp.abs(far[6:] - near[6:]).max() > 0.02 and jnp.abs(far[:6] - near[:6]).max() < 1e-3


@pytest.mark.parametrize("window", [3, *slow(1, 5, 20)])
def test_a_window_bounds_the_receptive_field(window):
    _, definition, params = make_model(position="rope", attention_window=window, tie_embeddings=False)
    tokens = jnp.arange(12)[None]

    def last(embedding):
        return jnp.sum(run(definition, params | {"embedding": embedding}, tokens)[0, -1] ** 2)

    influence = jnp.abs(jax.grad(last)(params["embedding"])).sum(-1)[:12]
    reach = min(12, 2 * (window - 1) + 1)  # two layers, each window - 1 tokens back
    assert (influence[12 - reach :] > 1e-6).all() and (influence[: 12 - reach] == 0).all()


@pytest.mark.parametrize("position", ["rope", "t5", *slow("none", "learned", "sinusoidal", "alibi")])
def test_no_gradient_reaches_a_later_token(position):
    _, definition, params = make_model(position=position, tie_embeddings=False)
    tokens = jnp.arange(10)[None]

    def logit_sum(embedding, at):
        return jnp.sum(run(definition, params | {"embedding": embedding}, tokens)[0, at] ** 2)

    for at in (0, 4, 9):
        influence = jnp.abs(jax.grad(logit_sum)(params["embedding"], at)).sum(-1)[:10]
        assert (influence[: at + 1] > 1e-6).all(), "each visible token must matter, also the token itself"
        assert (influence[at + 1 :] == 0).all()


@pytest.mark.slow
def test_equivariance_to_order_needs_no_mask_and_no_positions():
    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    order = jnp.array([5, 2, 7, 0, 1, 4, 3, 6])
    _, definition, params = make_model(position="none", causal=False)
    plain, shuffled = run(definition, params, tokens), run(definition, params, tokens[:, order])
    np.testing.assert_allclose(shuffled, plain[:, order], atol=1e-5)
    for position in ("learned", "sinusoidal", "rope", "alibi", "t5"):
        _, definition, params = make_model(position=position, causal=False)
        plain, shuffled = run(definition, params, tokens), run(definition, params, tokens[:, order])
        assert jnp.abs(shuffled - plain[:, order]).max() > 1e-2, position
    # The last token and the set of earlier tokens are the same. Only the mask can make the outputs differ.
    _, definition, params = make_model(position="none", causal=True)
    swapped = tokens.at[0, 1].set(4).at[0, 2].set(1)
    assert jnp.abs(run(definition, params, swapped)[0, -1] - run(definition, params, tokens)[0, -1]).max() > 1e-3


@pytest.mark.parametrize("lengths", [(12, 13), (5, 5000)])
def test_a_length_beyond_the_learned_table_is_an_error(lengths):
    table, length = lengths
    config, definition, params = make_model(position="learned", max_positions=max(12, table))
    with pytest.raises(UserError, match=rf"{config.max_positions} positions.*length of {length}"):
        jax.eval_shape(lambda p: run(definition, p, jnp.zeros((1, length), int)), params)


def test_dropout_needs_a_key_and_is_reproducible():
    _, definition, params = make_model(dropout=0.5)
    tokens = jnp.arange(10)[None]
    without = run(definition, params, tokens)
    np.testing.assert_array_equal(without, run(make_model()[1], params, tokens))
    first, again, other = (run(definition, params, tokens, dropout_key=jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - other).max() > 1e-2
    assert jnp.abs(first - without).max() > 1e-2


@pytest.mark.parametrize("rate", ["embedding_dropout", "sublayer_dropout", "attention_dropout"])
def test_each_dropout_rate_acts_alone(rate):
    _, definition, params = make_model(**{rate: 0.5})
    tokens = jnp.arange(10)[None]
    assert (
        jnp.abs(run(definition, params, tokens, dropout_key=jax.random.key(0)) - run(definition, params, tokens)).max()
        > 1e-3
    )


@pytest.mark.parametrize(
    "activation, exact",
    [("swiglu", lambda x: x / (1 + math.exp(-x))), ("geglu", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))],
)
def test_the_activated_gate_multiplies_the_other_half(activation, exact):
    config = loading.load("configs/default.py", {"model.activation": activation, "model.d_model": 8}).model
    assert config.d_ff == 24 and config.gated
    for gate in (-40.0, -0.5, 0.0, 0.5, 40.0):
        found = float(ACTIVATIONS[activation](jnp.float32(gate), jnp.float32(3.0)))
        assert found == pytest.approx(3 * exact(gate), abs=2e-3), (
            "the tanh form of gelu is within 5e-4 of the form by erf"
        )


@pytest.mark.slow
def test_the_prediction_heads_bias_is_added_to_the_logits():
    """Logits, hidden states · output table, losses and gradients agree with a bias that is added by hand."""
    _, definition, params = make_model(**BERT)
    tokens, weights = jnp.arange(12)[None], jnp.arange(12.0)[None]
    head = params["output"]

    def nll_sum(bias_V):
        model = nnx.merge(definition, params | {"output": head | {"bias": bias_V}})
        x_BLD, mesh = model.hidden(tokens), sharding.make_mesh(1, 1, 1)
        return losses.loss_sums(x_BLD, model.output_table, tokens, weights, losses.LossOptions(), mesh)[0]

    without = run(definition, params | {"output": head | {"bias": jnp.zeros(VOCAB)}}, tokens)
    logits = run(definition, params, tokens)
    np.testing.assert_allclose(logits - without, jnp.broadcast_to(head["bias"], logits.shape), atol=1e-5)
    expected, gradient = jax.value_and_grad(lambda bias_V: jnp.sum(losses.nll(without + bias_V, tokens) * weights))(
        head["bias"]
    )
    found, found_gradient = jax.value_and_grad(nll_sum)(head["bias"])
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(found_gradient, gradient, atol=1e-4)


def test_initial_embeddings_have_the_documented_std():
    for scaled, std in ((True, 64**-0.5), (False, 0.02)):
        config = loading.load("configs/default.py", {"model.scale_embeddings": scaled, "model.d_model": 64})
        model = MiniGPT(config.model, 1000, rngs=nnx.Rngs(0))
        assert float(jnp.std(model.embedding[...])) == pytest.approx(std, rel=0.02)


# A scan over stacked layers computes the unrolled model; parameters, streams and logits have their dtypes.


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

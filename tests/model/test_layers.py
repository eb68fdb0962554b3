"""Linear layers, norms, and the variants of attention, against formulas in float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mini_gpt.config import loading
from mini_gpt.insight.observing import layers
from mini_gpt.model import MiniGPT, build
from mini_gpt.model.attention.context import Mask
from mini_gpt.model.attention.differential import DifferentialAttention
from mini_gpt.model.gpt import Block
from mini_gpt.model.layers import Linear, make_norm
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.model.xla_workarounds import recompute_in_backward, unfused
from mini_gpt.runtime import sharding
from tests.conftest import slow
from tests.model.cores import attend_with_maps, make_core, row_context, visible_BLS

# Linear layers and norms: rounding to bfloat16, and sums in float32.


@pytest.mark.parametrize(
    "tokens, d_in, d_out", [(1, 65, 3), *slow((1, 1, 1), (3, 2, 16), (130, 65, 64), (64, 256, 128))]
)
@pytest.mark.parametrize("dtype, rounding", [(jnp.bfloat16, 2**-8), (jnp.float32, 1e-5)])
def test_a_linear_equals_exact_sums(tokens, d_in, d_out, dtype, rounding):
    """Operands are in `model.dtype` and sums are float32. In bfloat16, only activations are rounded."""
    config = loading.load("configs/default.py", {"model.dtype": jnp.dtype(dtype).name}).model
    linear = Linear(config, d_in, d_out, std=1.0, rngs=nnx.Rngs(0))
    definition, weights = nnx.split(linear)
    x, dy = (jax.random.normal(jax.random.key(i), (tokens, d), dtype) for i, d in enumerate((d_in, d_out)))

    @jax.jit
    def apply(weights, x):
        y, pull = jax.vjp(lambda weights, x: nnx.merge(definition, weights)(x), weights, x)
        return y, *pull(dy)

    y, d_weights, dx = apply(weights, x)
    exact_x, exact_dy = (np.asarray(array, np.float64) for array in (x, dy))
    kernel = np.asarray(weights["kernel"][...].astype(dtype), np.float64)
    assert y.dtype == dx.dtype == dtype and d_weights["kernel"][...].dtype == jnp.float32
    near = lambda found, wanted, tolerance: np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, atol=tolerance * np.abs(wanted).max()
    )
    near(y, exact_x @ kernel, rounding)
    near(dx, exact_dy @ kernel.T, rounding)
    near(d_weights["kernel"][...], exact_x.T @ exact_dy, 1e-5)
    near(d_weights["bias"][...], exact_dy.sum(0), 1e-5)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_devices_add_up_gradients_of_kernels_in_float32(platform, monkeypatch):
    """On four devices, the gradient equals that of one and the exact one; rounded to bfloat16, it is off by 1e-3."""
    config = loading.load("configs/default.py", {"model.dtype": "bfloat16"}).model
    definition, weights = nnx.split(Linear(config, 64, 16, use_bias=False, rngs=nnx.Rngs(0)))
    x, dy = (jax.random.normal(jax.random.key(seed), (256, d), jnp.bfloat16) for seed, d in enumerate((64, 16)))
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    loss = lambda weights, x, dy: jnp.sum((nnx.merge(definition, weights)(x) * dy).astype(jnp.float32))
    gradient = jax.jit(jax.grad(loss))
    exact = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    for count in (1, 4):
        mesh = sharding.make_mesh(count, 1, 1)
        replicated = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
        found = gradient(replicated, *jax.device_put((x, dy), sharding.batch_sharding(mesh)))
        np.testing.assert_allclose(found["kernel"][...], exact, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_norms_are_computed_in_float32(name):
    """Near 300, bfloat16 values are 2 apart, more than the standard deviation of these inputs (1)."""
    config = loading.load("configs/default.py", {"model.norm": name, "model.dtype": "bfloat16"}).model
    x = np.random.default_rng(0).normal(300, 1, (8, config.d_model)).astype(np.float32)
    exact = np.asarray(x, np.float64)
    if name == "layernorm":
        exact = exact - exact.mean(-1, keepdims=True)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(make_norm(config, rngs=nnx.Rngs(0))(x), wanted, atol=2e-4)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(
    "overrides", [{"use_bias": "True"}, *slow({}, {"norm_weights": "False"}, {"norm_epsilon": "0.01"})]
)
def test_the_gradients_of_norms_equal_differences(name, overrides):
    """Central differences in float64, of the formula in NumPy."""
    fields = {"model.norm": name, "model.d_model": "24"} | {f"model.{field}": v for field, v in overrides.items()}
    config = loading.load("configs/default.py", fields).model
    definition, weights = nnx.split(make_norm(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0).normal
    names = sorted(nnx.to_pure_dict(weights))
    nnx.replace_by_pure_dict(weights, {weight: jnp.asarray(draw(1, 1, 24), jnp.float32) for weight in names})
    x, dy = draw(2, 3, (2, 5, 24)), draw(0, 1, (2, 5, 24))
    y, pull = jax.vjp(lambda w, x: nnx.merge(definition, w)(x), weights, jnp.asarray(x, jnp.float32))
    d_weights, dx = pull(jnp.asarray(dy, jnp.float32))

    def exact(x, weights):
        centred = x - x.mean(-1, keepdims=True) if name == "layernorm" else x
        normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon)
        return normed * weights.get("scale", 1) + weights.get("bias", 0)

    given = {weight: np.asarray(weights[weight][...], np.float64) for weight in names} | {"x": x}
    value = lambda arrays: (dy * exact(arrays["x"], arrays)).sum()
    np.testing.assert_allclose(y, exact(x, given), atol=1e-5)
    for array, found in {"x": dx, **{weight: d_weights[weight][...] for weight in names}}.items():
        for index in np.ndindex(*given[array].shape):
            step = np.zeros_like(given[array])
            step[index] = 1e-4
            sides = [value(given | {array: given[array] + sign * step}) for sign in (1, -1)]
            np.testing.assert_allclose(
                found[index], (sides[0] - sides[1]) / 2e-4, atol=1e-4, err_msg=f"{array} {index}"
            )


@pytest.mark.parametrize("first", [0.5, np.inf, -np.inf, np.nan])
def test_an_unfused_function_returns_the_same_array(first):
    x = jnp.array([[first, 1.0], [2.0, 3.0]])
    np.testing.assert_array_equal(jax.jit(lambda x: unfused(jnp.cos, x))(x), jax.jit(jnp.cos)(x))


def test_rope_computes_each_cosine_once():
    """XLA on CPUs would fuse them into the rotation, and compute them again for each of the 4 heads."""
    length, heads, width = 32, 4, 16
    config = loading.load("configs/default.py", {"model.d_model": heads * width, "model.num_heads": heads}).model
    rope = Rope(config, rngs=nnx.Rngs(0))
    x_BLHK = jnp.ones((1, length, heads, width))
    text = jax.jit(rope.rotate).lower(x_BLHK, jnp.arange(length)[None]).compile().as_text()
    waves = [part for part in text.split("\n\n") if re.search(r" (co)?sine\(", part)]
    results = [re.search(r"ROOT .*? = f32\[([\d,]+)\]", part) for part in waves]
    assert len(waves) == 2
    assert all(math.prod(map(int, result[1].split(","))) == length * width // 2 for result in results)


def test_the_backward_pass_recomputes_the_activation():
    def loss_and_gradient(activate):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(activate(x) ** 2)))

    x = jax.random.normal(jax.random.key(0), (64, 128))
    saved, recomputed = map(loss_and_gradient, (jax.nn.gelu, recompute_in_backward(jax.nn.gelu)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), recomputed(x), saved(x))
    computed = [program.lower(x).compile().as_text().count(" tanh(") for program in (saved, recomputed)]
    assert computed == [1, 2]


# The variants of attention: their formulas at known values, and what they leave unchanged.

TOKENS = jnp.arange(10)[None]


def make(**fields):
    named = {f"model.variants.{name}": value for name, value in fields.items()}
    base = {"model.d_model": 16, "model.num_heads": 2, "model.num_layers": 1, "context_length": 64}
    return loading.load("configs/default.py", base | {"model.dtype": "float32"} | named).model


def attention(**fields):
    config = make(**fields)
    return Block(config, config.layer_kinds[0], rngs=nnx.Rngs(0)).attention


def maps(**fields):
    """Return the attention maps of a new model with one layer."""
    definition, parameters = nnx.split(MiniGPT(make(**fields), 11, rngs=nnx.Rngs(0)))
    return jax.jit(lambda parameters: layers(nnx.merge(definition, parameters), (TOKENS,))[0].attention)(parameters)


def test_without_variants_there_are_only_projections():
    assert set(build.abstract(make(), 11)[1]["blocks"][0]["attention"]) == {"query", "key", "value", "out"}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("documents", [False, True])
def test_visible_keys_are_those_of_the_mask(causal, window, documents):
    segments = jnp.array([[4] * 5 + [5] + [6] * 6, [0] * 11 + [1]]) if documents else None
    context = row_context(Mask(causal, window), 12, segments_BL=segments)
    np.testing.assert_array_equal(context.visible_counts(), context.visible().sum(-1))


def test_ssmax_multiplies_queries_by_the_logarithm_of_the_visible_keys():
    scale = attention(query_scale="ssmax").on_heads[-1]
    mean_log = sum(math.log(n) for n in range(1, 65)) / 64
    np.testing.assert_allclose(scale.factor[...], 1 / mean_log, rtol=1e-6)
    segments = jnp.array([[0] * 5 + [1] * 7])
    q_BLHK, _ = scale(jnp.ones((1, 12, 2, 8)), None, row_context(Mask(True, 4), 12, segments_BL=segments))
    visible = [1, 2, 3, 4, 4, 1, 2, 3, 4, 4, 4, 4]
    np.testing.assert_allclose(q_BLHK[0, :, 1, 3], np.log(visible) / mean_log, rtol=1e-5)


def test_ssmax_scales_the_logits_and_does_not_shift_them():
    """A known error is to subtract s · ln n from the logits, which a softmax does not see."""
    plain, scaled = (maps(**fields) for fields in ({}, {"query_scale": "ssmax"}))
    s = 64 / math.lgamma(65)
    factors_L = s * np.log(np.arange(1, 11))
    np.testing.assert_allclose(scaled.logits_BHLS, plain.logits_BHLS * factors_L[:, None], rtol=1e-4, atol=1e-7)
    assert np.abs(plain.logits_BHLS).max() > 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 40, 100])
def test_ssmax_starts_with_a_mean_factor_of_1(causal, window):
    fields = {"model.causal": causal, "model.attention_window": window, "context_length": 64}
    fields["train.objective"] = "next_token" if causal else "masked"
    start = loading.load("configs/default.py", fields).model.variants.ssmax_start
    mean = np.mean(np.log(row_context(Mask(causal, window), 64).visible().sum(-1)))
    assert start == pytest.approx(1 / mean if mean else 1)


def test_the_scale_of_llama4_grows_by_spans_of_positions():
    scale = attention(query_scale="llama4").on_heads[-1]
    positions_BL = jnp.array([[0, 8190, 8191, 16_383, 81_919]])
    q_BLHK, _ = scale(jnp.ones((1, 5, 2, 8)), None, row_context(Mask(True), 5, positions_BL))
    np.testing.assert_allclose(
        q_BLHK[0, :, 0, 0], [1 + 0.1 * math.log(1 + spans) for spans in (0, 0, 1, 2, 10)], rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["plain", "weighted"])
def test_normalised_queries_and_keys_have_a_root_mean_square_of_1(kind):
    norms = attention(qk_norm=kind).on_heads[0]
    q_BLHK, k_BLGK = (jax.random.normal(jax.random.key(seed), (2, 5, 2, 8)) * 7 for seed in range(2))
    for x, before in zip(norms(q_BLHK, k_BLGK, None), (q_BLHK, k_BLGK), strict=True):
        np.testing.assert_allclose(jnp.sqrt(jnp.mean(x**2, axis=-1)), 1, rtol=1e-5)
        np.testing.assert_allclose(x / before, jnp.broadcast_to((x / before)[..., :1], x.shape), rtol=1e-5)
    assert len(jax.tree.leaves(nnx.state(norms))) == (2 if kind == "weighted" else 0)


def attend(core, length=6):
    heads = [jax.random.normal(jax.random.key(seed), (1, length, 2, 8)) for seed in range(3)]
    return attend_with_maps(core, *heads, row_context(Mask(True), length))


def test_a_sink_takes_weight_and_gives_no_value():
    out, maps = attend(make_core(num_heads=2))
    logits = np.where(maps.visible_BLS[0], np.asarray(maps.logits_BHLS[0], np.float64), -np.inf)
    for kind, sink_H in (("zero", np.zeros(2)), ("trained", np.array([-3.0, 40.0]))):
        core = make_core(num_heads=2, **{"variants.sink": kind})
        if kind == "trained":
            core.sink[...] = jnp.array(sink_H, jnp.float32)
        with_sink, found = attend(core)
        total = np.exp(logits).sum(-1, keepdims=True)
        kept = total / (total + np.exp(sink_H)[:, None, None])
        np.testing.assert_allclose(found.weights_BHLS[0], np.exp(logits) / total * kept, rtol=1e-4, atol=1e-30)
        np.testing.assert_allclose(with_sink[0], out[0] * kept[..., 0].T[..., None], rtol=1e-4, atol=1e-30)


def test_a_soft_cap_bounds_the_logits_before_the_mask():
    _, plain = attend(make_core(5.0, num_heads=2))
    _, capped = attend(make_core(5.0, num_heads=2, **{"variants.soft_cap": 3.0}))
    np.testing.assert_allclose(capped.logits_BHLS, 3 * np.tanh(np.asarray(plain.logits_BHLS) / 3), rtol=1e-5)
    assert (np.asarray(capped.weights_BHLS)[~np.broadcast_to(visible_BLS(6), (1, 2, 6, 6))] == 0).all()
    assert np.abs(plain.logits_BHLS).max() > 10


@pytest.mark.parametrize("kind, width", [("head", 2), ("entry", 16)])
def test_a_gate_multiplies_the_outputs_of_the_heads(kind, width):
    gate = attention(gate=kind).gate
    x_BLD, out_BLHK = jax.random.normal(jax.random.key(0), (1, 3, 16)), jnp.ones((1, 3, 2, 8))
    assert gate.kernel.shape == (16, width)
    gate.kernel[...] *= 50
    found = np.asarray(gate(out_BLHK, x_BLD)).reshape(3, 2, 8)
    exact = 1 / (1 + np.exp(-np.asarray(x_BLD[0] @ gate.kernel[...], np.float64)))
    np.testing.assert_allclose(found, np.broadcast_to(exact.reshape(3, 2, -1), (3, 2, 8)), rtol=1e-4)
    assert found.std() > 0.1


def test_differential_attention_takes_a_share_that_starts_by_depth():
    """The difference of equal outputs is 1 - λ of them, which the norm scales to a root mean square of 1."""
    config = loading.load("configs/default.py", {"model.variants.differential": True}).model
    parts = [DifferentialAttention(config, kind, rngs=nnx.Rngs(0)).difference for kind in config.layer_kinds]
    np.testing.assert_allclose([part.start for part in parts], 0.8 - 0.6 * np.exp(-0.3 * np.arange(4)), rtol=1e-6)
    last = parts[3]
    assert 0.03 < np.std([each[...] for each in (last.q1, last.k1, last.q2, last.k2)]) < 0.3  # 0.1
    out = jax.random.normal(jax.random.key(0), (1, 5, 1, 64))
    found = last(jnp.repeat(out, 4, axis=2))
    assert found.shape == (1, 5, 4, 32)
    pair = found.reshape(1, 5, 2, 64)
    np.testing.assert_allclose(jnp.sqrt((pair**2).mean(-1)), 1 - last.start, rtol=1e-3)
    np.testing.assert_array_equal(pair[:, :, 0], pair[:, :, 1])


def test_the_heads_of_a_pair_share_their_values():
    part = attention(differential=True).difference
    values = part.values(jnp.arange(8.0).reshape(1, 1, 4, 2))[0, 0]
    np.testing.assert_array_equal(values, [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]])


def test_the_scale_of_latent_attention_counts_the_rotated_part():
    assert make().scale_width == 8 and make(latent=5).scale_width == 8 + 4


def test_latent_attention_of_the_whole_input_is_plain_attention():
    """Without the rotated part, and if the latent vector is the input, which has a root mean square of 1."""
    fields = {"model.position": "none", "model.d_model": 16, "model.num_heads": 2, "model.dtype": "float32"}
    fields |= {"model.use_bias": False, "model.scale_width": 8.0}
    configs = [loading.load("configs/default.py", fields | own).model for own in ({}, {"model.variants.latent": 16})]
    plain, latent = (Block(config, config.layer_kinds[0], rngs=nnx.Rngs(0)).attention for config in configs)
    query = plain.query.kernel[...].reshape(16, 2, 8)
    latent.query.kernel[...] = jnp.pad(query, ((0, 0), (0, 0), (4, 0))).reshape(16, 24)
    latent.latent.down.kernel[...] = jnp.pad(jnp.eye(16), ((0, 0), (4, 0)))
    latent.latent.key.kernel[...], latent.latent.value.kernel[...] = plain.key.kernel[...], plain.value.kernel[...]
    latent.out.kernel[...] = plain.out.kernel[...]
    x = jax.random.normal(jax.random.key(0), (2, 7, 16)) * 5
    x /= jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))
    context = row_context(Mask(True), 7)
    np.testing.assert_allclose(latent(x, context), plain(x, context), atol=1e-5)

"""Each attention implementation against the reference, memory, and the choice of an implementation."""

import functools
import itertools
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding, PartitionSpec

from mini_gpt.config import loading
from mini_gpt.generation.cache import KeyValues, TokenCache
from mini_gpt.model import MiniGPT
from mini_gpt.model.attention import blockwise, core, kernels, reference
from mini_gpt.model.attention.context import Context, Coordinates, Mask
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly
from tests.conftest import slow
from tests.model.cores import draw, make_core, random_core, row_context, visible_BLS


def gradients_and_outputs(attend, *inputs):
    """Return the gradients of a weighted sum of the outputs, and the outputs. inputs: q, k, v and others."""
    q, _, v = inputs[:3]
    factors = draw(*q.shape[:3], v.shape[3], seed=7)

    def total(*arguments):
        out = attend(*arguments)
        return jnp.sum(factors * out.astype(jnp.float32)), out

    return jax.jit(jax.grad(total, range(len(inputs)), has_aux=True))(*inputs)


def blockwise_and_reference(definition, row, *inputs):
    """Return the gradients and outputs of both implementations. row: the last arguments of `by`."""
    implementations = blockwise.attend, reference.attend
    return (gradients_and_outputs(by(attend, definition, *row), *inputs) for attend in implementations)


def by(attend, definition, mask, length, positions_BL=None, segments_BL=None):
    """Return a function of heads and parameters that attends with an implementation. See `random_core`."""

    def attend_to(q, k, v, weights, sums_BLH=None, of_queries_BLHR=None):
        core, shared = nnx.merge(definition, weights)
        context = row_context(mask, length, positions_BL, segments_BL, sums_BLH)._replace(shared=shared)
        return attend(core, q, k, v, context._replace(of_queries_BLHR=of_queries_BLHR))

    return attend_to


def documents_of(length):
    return jnp.cumsum(jax.random.bernoulli(jax.random.key(3), 0.03, (2, length)), axis=1)


def assert_close(found, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()))


CASES = {  # length, position, causal, window, segments, groups
    "causal": (150, "rope", True, None, False, 4),
    "t5, grouped, documents": (150, "t5", True, None, True, 2),
    "alibi, window": (150, "alibi", True, 70, False, 1),
    "bidirectional, t5, window": (150, "t5", False, 40, True, 4),
    "longer, t5": (300, "t5", True, None, True, 2),
    "long": (600, "none", True, None, True, 2),
    "kerple, window": (150, "kerple", True, 70, True, 2),
    "long, fire": (600, "fire", True, None, False, 2),
    "long, hard_alibi": (600, "hard_alibi", True, None, True, 4),
    "long, t5, window": (600, "t5", True, 300, False, 4),
    "very long, t5, window": (2100, "t5", True, 1100, True, 2),  # 2,048 tokens or more: large blocks
    "long, bidirectional, alibi": (600, "alibi", False, None, True, 4),
}
QUICK = ["t5, grouped, documents", "kerple, window"]


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_blockwise_and_its_gradients_equal_the_reference(case):
    length, name, causal, window, documents, groups = CASES[case]
    definition, weights = random_core(position=name, num_kv_heads=groups, causal=causal)
    q, k, v = draw(2, length, 4, 16, seed=0), draw(2, length, groups, 16, seed=1), draw(2, length, groups, 16, seed=2)
    positions_BL = jnp.arange(2 * length).reshape(2, length) * 2 % 1201  # different in each row, and not sorted
    row = Mask(causal, window), length, positions_BL, documents_of(length) if documents else None
    found, wanted = blockwise_and_reference(definition, row, q, k, v, weights)
    # FIRE's gradient of down_bias is 0: a sum of many terms that cancel up to rounding.
    assert_close(found, wanted, 1e-5 if name != "fire" else 3e-5)
    assert np.abs(jax.tree.leaves(wanted[0])[-1]).max() > 0.1


@pytest.mark.slow
def test_blockwise_bfloat16_is_as_accurate_as_the_reference():
    definition, weights = random_core(position="t5")
    q, k, v = (draw(2, 600, 4, 16, seed=seed, dtype=jnp.bfloat16) for seed in range(3))
    by_blocks, at_once = (by(each, definition, Mask(True), 600) for each in (blockwise.attend, reference.attend))
    exact = gradients_and_outputs(at_once, *(x.astype(jnp.float32) for x in (q, k, v)), weights)
    errors = []
    for attend in (by_blocks, at_once):
        found = gradients_and_outputs(attend, q, k, v, weights)
        assert found[0][0].dtype == jnp.bfloat16
        difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found, exact)
        errors.append(jax.tree.leaves(difference))
    assert all(ours < 1.5 * baseline + 1e-2 for ours, baseline in zip(*errors, strict=True))


@pytest.mark.parametrize("length, documents", [(150, True), *slow((600, False))])
@pytest.mark.parametrize("soft_cap, sink", [(2.0, False), (None, True), *slow((1.5, True))])
def test_blockwise_with_a_soft_cap_and_a_sink_equals_the_reference(length, documents, soft_cap, sink):
    fields = {"variants.soft_cap": soft_cap, "variants.sink": "trained" if sink else "none"}
    definition, weights = random_core(position="t5", num_kv_heads=2, **fields)
    q, k, v = 3 * draw(2, length, 4, 16, seed=0), draw(2, length, 2, 16, seed=1), draw(2, length, 2, 16, seed=2)
    row = Mask(True), length, None, documents_of(length) if documents else None
    found, wanted = blockwise_and_reference(definition, row, q, k, v, weights)
    assert_close(found, wanted, 2e-5)
    if sink:
        assert np.abs(wanted[0][3][0]["sink"][...]).max() > 1


@pytest.mark.parametrize("length, documents, window", [(150, True, None), *slow((600, False, 300), (600, True, None))])
def test_blockwise_with_a_decay_and_wide_keys_equals_the_reference(length, documents, window):
    """With soft cap and decay, as in fox, and keys that are wider than values, as in pope."""
    q, k, v = draw(2, length, 4, 24, seed=0), draw(2, length, 2, 24, seed=1), draw(2, length, 2, 16, seed=2)
    sums_BLH = jnp.cumsum(jax.nn.log_sigmoid(draw(2, length, 4, seed=3)), axis=1)
    definition, weights = random_core(position="fox", num_kv_heads=2, **{"variants.soft_cap": 2.0})
    row = Mask(True, window), length, None, documents_of(length) if documents else None
    found, wanted = blockwise_and_reference(definition, row, q, k, v, weights, sums_BLH)
    assert_close(found, wanted, 2e-5)
    assert np.abs(wanted[0][4]).max() > 0.1


@pytest.mark.parametrize("length, window", [(150, None), *slow((600, 300))])
def test_blockwise_with_relative_logits_equals_the_reference(length, window):
    q, k, v = draw(2, length, 4, 16, seed=0), draw(2, length, 2, 16, seed=1), draw(2, length, 2, 16, seed=2)
    fields = {"relative_logits.extent": 100, "variants.sink": "trained"}
    definition, weights = random_core(position="relative_logits", num_kv_heads=2, **fields)
    row = Mask(True, window), length, None, documents_of(length)
    of_queries_BLHR = draw(2, length, 4, 16, seed=3)
    found, wanted = blockwise_and_reference(definition, row, q, k, v, weights, None, of_queries_BLHR)
    assert_close(found, wanted, 2e-5)
    assert np.abs(wanted[0][5]).max() > 0.1 and np.abs(jax.tree.leaves(wanted[0][3])[0]).max() > 0.1


@pytest.mark.slow
def test_blocks_are_those_with_a_visible_pair():
    for causal in (True, False):
        for window in (None, 1, 2, 3, 4, 5, 8, 9, 10):
            seen = visible_BLS(24, causal, window)[0].reshape(6, 4, 6, 4).any(axis=(1, 3))
            blocks = blockwise._pairs(row_context(Mask(causal, window), 24), 6, 6, 4)
            assert list(blocks) == [tuple(pair) for pair in np.argwhere(seen)], (causal, window)


@pytest.mark.parametrize("name, lengths", [("alibi", (2048, 4096)), *slow(("t5", (2048, 4096, 8192, 16_384)))])
def test_blockwise_memory_is_linear_in_the_length(name, lengths):
    overrides = {"model.position": name, "model.num_layers": 1, "model.d_model": 32, "model.num_heads": 2}

    def temporary_bytes(attention, length):
        config = loading.load("configs/default.py", overrides | {"model.attention": attention}).model
        definition, weights = nnx.split(nnx.eval_shape(lambda: MiniGPT(config, 64, rngs=nnx.Rngs(0))))

        def loss(weights, tokens):
            return jnp.sum(nnx.merge(definition, weights).hidden(tokens) ** 2)

        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.jit(jax.grad(loss)).lower(weights, tokens).compile().memory_analysis().temp_size_in_bytes

    used = [temporary_bytes("blockwise", length) for length in lengths]
    assert all(after <= 2.2 * before for before, after in itertools.pairwise(used)), used
    assert used[0] <= temporary_bytes("reference", lengths[0])


splash = functools.partial(kernels.splash, interpret=True)
SPLASH = {"causal": (True, None, False, 2), "window": (True, 50, True, 2), "bidirectional": (False, 50, False, 1)}


@pytest.mark.parametrize("case", ["window", *slow("causal", "bidirectional")])
def test_interpreted_splash_equals_the_reference(case):
    causal, window, documents, groups = SPLASH[case]
    q, k, v = (draw(2, 256, heads, 64, seed=seed) for seed, heads in enumerate((2, groups, groups)))
    segments = jnp.stack([jnp.arange(256) // 100, jnp.arange(256) // 150]) if documents else None
    definition, weights = random_core(num_kv_heads=groups)
    row = Mask(causal, window), 256, None, segments
    found, wanted = (
        gradients_and_outputs(by(attend, definition, *row), q, k, v, weights) for attend in (splash, reference.attend)
    )
    assert_close(found, wanted, 1e-5)


@pytest.mark.slow
def test_splash_is_sharded_over_rows_and_heads():
    mesh = sharding.make_mesh(*loading.load("configs/tiny.py", {"mesh.fsdp": 2, "mesh.tensor": 2}).mesh.sizes)
    heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    arrays = [draw(4, 128, 2, 64, seed=seed) for seed in range(3)]
    segments = jnp.arange(4 * 128).reshape(4, 128) // 50
    row, made = row_context(Mask(True), 128, segments_BL=segments), make_core(0.2)
    out = jax.jit(lambda *arrays: splash(made, *arrays, row))(*(jax.device_put(x, heads) for x in arrays))
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 128, 1, 64)}
    np.testing.assert_allclose(out, reference.attend(made, *arrays, row), atol=1e-5)


@pytest.mark.parametrize("groups", [2, 4])
def test_elsewhere_than_on_cpus_the_reference_is_divided_over_rows_and_heads(groups, monkeypatch):
    mesh = sharding.make_mesh(*loading.load("configs/tiny.py", {"mesh.fsdp": 2, "mesh.tensor": 2}).mesh.sizes)
    heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    arrays = [draw(8, 8, count, 16, seed=seed) for seed, count in enumerate((4, groups, groups))]
    definition, weights = random_core(position="alibi", num_kv_heads=groups)
    attend = by(reference.attend, definition, Mask(True), 8)
    wanted = gradients_and_outputs(attend, *arrays, weights)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    total = lambda *arrays: jnp.sum(attend(*arrays, weights) ** 2)
    divided = jax.jit(jax.grad(total, (0, 1, 2))).lower(*(jax.device_put(x, heads) for x in arrays)).compile()
    assert "all-gather" not in divided.as_text() and "all-reduce" not in divided.as_text()
    assert_close(gradients_and_outputs(attend, *arrays, weights), wanted, 1e-6)


@pytest.mark.parametrize(
    "attend, platform, call",
    [(kernels.cudnn, "cuda", "__cudnn$fmhaSoftmaxBackward"), (kernels.splash, "tpu", "tpu_custom_call")],
)
def test_kernels_lower_for_their_platform(attend, platform, call, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    row = row_context(Mask(True, 100), 256)
    total = lambda q, k, v: jnp.sum(attend(make_core(0.1), q, k, v, row)).astype(jnp.float32)
    assert call in jax.jit(jax.grad(total)).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()


def test_cudnn_has_no_gradient_for_odd_lengths(monkeypatch):
    """Once JAX supports this gradient, `Core.choose` needs no case for odd lengths."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    row = row_context(Mask(True), 255)
    total = lambda q, k, v: jnp.sum(kernels.cudnn(make_core(0.1), q, k, v, row)).astype(jnp.float32)
    x = jax.ShapeDtypeStruct((2, 255, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="Unsupported sequence length"):
        jax.jit(jax.grad(total)).trace(x, x, x)


CHOICES = [  # platform, setting, length, dtype, extra, chosen
    ("cpu", "auto", 64, "float32", {}, "reference"),
    ("cpu", "auto", 1024, "float32", {"position": "alibi"}, "blockwise"),
    ("cpu", "auto", 1024, "float32", {"attention_dropout": 0.1}, "reference"),
    ("cpu", "blockwise", 64, "float32", {}, "blockwise"),
    ("cuda", "auto", 1024, "bfloat16", {}, "cudnn"),
    ("cuda", "auto", 1024, "float32", {}, "reference"),
    ("cuda", "auto", 8192, "bfloat16", {"position": "alibi"}, "blockwise"),
    ("cpu", "cudnn", 1024, "bfloat16", {}, "blockwise"),
    ("cuda", "splash", 1024, "bfloat16", {}, "reference"),
    ("cuda", "cudnn", 8192, "bfloat16", {"segments": True}, "blockwise"),
    ("cuda", "cudnn", 1024, "float32", {}, "reference"),
    ("cuda", "cudnn", 1024, "bfloat16", {"attention_window": 9, "causal": False}, "reference"),
    ("cuda", "auto", 255, "bfloat16", {}, "reference"),
    ("rocm", "auto", 1024, "bfloat16", {}, "reference"),
    ("rocm", "auto", 8192, "bfloat16", {}, "blockwise"),
    ("tpu", "auto", 1024, "bfloat16", {"segments": True, "attention_window": 9}, "splash"),
    ("tpu", "auto", 1000, "bfloat16", {}, "reference"),
    ("tpu", "splash", 1024, "bfloat16", {"attention_dropout": 0.1}, "reference"),
    ("tpu", "auto", 8192, "bfloat16", {"variants.soft_cap": 50.0}, "blockwise"),
    ("cuda", "auto", 1024, "bfloat16", {"variants.sink": "zero"}, "reference"),
    ("cuda", "auto", 8192, "bfloat16", {"position": "fox"}, "blockwise"),
    ("cuda", "auto", 8192, "bfloat16", {"values": 32}, "blockwise"),
    ("tpu", "auto", 8192, "bfloat16", {"variants.selective": True}, "reference"),
    ("cpu", "auto", 8192, "float32", {"variants.normaliser": "stick_breaking"}, "reference"),
    ("cpu", "blockwise", 64, "float32", {"position": "cope"}, "reference"),
]


@pytest.mark.parametrize("platform, setting, length, dtype, extra, chosen", CHOICES)
def test_the_choice_fits_device_and_inputs(platform, setting, length, dtype, extra, chosen, monkeypatch, caplog):
    monkeypatch.setattr(devices, "platform", lambda _: platform)
    core.log_once.cache_clear()
    fields = dict(extra)
    segments_BL = jnp.zeros((1, length)) if fields.pop("segments", False) else None
    q, v = (SimpleNamespace(shape=(1, length, 4, K), dtype=jnp.dtype(dtype)) for K in (64, fields.pop("values", 64)))
    made = make_core(attention=setting, **fields)
    row = row_context(Mask(fields.get("causal", True), fields.get("attention_window")), length, segments_BL=segments_BL)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert made.choose(q, q, v, row, jax.random.key(0)).func is core.implementation(chosen)
            assert made.choose(q, q, v, row, None).keywords == {}
    fused = {"cuda": "cudnn", "tpu": "splash"}.get(platform)
    best = (
        setting
        if setting != "auto"
        else fused or ("blockwise" if length >= {"cpu": 128}.get(platform, 4096) else "reference")
    )
    said = f"model.attention: {best} does not support "
    assert len(caplog.messages) == (best != chosen)
    for line in caplog.messages:
        assert line.startswith(said) and f"; using {chosen}" in line and ("memory" in line) == (chosen == "reference")


@pytest.mark.parametrize(
    "setting, platform, message",
    [
        ("cudnn", "cpu", "needs NVIDIA GPUs; the devices here are CPUs; must be reference, blockwise or auto"),
        ("cudnn", "rocm", "needs NVIDIA GPUs; the devices here are AMD GPUs; must be reference, blockwise or auto"),
        ("splash", "cuda", "needs TPUs; the devices here are NVIDIA GPUs; must be reference, blockwise, cudnn or auto"),
    ],
)
def test_training_with_a_kernel_of_other_devices_is_an_error(setting, platform, message, monkeypatch):
    monkeypatch.setattr(devices, "platform", lambda _: platform)
    config = loading.load("configs/tiny.py", {"model.attention": setting})
    with pytest.raises(UserError, match=rf"^model.attention: found '{setting}', which {message}$"):
        assembly.make_mesh(config)


def attend_to_cache(core, q, k, v, row):
    token = Coordinates.of(1)._replace(indices_BL=jnp.full((1, 1), k.shape[1] - 1))
    kept = KeyValues(reference.grouped(k), reference.grouped(v))
    context = Context(token, token, row.mask)
    return TokenCache(kept, row.keys, written=0).attend(core, q[:, :1], k[:, :1], v[:, :1], context)


SCALED = {"reference": reference.attend, "blockwise": blockwise.attend, "cached": attend_to_cache, "splash": splash}
WIDTHS = [48, *slow(8, 16, 24, 32, 40, 56, 64, 80, 96, 112, 128)]


@pytest.mark.parametrize("name", ["reference", "blockwise", "cached", *slow("splash")])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_scale_of_bfloat16_logits_is_exact(name, width):
    """The rounding of entries is noise, which does not change the slope of the logits over the exact ones."""
    S, K, scale = (128, 128, width**-0.5) if name == "splash" else (8, width, width**-0.5)
    q, k = (draw(8192 // S, S, 2, K, seed=seed, dtype=jnp.bfloat16) for seed in range(2))
    identity = jnp.broadcast_to(jnp.eye(S, K, dtype=jnp.bfloat16)[:, None], k.shape)  # the output: the weights
    attend = lambda q, k, v: SCALED[name](make_core(scale, num_heads=2), q, k, v, row_context(Mask(False), S))
    weights_BLHS = jax.jit(attend)(q, k, identity)[..., :S]
    found = np.log(np.asarray(weights_BLHS, np.float64))
    exact = scale * np.einsum("blhk,bshk->blhs", *(np.asarray(x, np.float64) for x in (q, k)))[:, : found.shape[1]]
    found, exact = (x - x.mean(-1, keepdims=True) for x in (found, exact))
    assert (found * exact).sum() / (exact**2).sum() == pytest.approx(1, abs=3e-4)


def test_blockwise_attention_keeps_nan():
    """A row with NaN is not one without a visible key, whose output is 0."""
    made = core.Core(loading.load("configs/default.py", {"model.dtype": "float32"}).model)
    q_BLHK, k_BSGK = (jax.random.normal(jax.random.key(seed), (1, 150, 4, 8)) for seed in (0, 1))
    tokens = Coordinates.of(150)
    context = Context(tokens, tokens, Mask(causal=True))
    spoiled_BLHK = q_BLHK.at[0, 70].set(jnp.nan)
    arrays = spoiled_BLHK, k_BSGK, k_BSGK
    expected, found = reference.attend(made, *arrays, context), blockwise.attend(made, *arrays, context)
    np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(expected))
    assert jnp.isnan(found[0, 70]).all() and not jnp.isnan(found[0, 69]).any()

"""Each attention implementation against the reference, memory, and the choice of an implementation."""

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
from mini_gpt.model.attention.inputs import Context, Heads, KeyValues, Mask, Scoring
from mini_gpt.model.inputs import Inputs

from mini_gpt.config import loading
from mini_gpt.model import MiniGPT, positions
from mini_gpt.model.attention import blockwise, cached, choice, kernels, reference
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import assembly
from tests.conftest import slow


def draw(*shape, seed, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def encoding(name, heads, groups, causal=True):
    overrides = {"model.position": name, "model.d_model": 16 * heads, "model.num_heads": heads, "model.causal": causal}
    overrides |= {"model.num_kv_heads": groups, "train.objective": "next_token" if causal else "masked"}
    position = positions.ENCODINGS[name](loading.load("configs/default.py", overrides).model, rngs=nnx.Rngs(0))
    definition, weights = nnx.split(position)
    return definition, jax.tree.map(lambda leaf: leaf + draw(*leaf.shape, seed=9), weights)


def gradients_and_outputs(attend, q, k, v, weights):
    """Return the gradients of a weighted sum of the outputs, and the outputs."""
    factors = draw(*q.shape, seed=7)

    def total(*arguments):
        out = attend(*arguments)
        return jnp.sum(factors * out.astype(jnp.float32)), out

    return jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))(q, k, v, weights)


def without_bias(mask):
    return Context(mask, positions.Position(None, rngs=None), jnp.zeros((1, 1), int))


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
    "long, bidirectional, alibi": (600, "alibi", False, None, True, 4),
}
QUICK = ["t5, grouped, documents", "long, bidirectional, alibi", "kerple, window"]


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_blockwise_and_its_gradients_equal_the_reference(case):
    length, name, causal, window, documents, groups = CASES[case]
    definition, weights = encoding(name, 4, groups, causal)
    q, k, v = draw(2, length, 4, 16, seed=0), draw(2, length, groups, 16, seed=1), draw(2, length, groups, 16, seed=2)
    segments = jnp.cumsum(jax.random.bernoulli(jax.random.key(3), 0.03, (2, length)), axis=1) if documents else None
    mask = Mask(causal, window, segments)
    positions_BL = jnp.arange(2 * length).reshape(2, length) * 2 % 1201  # different in each row, and not sorted

    def by_blocks(q, k, v, weights):
        return blockwise.attend(
            Heads(q, k, v), Context(mask, nnx.merge(definition, weights), positions_BL), Scoring(0.3)
        )

    def at_once(q, k, v, weights):
        bias = nnx.merge(definition, weights).bias(positions_BL, positions_BL)
        return reference.attend(Heads(q, k, v), mask.visible(length), bias_BHLS=bias, scoring=Scoring(0.3))[0]

    found, wanted = (gradients_and_outputs(attend, q, k, v, weights) for attend in (by_blocks, at_once))
    # FIRE's gradient of down_bias is 0: a sum of many terms that cancel up to rounding.
    assert_close(found, wanted, 1e-5 if name != "fire" else 3e-5)
    assert np.abs(jax.tree.leaves(wanted[0])[-1]).max() > 0.1


@pytest.mark.slow
def test_blockwise_bfloat16_is_as_accurate_as_the_reference():
    definition, weights = encoding("t5", 4, 4)
    q, k, v = (draw(2, 600, 4, 16, seed=seed, dtype=jnp.bfloat16) for seed in range(3))
    places = jnp.arange(600)[None]

    def by_blocks(q, k, v, weights):
        return blockwise.attend(
            Heads(q, k, v), Context(Mask(True), nnx.merge(definition, weights), places), Scoring(0.3)
        )

    def at_once(q, k, v, weights):
        bias = nnx.merge(definition, weights).bias(places, places)
        return reference.attend(Heads(q, k, v), Mask(True).visible(600), bias_BHLS=bias, scoring=Scoring(0.3))[0]

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
    definition, weights = encoding("t5", 4, 2)
    q, k, v = 3 * draw(2, length, 4, 16, seed=0), draw(2, length, 2, 16, seed=1), draw(2, length, 2, 16, seed=2)
    segments = jnp.cumsum(jax.random.bernoulli(jax.random.key(3), 0.03, (2, length)), axis=1) if documents else None
    mask, places = Mask(True, None, segments), jnp.arange(length)[None]
    sink_H = draw(4, seed=5)
    scoring_of = lambda sink_H: Scoring(0.3, soft_cap, sink_H if sink else None)

    def by_blocks(q, k, v, both):
        context = Context(mask, nnx.merge(definition, both[0]), places)
        return blockwise.attend(Heads(q, k, v), context, scoring_of(both[1]))

    def at_once(q, k, v, both):
        bias = nnx.merge(definition, both[0]).bias(places, places)
        return reference.attend(Heads(q, k, v), mask.visible(length), bias_BHLS=bias, scoring=scoring_of(both[1]))[0]

    found, wanted = (gradients_and_outputs(attend, q, k, v, (weights, sink_H)) for attend in (by_blocks, at_once))
    assert_close(found, wanted, 2e-5)
    if sink:
        assert np.abs(wanted[0][3][1]).max() > 1


def test_mask_blocks_are_those_with_a_visible_pair():
    for causal in (True, False):
        for window in (None, 1, 2, 3, 4, 5, 8, 9, 10):
            mask = Mask(causal, window)
            visible_LS = np.asarray(mask.visible(24)[0])
            seen = visible_LS.reshape(6, 4, 6, 4).any(axis=(1, 3))
            assert mask.blocks(6, 6, 4) == [tuple(pair) for pair in np.argwhere(seen)], (causal, window)


@pytest.mark.parametrize(
    "name, lengths",
    [("alibi", (1024, 2048)), *slow(("t5", (1024, 2048, 4096, 8192, 16_384)))],
)
def test_blockwise_memory_is_linear_in_the_length(name, lengths):
    overrides = {"model.position": name, "model.num_layers": 1, "model.d_model": 32, "model.num_heads": 2}

    def temporary_bytes(attention, length):
        config = loading.load("configs/default.py", overrides | {"model.attention": attention}).model
        definition, weights = nnx.split(nnx.eval_shape(lambda: MiniGPT(config, 64, rngs=nnx.Rngs(0))))

        def loss(weights, tokens):
            return jnp.sum(nnx.merge(definition, weights).forward(Inputs(tokens))[0] ** 2)

        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.jit(jax.grad(loss)).lower(weights, tokens).compile().memory_analysis().temp_size_in_bytes

    used = [temporary_bytes("blockwise", length) for length in lengths]
    assert all(after <= 2.2 * before for before, after in itertools.pairwise(used)), used
    assert used[0] <= temporary_bytes("reference", 1024)


SPLASH = {"causal": (True, None, False, 2), "window": (True, 50, True, 2), "bidirectional": (False, 50, False, 1)}


@pytest.mark.parametrize("case", ["window", *slow("causal", "bidirectional")])
def test_interpreted_splash_equals_the_reference(case):
    causal, window, documents, groups = SPLASH[case]
    q, k, v = (draw(2, 256, heads, 64, seed=seed) for seed, heads in enumerate((2, groups, groups)))
    segments = jnp.stack([jnp.arange(256) // 100, jnp.arange(256) // 150]) if documents else None
    mask = Mask(causal, window, segments)
    found = gradients_and_outputs(
        lambda q, k, v, _: kernels.splash(Heads(q, k, v), without_bias(mask), Scoring(0.2), interpret=True),
        *(q, k, v, 0.0),
    )
    wanted = gradients_and_outputs(
        lambda q, k, v, _: reference.attend(Heads(q, k, v), mask.visible(256), scoring=Scoring(0.2))[0], q, k, v, 0.0
    )
    assert_close(found, wanted, 1e-5)


@pytest.mark.slow
def test_splash_is_sharded_over_rows_and_heads():
    mesh = sharding.make_mesh(*loading.load("configs/tiny.py", {"mesh.fsdp": 2, "mesh.tensor": 2}).mesh.sizes)
    heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    arrays = [draw(4, 128, 2, 64, seed=seed) for seed in range(3)]
    segments = jnp.arange(4 * 128).reshape(4, 128) // 50
    context = without_bias(Mask(True, None, segments))
    attend = jax.jit(lambda *arrays: kernels.splash(Heads(*arrays), context, Scoring(0.2), interpret=True))
    out = attend(*(jax.device_put(x, heads) for x in arrays))
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 128, 1, 64)}
    wanted, _ = reference.attend(Heads(*arrays), Mask(True, None, segments).visible(128), scoring=Scoring(0.2))
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "attend, platform, call",
    [(kernels.cudnn, "cuda", "__cudnn$fmhaSoftmaxBackward"), (kernels.splash, "tpu", "tpu_custom_call")],
)
def test_kernels_lower_for_their_platform(attend, platform, call, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    total = lambda heads: jnp.sum(attend(heads, without_bias(Mask(True, 100)), Scoring(0.1))).astype(jnp.float32)
    assert call in jax.jit(jax.grad(total)).trace(Heads(x, x, x)).lower(lowering_platforms=(platform,)).as_text()


def test_cudnn_has_no_gradient_for_odd_lengths(monkeypatch):
    """Once JAX supports this gradient, `choice.choose` needs no case for odd lengths."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    total = lambda heads: jnp.sum(kernels.cudnn(heads, without_bias(Mask(True)), Scoring(0.1))).astype(jnp.float32)
    x = jax.ShapeDtypeStruct((2, 255, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="Unsupported sequence length"):
        jax.jit(jax.grad(total)).trace(Heads(x, x, x))


CHOICES = [  # platform, setting, length, dtype, extra, chosen
    ("cpu", "auto", 64, "float32", {}, "reference"),
    ("cpu", "auto", 1024, "float32", {"biased": True}, "blockwise"),
    ("cpu", "auto", 1024, "float32", {"dropout": True}, "reference"),
    ("cpu", "blockwise", 64, "float32", {}, "blockwise"),
    ("cuda", "auto", 1024, "bfloat16", {}, "cudnn"),
    ("cuda", "auto", 1024, "float32", {}, "reference"),
    ("cuda", "auto", 8192, "bfloat16", {"biased": True}, "blockwise"),
    ("cpu", "cudnn", 1024, "bfloat16", {}, "blockwise"),
    ("cuda", "splash", 1024, "bfloat16", {}, "reference"),
    ("cuda", "cudnn", 8192, "bfloat16", {"segments": True}, "blockwise"),
    ("cuda", "cudnn", 1024, "float32", {}, "reference"),
    ("cuda", "cudnn", 1024, "bfloat16", {"window": 9, "causal": False}, "reference"),
    ("cuda", "auto", 255, "bfloat16", {}, "reference"),
    ("rocm", "auto", 1024, "bfloat16", {}, "reference"),
    ("rocm", "auto", 8192, "bfloat16", {}, "blockwise"),
    ("tpu", "auto", 1024, "bfloat16", {"segments": True, "window": 9}, "splash"),
    ("tpu", "auto", 1000, "bfloat16", {}, "reference"),
    ("tpu", "splash", 1024, "bfloat16", {"dropout": True}, "reference"),
    ("tpu", "auto", 8192, "bfloat16", {"soft_cap": 50.0}, "blockwise"),
    ("cuda", "auto", 1024, "bfloat16", {"sink": jnp.zeros(4)}, "reference"),
    ("cuda", "auto", 8192, "bfloat16", {"decay": True}, "blockwise"),
    ("cuda", "auto", 8192, "bfloat16", {"values": 32}, "blockwise"),
    ("tpu", "auto", 8192, "bfloat16", {"selective": True}, "reference"),
    ("cpu", "auto", 8192, "float32", {"stick_breaking": True}, "reference"),
    ("cpu", "blockwise", 64, "float32", {"contextual_PK": jnp.zeros((3, 64))}, "reference"),
]


@pytest.mark.parametrize("platform, setting, length, dtype, extra, chosen", CHOICES)
def test_the_choice_fits_device_and_inputs(platform, setting, length, dtype, extra, chosen, monkeypatch, caplog):
    monkeypatch.setattr(devices, "platform", lambda _: platform)
    choice.log_once.cache_clear()
    extra = dict(extra)
    mask = Mask(
        extra.pop("causal", True), extra.pop("window", None), jnp.zeros((1, 1)) if extra.pop("segments", 0) else None
    )
    scoring = Scoring(1.0, extra.pop("soft_cap", None), extra.pop("sink", None))
    scoring = scoring._replace(**{name: extra.pop(name) for name in Scoring._fields if name in extra})
    q, v = (SimpleNamespace(shape=(1, length, 4, K), dtype=jnp.dtype(dtype)) for K in (64, extra.pop("values", 64)))
    heads = Heads(q, q, v, q if extra.pop("decay", False) else None)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert choice.choose(setting, heads, mask, scoring, **{"biased": False, "dropout": False} | extra) == chosen
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


def attend_to_cache(heads, mask, scale):
    past = cached.Past(KeyValues.of(heads), 0, None, mask.visible(heads.k_BSGK.shape[1])[:, 0])
    return cached.attend_to_cache(Heads(heads.q_BLHK[:, :1], None, None), past, None, Scoring(scale))


def attend_at_once(heads, mask, scale):
    return reference.attend(heads, mask.visible(heads.k_BSGK.shape[1]), scoring=Scoring(scale))[0]


SCALED = {
    "reference": attend_at_once,
    "blockwise": lambda heads, mask, scale: blockwise.attend(
        heads, without_bias(mask)._replace(positions_BL=jnp.zeros((1, heads.q_BLHK.shape[1]), int)), Scoring(scale)
    ),
    "cached": attend_to_cache,
    "splash": lambda heads, mask, scale: kernels.splash(heads, without_bias(mask), Scoring(scale), interpret=True),
}
WIDTHS = [48, *slow(8, 16, 24, 32, 40, 56, 64, 80, 96, 112, 128)]


@pytest.mark.parametrize("name", ["reference", "blockwise", "cached", *slow("splash")])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_scale_of_bfloat16_logits_is_exact(name, width):
    """The rounding of entries is noise, which does not change the slope of the logits over the exact ones."""
    S, K, scale = (128, 128, width**-0.5) if name == "splash" else (8, width, width**-0.5)
    q, k = (draw(8192 // S, S, 2, K, seed=seed, dtype=jnp.bfloat16) for seed in range(2))
    identity = jnp.broadcast_to(jnp.eye(S, K, dtype=jnp.bfloat16)[:, None], k.shape)  # the output: the weights
    weights_BLHS = jax.jit(lambda *heads: SCALED[name](Heads(*heads), Mask(False), scale))(q, k, identity)[..., :S]
    found = np.log(np.asarray(weights_BLHS, np.float64))
    exact = scale * np.einsum("blhk,bshk->blhs", *(np.asarray(x, np.float64) for x in (q, k)))[:, : found.shape[1]]
    found, exact = (x - x.mean(-1, keepdims=True) for x in (found, exact))
    assert (found * exact).sum() / (exact**2).sum() == pytest.approx(1, abs=3e-4)

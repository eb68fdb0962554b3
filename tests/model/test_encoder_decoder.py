"""The encoder-decoder against an independent float64 forward pass, and the masks of its three kinds of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.insight.observing import layers
from mini_gpt.model import build, parameters
from mini_gpt.model.attention import blockwise
from mini_gpt.runtime.errors import UserError
from tests import oracle
from tests.conftest import slow
from tests.model.test_gpt import VOCAB, make_model, run

L, S = 7, 10
QUICK = [
    {"position": "sinusoidal", "norm_placement": "post", "activation": "relu", "scale_embeddings": True},
    {"position": "t5", "norm": "rmsnorm", "use_bias": False, "num_kv_heads": 2, "encoder_layers": 3},
    {"position": "rope", "share_embeddings": False, "scan_layers": True, "tie_embeddings": False},
    {"position": "learned", "variants.qk_norm": "weighted", "variants.query_scale": "ssmax", "variants.gate": "entry"},
    {"position": ("rope", "t5"), "cross_positions": True},
]
SLOW = [
    {"output_norm": True, "output_soft_cap": 2.0, "variants.qk_norm": "all_heads", "num_kv_heads": 2, "scale_width": 3},
    {"output_norm": True, "norm_placement": "none", "variants.clip_qkv": 0.05, "scan_layers": True},
    {"position": ("alibi", "kerple"), "cross_positions": True, "num_kv_heads": 2},
    {"position": "t5", "cross_positions": True, "scan_layers": True, "share_embeddings": False},
    {"position": "t5", "activation": "geglu", "embedding_norm": True, "prediction_head": False, "norm_epsilon": 1e-3},
    {"position": "learned", "embedding_norm": True, "prediction_head": True, "scan_layers": True},
    {"position": "alibi", "attention_window": 3, "variants.sink": "trained", "variants.soft_cap": 2.0},
    {"position": ("fire", "rope", "kerple"), "num_layers": 3, "encoder_layers": 3, "d_model": 64},
    {"position": "none", "remat": "block", "variants.query_scale": "llama4"},
    {"position": "pope", "remat": "dots", "scan_layers": True},
    {"position": "hard_alibi"},
]


def make(**overrides):
    return make_model(**({"encoder_layers": 2} | overrides))


def batch(seed=0, rows=3):
    """Return tokens_BL and source_BS; the sources have different lengths, and -1 after their ends."""
    rng = np.random.default_rng(seed)
    source_BS = rng.integers(VOCAB, size=(rows, S))
    for row, length in enumerate((S, 6, 1)[:rows]):
        source_BS[row, length:] = -1
    return rng.integers(VOCAB, size=(rows, L)), source_BS


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [*QUICK, *slow(*SLOW)], ids=str)
def test_logits_equal_an_independent_forward(overrides):
    config, definition, params = make(**overrides)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parameters.with_layers(params, stacked=False))
    tokens_BL, source_BS = batch()
    logits_BLV = run(definition, params, jnp.asarray(tokens_BL), None, None, jnp.asarray(source_BS))
    for tokens, source, logits in zip(tokens_BL, source_BS, logits_BLV, strict=True):
        expected = oracle.forward(config, exact, tokens, source=source)
        np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=2e-4)


def maps(definition, params, tokens_BL, source_BS):
    inputs = jnp.asarray(tokens_BL), None, None, jnp.asarray(source_BS)
    return [(each.attention, each.cross_attention) for each in layers(nnx.merge(definition, params), inputs)]


@pytest.mark.slow
def test_masks_are_the_literal_matrices():
    _, definition, params = make(position="alibi", attention_window=4)
    tokens_BL, source_BS = batch()
    for attention, cross_attention in maps(definition, params, tokens_BL, source_BS):
        causal = np.array([[j <= i and i - j < 4 for j in range(L)] for i in range(L)])
        np.testing.assert_array_equal(attention.visible_BLS, np.broadcast_to(causal, (1, L, L)))
        everything = np.array([[[token >= 0 for token in source] for _ in range(L)] for source in source_BS])
        np.testing.assert_array_equal(cross_attention.visible_BLS, everything)
        np.testing.assert_allclose(cross_attention.weights_BHLS.sum(-1), 1, atol=1e-6)


def test_the_first_target_reads_the_last_source_token_and_no_later_target():
    _, definition, params = make(position="sinusoidal")
    tokens_BL, source_BS = batch(rows=1)
    logits = lambda tokens, source: np.asarray(run(definition, params, tokens, None, None, source))[0]
    before = logits(tokens_BL, source_BS)
    other = source_BS.copy()
    other[0, -1] = (other[0, -1] + 1) % VOCAB
    assert np.abs(logits(tokens_BL, other)[0] - before[0]).max() > 1e-3
    later = tokens_BL.copy()
    later[0, 1:] = (later[0, 1:] + 1) % VOCAB
    np.testing.assert_array_equal(logits(later, source_BS)[0], before[0])


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", *slow("t5", "learned")])
def test_padding_changes_nothing(position):
    """The value of padding changes no bit, and more padding changes rounding only."""
    _, definition, params = make(position=position)
    tokens_BL, source_BS = batch()
    before = run(definition, params, tokens_BL, None, None, source_BS)
    other_BS = np.where(source_BS < 0, -9, source_BS)
    np.testing.assert_array_equal(run(definition, params, tokens_BL, None, None, other_BS), before)
    alone = run(definition, params, tokens_BL[1:2], None, None, source_BS[1:2, :6])
    np.testing.assert_allclose(alone[0], before[1], atol=2e-6, rtol=2e-5)
    gradients = jax.grad(lambda p, source: jnp.sum(run(definition, p, tokens_BL, None, None, source) ** 2))
    jax.tree.map(np.testing.assert_array_equal, gradients(params, source_BS), gradients(params, other_BS))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "kerple"])
def test_positions_in_cross_attention_are_relative(position):
    """A shift of both texts changes nothing; a shift of one text changes the logits."""
    _, definition, params = make(position=position, cross_positions=True)
    tokens_BL, source_BS = map(jnp.asarray, batch())
    of_target, of_source = jnp.arange(L)[None].repeat(3, 0), jnp.arange(S)[None].repeat(3, 0)

    def logits(target_shift, source_shift):
        module = nnx.merge(definition, params)
        inputs = tokens_BL, of_target + target_shift, None, source_BS, of_source + source_shift
        return np.asarray(module.logits(module.hidden(*inputs)))

    np.testing.assert_allclose(logits(5, 5), logits(0, 0), atol=1e-4)
    assert np.abs(logits(5, 0) - logits(0, 0)).max() > 1e-3 and np.abs(logits(0, 5) - logits(0, 0)).max() > 1e-3


@pytest.mark.slow
def test_an_empty_source_adds_nothing_by_cross_attention():
    _, definition, params = make(use_bias=False)
    (_, cross_attention), _ = maps(definition, params, np.zeros((1, L), int), np.full((1, S), -1))
    assert not np.asarray(cross_attention.weights_BHLS).any()


@pytest.mark.parametrize(
    "fields", [{"position": "t5"}, *slow({"norm_placement": "post", "position": "kerple"})], ids=str
)
def test_gradients_equal_finite_differences(fields):
    config, definition, params = make(num_layers=1, encoder_layers=1, d_model=8, num_heads=2, **fields)
    tokens_BL, source_BS = batch()
    rng = np.random.default_rng(1)
    weights_BLV = rng.normal(size=(len(tokens_BL), L, VOCAB))
    loss = lambda p: jnp.sum(weights_BLV * run(definition, p, tokens_BL, None, None, source_BS))
    gradients = jax.grad(loss)(params)
    exact, direction = (jax.tree.map(to, params) for to in (np.float64, lambda leaf: rng.normal(size=leaf.shape)))

    def exact_loss(step):
        p = jax.tree.map(lambda leaf, change: leaf + step * change, exact, direction)
        rows = zip(weights_BLV, tokens_BL, source_BS, strict=True)
        return sum(np.vdot(weights, oracle.forward(config, p, row, source=source)) for weights, row, source in rows)

    expected = (exact_loss(1e-6) - exact_loss(-1e-6)) / 2e-6
    parts = map(np.vdot, jax.tree.leaves(direction), jax.tree.leaves(gradients))
    np.testing.assert_allclose(sum(parts), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("short", [{64: 4}, {}], ids=["unrolled", "scan"])
def test_blockwise_equals_the_reference(monkeypatch, short):
    monkeypatch.setattr(blockwise, "SHORT", short)
    monkeypatch.setattr(blockwise, "BLOCK", 5 if short else 4)
    fields = {"position": "t5", "num_kv_heads": 2, "variants.sink": "trained", "cross_positions": True}
    tokens_BL, source_BS = batch()
    weights_BLV = np.random.default_rng(0).normal(size=(len(tokens_BL), L, VOCAB))
    found = []
    for attention in ("reference", "blockwise"):
        _, definition, params = make(attention=attention, **fields)
        loss = lambda p, definition=definition: jnp.sum(
            weights_BLV * run(definition, p, tokens_BL, source_BS=source_BS)
        )
        found.append(jax.value_and_grad(loss)(params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), *found)


@pytest.mark.parametrize("fields", [{}, *slow({"scan_layers": True})], ids=str)
def test_dropout_and_remat_act_in_all_three_kinds_of_attention(fields):
    _, definition, params = make(dropout=0.3, **fields)
    tokens_BL, source_BS = batch()
    dropped = lambda key: run(definition, params, tokens_BL, None, None, source_BS, dropout_key=jax.random.key(key))
    np.testing.assert_array_equal(dropped(0), dropped(0))
    assert np.abs(dropped(0) - dropped(1)).max() > 1e-3


@pytest.mark.slow
def test_stacked_parameters_are_those_of_separate_layers():
    one = [build.split(build.make(make(scan_layers=scan)[0], VOCAB, rngs=nnx.Rngs(0)))[1] for scan in (False, True)]
    jax.tree.map(np.testing.assert_array_equal, parameters.with_layers(one[0], stacked=True), one[1])
    jax.tree.map(np.testing.assert_array_equal, parameters.with_layers(one[1], stacked=False), one[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": False}, "encoder_layers: found 2; must be 0 with model.causal=False"),
        ({"position": "fox"}, "position: found 'fox'; needs model.encoder_layers=0"),
        ({"variants.canon": True}, "variants.canon: found True; needs model.encoder_layers=0"),
        ({"random_positions": 99}, "random_positions: found 99; must be None with model.encoder_layers"),
        ({"position": ("rope", "none"), "encoder_layers": 3}, "encoder_layers: found 3; must be divisible by 2"),
        ({"encoder_layers": 0, "share_embeddings": False}, "share_embeddings: found False; needs an encoder"),
    ],
)
def test_what_has_no_encoder_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        make(**fields)


def test_old_configs_have_no_encoder():
    assert loading.load("configs/default.py").model.encoder_layers == 0


def test_a_source_is_needed_if_there_is_an_encoder():
    with pytest.raises(UserError, match=r"^source_BS: must be given for this model"):
        run(*make()[1:], batch()[0])

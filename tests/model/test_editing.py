"""Observed and edited forward passes."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache
from mini_gpt.insight import observing
from mini_gpt.insight.attention import attention_maps
from mini_gpt.model import editing, layers
from mini_gpt.model.editing import Edit, Edits
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.model import test_encoder_decoder, test_gpt
from tests.random_models import random_model

# Edits of a pass equal changes of weights, and replacing an activation by another text's carries its effect over.

N, B, L, H, K, D = 3, 2, 6, 2, 4, 8
TOKENIZER = CharacterTokenizer("abcdefghij")
SIZE = {"model__num_layers": N, "model__num_heads": H, "model__d_model": D, "model__d_ff": 16, "context_length": 8}
BIASED = {"model__use_bias": True, "model__qkv_bias": True, "model__attention_out_bias": True}
SITES = ("heads", "attention", "feed_forward", "stream")


def make(small, **fields):
    return random_model(small(**SIZE | BIASED | fields), TOKENIZER.token_bytes, noise=0.4)


def tokens(seed):
    return np.random.default_rng(seed).integers(0, 10, (B, L), np.int32)


@jax.jit
def activations(model, tokens_BL):
    """Return the activations of each site, with axis N, as a dict."""
    layers = observing.layers(model.edited(), model.with_layout(tokens_BL))
    fields = ("heads_BLHK", "attention_BLD", "feed_forward_BLD", "before_BLD")
    stacked = lambda field: jnp.stack([getattr(layer, field) for layer in layers])
    return {site: stacked(field) for site, field in zip(SITES, fields, strict=True)}


def logits(model, tokens_BL, edits):
    return dataclasses.replace(model, edits=edits).logits(tokens_BL)


def with_weights(model, layer, change):
    """Return the model after `change(block)`, a function that changes the parameters of a block in place."""
    parameters = jax.tree.map(np.array, model.parameters)
    change(parameters["blocks"][layer])
    return dataclasses.replace(model, parameters=parameters)


def at(layer, shape):
    chosen = np.zeros((N, *shape), bool)
    chosen[layer] = True
    return chosen


@pytest.mark.parametrize(
    "fields", [{}, *slow({"model__parallel_residual": "two_norms"}, {"model__norm_placement": "post"})]
)
def test_a_replaced_head_output_equals_a_bias_of_values(small, fields):
    model, value_K = make(small, **fields), np.linspace(-2, 1, K, dtype=np.float32)

    def constant_head(block):  # attention weights add up to 1, so that the head's output is the bias of its values
        block["attention"]["value"]["kernel"][:, K:] = 0
        block["attention"]["value"]["bias"][K:] = value_K

    chosen = np.zeros((N, 1, 1, H), bool)
    chosen[1, ..., 1] = True
    edits = Edits(heads=Edit.replace(chosen, np.broadcast_to(value_K, (N, 1, 1, H, K))))
    expected = with_weights(model, 1, constant_head).logits(tokens(0))
    np.testing.assert_allclose(logits(model, tokens(0), edits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("site, path", [("attention", ("attention", "out")), ("feed_forward", ("mlp", "down"))])
def test_a_replaced_sublayer_output_equals_its_bias(small, site, path):
    model, value_D = make(small), np.linspace(-1, 1, D, dtype=np.float32)

    def constant_output(block):
        block[path[0]][path[1]]["kernel"][:] = 0
        block[path[0]][path[1]]["bias"][:] = value_D

    edits = Edits(**{site: Edit.replace(at(2, (1, 1)), np.broadcast_to(value_D, (N, 1, 1, D)))})
    expected = with_weights(model, 2, constant_output).logits(tokens(0))
    np.testing.assert_allclose(logits(model, tokens(0), edits), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_replacing_by_own_activations_changes_nothing(small, scan):
    model = make(small, model__scan_layers=scan)
    own = activations(model, tokens(0))
    edits = Edits(*(Edit.replace(np.ones(own[site].shape[:-1], bool), own[site]) for site in SITES))
    np.testing.assert_allclose(logits(model, tokens(0), edits), model.logits(tokens(0)), rtol=1e-5, atol=1e-5)


def test_neutral_edits_change_nothing_and_new_ones_compile_nothing(small):
    model, ones_N = make(small), np.ones(N, np.float32)

    def scaled(factors_N):
        of_layer = lambda axes: Edit(factors_N.reshape(N, *[1] * axes), 0 * factors_N.reshape(N, *[1] * axes))
        return Edits(of_layer(4), of_layer(3), of_layer(3), of_layer(3), of_layer(4))

    found = logits(model, tokens(0), scaled(ones_N))
    np.testing.assert_array_equal(found, model.logits(tokens(0)))
    programs = LoadedModel.hidden._cache_size()
    assert np.abs(logits(model, tokens(0), scaled(0.5 * ones_N)) - found).max() > 1e-3
    assert LoadedModel.hidden._cache_size() == programs


@pytest.mark.parametrize("scan", [True, *slow(False)])
def test_a_stream_of_another_text_brings_its_logits(small, scan):
    model = make(small, model__scan_layers=scan)
    other = activations(model, tokens(1))["stream"]
    edits = Edits(stream=Edit.replace(at(1, (B, L)), other))
    np.testing.assert_allclose(logits(model, tokens(0), edits), model.logits(tokens(1)), rtol=1e-5, atol=1e-5)


def test_rows_and_places_are_edited_apart(small):
    model = make(small)
    own, other = (activations(model, tokens(seed)) for seed in (0, 1))
    chosen = np.zeros((N, B, L), bool)
    chosen[0, 1, 3] = True  # the second row, from the fourth token on
    edited = activations(
        dataclasses.replace(model, edits=Edits(stream=Edit.replace(chosen, other["stream"]))), tokens(0)
    )
    np.testing.assert_array_equal(edited["stream"][0, 1, 3], other["stream"][0, 1, 3])
    np.testing.assert_array_equal(edited["stream"][:, 0], own["stream"][:, 0])
    np.testing.assert_array_equal(edited["stream"][:, 1, :3], own["stream"][:, 1, :3])
    assert np.abs(edited["stream"][1:, 1, 3:] - own["stream"][1:, 1, 3:]).max(axis=-1).min() > 1e-4


def test_a_scaled_sublayer_equals_scaled_weights(small):
    model = make(small)

    def scaled(block):
        block["mlp"]["down"]["kernel"] *= 0.5
        block["mlp"]["down"]["bias"] *= 0.5

    factors = np.ones((N, 1, 1, 1), np.float32)
    factors[0] = 0.5
    expected = with_weights(model, 0, scaled).logits(tokens(0))
    found = logits(model, tokens(0), Edits(feed_forward=Edit(factors)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_edits_of_all_places_hold_with_a_kv_cache(small):
    model = make(small)
    values_NBLHK = np.random.default_rng(2).normal(size=(N, 1, 1, H, K)).astype(np.float32)
    chosen = np.random.default_rng(3).random((N, 1, 1, H)) < 0.5
    edited = dataclasses.replace(model, edits=Edits(heads=Edit.replace(chosen, values_NBLHK)))
    full_BLV = edited.logits(tokens(0))
    first_BV, kv = cache.prefill(edited, tokens(0)[:, :4], np.full(B, 4), L)
    np.testing.assert_allclose(first_BV, full_BLV[:, 3], rtol=1e-4, atol=1e-5)
    next_BV, _ = cache.decode(edited, tokens(0)[:, 4], kv)
    np.testing.assert_allclose(next_BV, full_BLV[:, 4], rtol=1e-4, atol=1e-5)


def test_an_edit_of_other_places_is_refused(small):
    model = make(small)
    edits = Edits(stream=Edit.replace(at(0, (1, L - 1)), np.zeros((N, 1, L - 1, D), np.float32)))
    with pytest.raises((ValueError, TypeError)):
        logits(model, tokens(0), edits)
    edits = Edits(stream=Edit.replace(at(0, (1, L)), np.zeros((N, 1, L, D), np.float32)))
    with pytest.raises(ValueError, match="can't be applied"):
        logits(model, tokens(0)[:, :1], edits)


def test_scaled_logits_equal_scaled_queries(small):
    model, factors_N = make(small, model__position="rope", model__num_kv_heads=1), np.array([1.0, 2.0, 0.5], np.float32)
    scaled = jax.tree.map(np.array, model.parameters)
    for layer, factor in enumerate(factors_N):
        for array in scaled["blocks"][layer]["attention"]["query"].values():
            array *= factor
    edits = Edits(logits=Edit(factors_N[:, None, None, None, None]))
    expected = dataclasses.replace(model, parameters=scaled).logits(tokens(0))
    np.testing.assert_allclose(logits(model, tokens(0), edits), expected, rtol=1e-4, atol=1e-4)


def test_knocked_out_keys_get_no_attention(small):
    model = make(small)
    hidden_NBHLS = np.zeros((N, 1, 1, L, L), np.float32)
    hidden_NBHLS[1, ..., 4, 2] = -1e30  # in layer 1, the fifth token does not see the third one (Geva et al. 2023)
    edits = Edits(logits=Edit(np.ones((N, 1, 1, 1, 1), np.float32), hidden_NBHLS))
    maps = attention_maps(dataclasses.replace(model, edits=edits), tokens(0))
    own = attention_maps(model, tokens(0))
    assert (maps[1].weights_BHLS[:, :, 4, 2] == 0).all() and (own[1].weights_BHLS[:, :, 4, 2] > 0).all()
    rest = own[1].weights_BHLS[:, :, 4] * (np.arange(L) != 2)
    np.testing.assert_allclose(maps[1].weights_BHLS[:, :, 4], rest / rest.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


def test_edits_of_logits_are_refused_with_a_kv_cache(small):
    edited = dataclasses.replace(make(small), edits=Edits(logits=Edit(np.full((N, 1, 1, 1, 1), 2.0, np.float32))))
    with pytest.raises(UserError, match="they need a full pass"):
        cache.prefill(edited, tokens(0)[:, :4], np.full(B, 4), L)


def test_an_edit_after_another_does_both(small):
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    first, second = Edit(np.float32([[2, 3, 0]]), np.float32([[1, 0, 4]])), Edit(np.float32([[0.5, 1, 2]]))
    for one, other in ((first, second), (second, first), (first, first), (second, second)):
        expected = editing.apply(other, editing.apply(one, jnp.asarray(x)))
        np.testing.assert_allclose(editing.apply(editing.compose(one, other), jnp.asarray(x)), expected, rtol=1e-6)
    assert editing.compose(None, first) is first


@pytest.mark.parametrize("count", [1, N - 1, N + 1])
def test_another_number_of_layers_is_refused(small, count):
    edits = Edits(stream=Edit(np.ones((count, 1, 1, 1), np.float32)))
    with pytest.raises(UserError, match=f"edits.stream: found '{count} layers'; needs {N}"):
        logits(make(small), tokens(0), edits)


def test_streams_of_encoder_and_decoder_are_edited(small):
    """Switching off all feed-forwards of an encoder-decoder equals zero weights."""
    fields = {"data__corpus": "task:reverse", "data__tokenizer": "characters", "model__encoder_layers": 2}
    model = make(small, **fields, model__num_layers=1, source_length=8)
    source_BS = tokens(1)
    off = Edits(feed_forward=Edit(np.zeros((3, 1, 1, 1), np.float32)))
    parameters = jax.tree.map(np.array, model.parameters)
    for stack in (parameters["blocks"], parameters["encoder"]["blocks"]):
        for block in stack.values():
            block["mlp"]["down"] = jax.tree.map(np.zeros_like, block["mlp"]["down"])
    expected = dataclasses.replace(model, parameters=parameters).logits(tokens(0), None, None, source_BS)
    found = dataclasses.replace(model, edits=off).logits(tokens(0), None, None, source_BS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# What is observed of a pass: it leaves the pass unchanged, it adds up, and it costs nothing elsewhere.

TOKENS = jnp.arange(12)[None]


@pytest.mark.parametrize(
    "fields", [{}, *slow({"num_kv_heads": 2, "scan_layers": True, "variants.gate": "head"})], ids=str
)
def test_an_observed_model_gives_the_same_hidden_states(fields):
    _, definition, params = test_gpt.make_model(**fields)
    found, decoder, encoder = observing.observed(nnx.merge(definition, params), lambda model: model.hidden(TOKENS))
    np.testing.assert_allclose(found, nnx.merge(definition, params).hidden(TOKENS), rtol=1e-5, atol=1e-5)
    assert len(decoder) == 2 and encoder == []
    for before, after in zip(decoder, [*decoder[1:], None], strict=True):
        added_BLD = before.attention_BLD + before.feed_forward_BLD
        np.testing.assert_allclose(before.before_BLD + added_BLD, before.after_BLD, rtol=1e-5, atol=1e-5)
        assert after is None or after.before_BLD is before.after_BLD
        assert before.heads_BLHK.shape == (1, 12, 4, 4) and before.units_BLF.shape == (1, 12, 64)


@pytest.mark.slow
def test_an_observed_encoder_decoder_gives_the_same_hidden_states():
    _, definition, params = test_encoder_decoder.make(encoder_layers=3)
    tokens_BL, source_BS = map(jnp.asarray, test_encoder_decoder.batch())
    run = lambda model: model.hidden(tokens_BL, None, None, source_BS)
    found, decoder, encoder = observing.observed(nnx.merge(definition, params), run)
    np.testing.assert_array_equal(found, run(nnx.merge(definition, params)))
    encoded = nnx.merge(definition, params).encoder.final_norm(encoder[-1].after_BLD)
    np.testing.assert_array_equal(encoded, nnx.merge(definition, params).encode(source_BS)[0])
    assert [layer.cross_attention is None for layer in decoder + encoder] == [False] * 2 + [True] * 3


def test_sites_that_are_not_observed_cost_nothing(monkeypatch):
    _, definition, params = test_gpt.make_model()
    program = lambda: jax.jit(lambda p: nnx.merge(definition, p)(TOKENS)).lower(params).as_text()
    before, plain = program(), layers.observe
    users = [module for name, module in sys.modules.items() if name.startswith("mini_gpt.model")]
    users = [module for module in users if getattr(module, "observe", None) is plain]
    assert len(users) > 3
    for module in users:
        monkeypatch.setattr(module, "observe", lambda *_: None)
    assert program() == before

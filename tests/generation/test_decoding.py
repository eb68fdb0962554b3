"""Generated tokens against the logits of the model, and the filters of sampling against their definitions."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import Layout
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import beam
from mini_gpt.generation import cache as caches
from mini_gpt.generation import decoding as generation
from mini_gpt.generation import prompts as prepared_prompts
from mini_gpt.generation.prompts import Prompts
from mini_gpt.generation.sampling import Sampling, draw, noise, scaled_and_filtered
from mini_gpt.insight import attention
from mini_gpt.objectives.text import TextObjective
from mini_gpt.runtime import devices, sharding
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.random_models import random_parameters

# Generated tokens against the model's logits: greedy, at a temperature, in rows and chunks.

CONTEXT, VOCAB = 8, 13
GREEDY = Sampling(temperature=0.0)


def make(separator_id=None, noise=1.0, **overrides):
    base = {"context_length": CONTEXT, "model.d_model": 16, "model.num_layers": 2, "model.dtype": "float32"}
    base |= {"model.tie_embeddings": False, "model.use_bias": False}  # so that the most likely token varies
    config = loading.load("configs/default.py", base | overrides)
    definition, parameters = random_parameters(config.model, VOCAB, noise=noise)
    return LoadedModel(parameters, definition, config, sharding.make_mesh(1, 1, 1), 1024, Layout(separator_id))


def generate(model, *prompts, length=12, **options):
    return generation.generate(model, prompts, length=length, **options).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"model.position": "rope"},
        *slow({"model.position": "learned", "model.max_positions": 40}),
        *slow({"model.position": "alibi", "model.attention_window": 4}),
    ],
)
def test_greedy_tokens_are_the_argmax_of_the_logits(fields, monkeypatch):
    monkeypatch.setattr(generation, "CHUNK", 5)
    model, prompts = make(**fields), ([3], [1, 2, 3, 4], list(range(12)))
    forward = jax.jit(model.merge())
    written = generate(model, *prompts, length=23, sampling=GREEDY)
    assert len({token for drawn in written for token in drawn}) > 3, "a constant output would test nothing"
    for prompt, drawn in zip(prompts, written, strict=True):
        assert len(drawn) == 23
        tokens = np.array([*prompt, *drawn])
        logits_LV = forward(jnp.array([[*tokens, *[0] * (40 - len(tokens))]]))[0]  # the causal mask hides the padding
        assert np.argmax(logits_LV, axis=-1)[len(prompt) - 1 : len(tokens) - 1].tolist() == drawn
    for prompt, drawn in zip(prompts, written, strict=True):
        assert generate(model, prompt, length=23, sampling=GREEDY) == [drawn]


def test_nothing_is_compiled_after_the_first_token(monkeypatch):
    model, compiled = make(), []
    parts = generation.stream(model, [[1, 2]], length=40)
    assert next(parts).shape == (1, 1)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        assert [part.shape[1] for part in parts] == [16, 16, 7]
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "compile" in name]


def test_prompts_of_similar_lengths_share_programs():
    model = make(**{"model.position": "alibi"})
    generate(model, [1] * 20, length=20)
    sizes = generation._start._cache_size(), generation._continue._cache_size()
    generate(model, [1] * 17, length=5)
    generate(model, [2] * 30, length=30)
    assert (generation._start._cache_size(), generation._continue._cache_size()) == sizes


@pytest.mark.parametrize("fields", [{}, *slow({"model.scan_layers": True}, {"model.remat": "block"})], ids=str)
def test_the_cache_is_updated_in_place(fields):
    model, sampling = make(**{"model.num_kv_heads": 2, "model.num_heads": 4} | fields), Sampling(top_k=4)
    tokens_BL, lengths_B = np.zeros((3, 16), np.int32), np.array([1, 16, 3], np.int32)
    state = generation._start(model, sampling, 64, Prompts(tokens_BL, lengths_B, None), 0)
    assert state.cache.layers[0].keys_XSK.shape == (6, 64, 4)
    compiled = generation._continue.lower(model, sampling, state, 16).compile().as_text()
    assert "f32[6,64,4]" in compiled
    assert not re.findall(r"f32\[6,64,4\]\S* copy\(", compiled)


@pytest.mark.slow
def test_dtype_auto_decodes_in_float32_on_cpus(monkeypatch):
    prompt, options = [3, 1], {"length": 12, "sampling": Sampling(temperature=0.7)}
    plain = generate(make(), prompt, **options)
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: True)
    model = make(**{"model.dtype": "auto"})
    assert model.merge().dtype == jnp.bfloat16
    calls, original = [], prepared_prompts._float32_definition
    monkeypatch.setattr(prepared_prompts, "_float32_definition", lambda *model: calls.append(model) or original(*model))
    assert generate(model, prompt, **options) == plain and calls
    assert prepared_prompts._float32_definition(model.config.model, VOCAB) == make().definition


@pytest.mark.parametrize("axes", slow({"tensor": 2, "fsdp": 2}, {"fsdp": 4}, {"data": 2, "tensor": 4}))
def test_sharded_parameters_generate_the_same_tokens(axes):
    model = make(**{"model.num_heads": 4, "model.d_model": 16})
    mesh = sharding.make_mesh(
        *loading.load("configs/default.py", {f"mesh.{name}": n for name, n in axes.items()}).mesh.sizes
    )
    sharded = jax.device_put(model.parameters, sharding.tree_shardings(model.parameters, mesh))
    assert max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(sharded)) == mesh.size > 1
    options = {"length": 9, "sampling": Sampling(temperature=0.5, top_k=5), "seed": 2}
    expected = generate(model, [1, 2, 3], [4], **options)
    assert generate(dataclasses.replace(model, parameters=sharded, mesh=mesh), [1, 2, 3], [4], **options) == expected


@pytest.mark.slow
def test_tokens_before_a_separator_do_not_matter():
    model = make(separator_id=12)
    kept = generate(model, [4, 5, 12, 6, 7], length=3, sampling=GREEDY)
    assert kept == generate(model, [9, 9, 12, 6, 7], length=3, sampling=GREEDY)
    assert kept[0][0] == int(jnp.argmax(model.merge()(jnp.array([[12, 6, 7]]))[0, -1]))


@pytest.mark.slow
def test_each_place_has_its_own_penalty():
    model = make()
    (repelled,) = generate(model, [1, 2], length=10, sampling=Sampling(temperature=0.0, repetition_penalty=1e6))
    logits_LV = np.array(model.merge()(jnp.array([[1, 2, *repelled]]))[0])
    for place, token in enumerate(repelled, start=2):
        logits_V, seen = logits_LV[place - 1], [*{1, 2, *repelled[: place - 2]}]
        logits_V[seen] *= np.where(logits_V[seen] > 0, 1e-6, 1e6)
        assert token == logits_V.argmax()
    assert [repelled] != generate(model, [1, 2], length=10, sampling=GREEDY)


def test_noise_depends_on_seed_row_and_place_only():
    written = generate(make(), [1], [2, 3, 4], length=37, sampling=Sampling(temperature=1e9), seed=5)
    for row, (begin, drawn) in enumerate(zip((1, 3), written, strict=True)):
        key = jax.random.fold_in(jax.random.key(5), row)
        draws = [jax.random.gumbel(jax.random.fold_in(key, begin + place), (VOCAB,)) for place in range(37)]
        assert drawn == [int(jnp.argmax(draw)) for draw in draws]


@pytest.mark.slow
def test_draws_follow_the_softmax_at_the_temperature():
    model = make()
    logits = np.asarray(model.merge()(jnp.array([[5, 2]]))[0, -1], np.float64) / 4
    expected = np.exp(logits) / np.exp(logits).sum()
    draws = generate(model, *[[5, 2]] * 2000, length=1, sampling=Sampling(temperature=4.0))
    found = np.bincount(np.ravel(draws), minlength=VOCAB) / len(draws)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / np.sqrt(len(draws)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"length": -1}, "length: found -1"),
        ({"length": 2.5}, r"length: found 2\.5; must be a whole number"),
        ({"length": "3"}, "length: found '3'; must be a whole number"),
        ({"seed": 0.5}, r"seed: found 0\.5; must be a whole number"),
        ({"prompts": [[1], []]}, "prompt: found no token"),
        ({"prompts": []}, "prompt: found no token"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        generation.generate(make(), **({"prompts": [[1]], "length": 3} | arguments))


def test_a_bidirectional_model_cannot_generate():
    with pytest.raises(UserError, match=r"model\.causal: found False"):
        generate(make(**{"model.causal": False, "train.objective": "masked"}), [1])


DYNAMIC = {"model.rope.scaling": "dynamic", "model.rope.factor": 4.0, "model.rope.original_context": 7}
SELECTIVE = {"model.variants.selective": True}
RECURRENT = {"model.block": "gru", "model.position": "none", "model.use_bias": True}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [DYNAMIC, RECURRENT, *slow(SELECTIVE)])
def test_a_full_pass_predicts_what_a_pass_of_its_own_length_does(fields):
    model, lengths = make(**fields), (7, 9)
    tokens_BT, module = np.random.default_rng(0).integers(VOCAB, size=(2, 12)), model.merge()
    text = caches.Text(jnp.asarray(tokens_BT), jnp.array(lengths))
    found_BV = jax.jit(caches.next_logits)(model, text)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(found_BV[row], module(tokens_BT[row : row + 1, :length])[0, -1], atol=1e-4)
    longer_V = module(tokens_BT[:1])[0, lengths[0] - 1]
    assert (np.abs(found_BV[0] - longer_V).max() > 0.01) == (fields is DYNAMIC), "all angles change with the length"


@pytest.mark.slow
def test_full_passes_draw_the_same_tokens_as_decoding_with_a_cache(monkeypatch):
    model, prompts = make(**{"model.position": "alibi"}), ([3], [1, 2, 3, 4, 5, 6, 7])
    options = {"length": 20, "sampling": Sampling(temperature=2.0, repetition_penalty=3.0), "seed": 4}
    cached = generation.generate(model, prompts, **options)
    search = beam.Options(end=0, length=6, beams=3)
    searched = beam.search(model, prompts, search)
    monkeypatch.setattr(caches, "without_cache", lambda config, length: True)
    for program in (generation._start, generation._continue, beam._search):
        program.clear_cache()
    parts = list(generation.stream(model, prompts, **options))
    assert [part.shape[1] for part in parts] == [1] * 20, "each token is shown as soon as it is written"
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), cached)
    for found, expected in zip(beam.search(model, prompts, search), searched, strict=True):
        assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]


@pytest.mark.parametrize("fields, wrong", [(SELECTIVE, True), ({}, False), *slow((DYNAMIC, True), (RECURRENT, True))])
def test_no_cache_is_used_where_it_would_be_wrong(fields, wrong):
    model = make(**fields)
    _, cache = jax.eval_shape(lambda tokens: caches.prefill(model, tokens, jnp.array([2]), 8), jnp.array([[1, 2]]))
    assert isinstance(cache, caches.Text) == wrong
    assert not (wrong and TextObjective(model.config, ByteTokenizer(), lambda _: np.arange(100)).has_sample)


@pytest.mark.parametrize("separator_id", [None, 0])
def test_a_text_past_the_learned_table_is_refused(separator_id):
    model = make(separator_id, **{"model.position": "learned"})
    tokens = jnp.tile(jnp.array([[0, 1, 2]]), (1, 3))  # nine tokens, in documents of three
    for read in (model.logits, lambda tokens: attention.attention_maps(model, np.asarray(tokens))):
        with pytest.raises(UserError, match="the learned table has 8 positions; found a length of 9"):
            read(tokens)


# Sampling filters, against the papers' definitions written as loops over probabilities.

LOGITS_BV = np.random.default_rng(0).normal(size=(6, 17)).astype(np.float32) * 2


def softmax(logits):
    exp = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return exp / exp.sum()


def allowed(logits, sampling):
    """Return the tokens of one row that the filters keep, by sorting and summing."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        probabilities, total, nucleus = softmax(logits[order]), 0.0, []
        for token, probability in zip(order, probabilities, strict=True):
            nucleus.append(token)
            total += probability
            if total >= sampling.top_p:
                break
        order = nucleus
    probabilities = softmax(logits[order])
    return {token for token, p in zip(order, probabilities, strict=True) if p >= sampling.min_p * probabilities[0]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 99},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.7},
        {"top_p": 0.9, "min_p": 0.2},
    ],
)
def test_filters_keep_the_tokens_of_their_definitions(fields):
    sampling = Sampling(**fields)
    left_BV = np.isfinite(np.asarray(scaled_and_filtered(jnp.array(LOGITS_BV), sampling)))
    for row, logits in enumerate(LOGITS_BV):
        assert set(np.flatnonzero(left_BV[row])) == allowed(logits, sampling)


TIES = [
    [1.0, 2.0, 2.0, 0.0, 2.0],
    [-0.0, 0.0, 0.0, -1.0, -0.0],
    [3.0] * 5,
    [-1.0, 0.0, -0.0, 0.0, -2.0],
    [1.9, np.nextafter(np.float32(1.9), np.float32(2)), 1.9, 0.0, 0.0],  # may become equal if divided
]


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.5}]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_of_equal_tokens_the_lower_ids_are_kept(fields, compiled):
    logits_BV, sampling = np.array(TIES, np.float32), Sampling(**fields)
    keep = jax.jit(scaled_and_filtered, static_argnums=1) if compiled else scaled_and_filtered
    left_BV = np.isfinite(np.asarray(keep(jnp.array(logits_BV), sampling)))
    for row, logits in enumerate(logits_BV):
        assert set(np.flatnonzero(left_BV[row])) == allowed(logits, sampling)


@pytest.mark.parametrize("temperature", [0.3, 1.3, 1.7, 7.0, 1e30])
@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}])
def test_one_kept_token_is_the_greedy_one(temperature, fields):
    near = np.float32(1) + np.arange(4)[:, None] * np.float32(0.25) + np.float32(2**-23) * np.array([0, 1, 2, 1, 2])
    logits_BV = jnp.array(np.concatenate([np.array(TIES, np.float32), near.astype(np.float32)]))
    noise_BV = noise(jax.random.split(jax.random.key(1), len(logits_BV)), jnp.arange(len(logits_BV)), 5)
    greedy_B = draw(logits_BV, None, noise_BV, Sampling(temperature=0))
    np.testing.assert_array_equal(draw(logits_BV, None, noise_BV, Sampling(temperature, **fields)), greedy_B)


def test_draws_keep_the_proportions_of_allowed_tokens():
    sampling, logits = Sampling(temperature=2.0, top_k=6, top_p=0.9), LOGITS_BV[0]
    keys_B = jax.random.split(jax.random.key(3), 4000)
    many_BV = jnp.broadcast_to(logits, (4000, 17))
    draws = np.asarray(draw(many_BV, None, noise(keys_B, jnp.arange(4000), 17), sampling))
    tokens = sorted(allowed(logits / 2, Sampling(top_k=6, top_p=0.9)))
    assert set(draws) == set(tokens)
    expected = softmax(logits[tokens] / 2)
    np.testing.assert_allclose(np.bincount(draws, minlength=17)[tokens] / 4000, expected, atol=0.03)


def test_repeated_tokens_are_less_likely():
    logits_BV = jnp.array([[2.0, -1.0, 1.5]])
    noise_BV, greedy = jnp.array([[0.0, 9.0, 0.0]]), {"temperature": 0.0}  # greedy decoding uses no noise
    for seen, expected in (([0, 0, 0], 0), ([1, 1, 0], 2), ([1, 1, 1], 0)):
        seen_BV = jnp.array([seen], bool)
        assert int(draw(logits_BV, seen_BV, noise_BV, Sampling(**greedy, repetition_penalty=1.5))[0]) == expected
        assert int(draw(logits_BV, None, noise_BV, Sampling(**greedy))[0]) == 0
    below_BV = jnp.array([[-2.0, -1.5]])  # the penalty multiplies a logit below 0
    seen_BV = jnp.array([[False, True]])
    assert int(draw(below_BV, seen_BV, noise_BV[:, :2], Sampling(**greedy, repetition_penalty=1.5))[0]) == 0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": -1.0}, r"temperature: found -1\.0; must be 0, or at least 1e-06, and finite"),
        ({"temperature": 1e-40}, "temperature: found 1e-40"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"temperature": "1"}, "temperature: found '1'; must be a number"),
        ({"temperature": None}, "temperature: found None"),
        ({"top_k": -2}, "top_k: found -2; must be at least 0"),
        ({"top_k": 2.5}, r"top_k: found 2\.5; must be a whole number"),
        ({"top_k": True}, "top_k: found True; must be a whole number"),
        ({"top_p": True}, "top_p: found True; must be a number"),
        ({"repetition_penalty": [1.1]}, "repetition_penalty: found"),
        ({"top_p": 0.0}, r"top_p: found 0\.0; must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p: found"),
        ({"min_p": -0.1}, r"min_p: found -0\.1; must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty: found 0\.0; must be from 1e-06 to 1e\+06"),
    ],
)
def test_wrong_types_and_ranges_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Sampling(**fields)

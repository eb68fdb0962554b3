"""Sampling filters, against the papers' definitions written as loops over probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.generation.sampling import Sampling, draw, noise, scaled_and_filtered
from mini_gpt.runtime.errors import UserError

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

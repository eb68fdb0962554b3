"""Sampling filters, against the papers' definitions written as loops over probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.generation.sampling import Sampling, draw, filter_logits, noise
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
    left_BV = np.isfinite(np.asarray(filter_logits(jnp.array(LOGITS_BV), sampling)))
    for row, logits in enumerate(LOGITS_BV):
        assert set(np.flatnonzero(left_BV[row])) == allowed(logits, sampling)


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
        ({"top_k": -2}, "top_k: found -2; must be at least 0"),
        ({"top_p": 0.0}, r"top_p: found 0\.0; must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p: found"),
        ({"min_p": -0.1}, r"min_p: found -0\.1; must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty: found 0\.0; must be from 1e-06 to 1e\+06"),
    ],
)
def test_values_out_of_range_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Sampling(**fields)

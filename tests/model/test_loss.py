"""C5: identities of the losses, in float64 by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.model import loss as losses


@pytest.fixture
def logits_and_targets():
    return 3 * jax.random.normal(jax.random.key(0), (2, 5, 11)), jnp.arange(10).reshape(2, 5)


def log_probabilities(logits):
    exact = np.asarray(logits, np.float64)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def test_nll_is_the_log_probability_of_the_target(logits_and_targets):
    logits, targets = logits_and_targets
    exact = -np.take_along_axis(log_probabilities(logits), np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(losses.nll(logits, targets), exact, rtol=1e-5)
    assert losses.nll(logits.astype(jnp.bfloat16), targets).dtype == jnp.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_C5_smoothing_is_cross_entropy_against_the_mixture(logits_and_targets, smoothing):
    logits, targets = logits_and_targets
    mixture = (1 - smoothing) * np.eye(11)[np.asarray(targets)] + smoothing / 11
    exact = -(mixture * log_probabilities(logits)).sum(-1)
    np.testing.assert_allclose(losses.smoothed_cross_entropy(logits, targets, smoothing), exact, rtol=1e-5)


def test_C5_smoothing_is_least_at_the_mixture_itself():
    targets = jnp.array([[2]])
    mixture = 0.9 * jnp.eye(5)[2] + 0.1 / 5
    gradient = jax.grad(lambda x: losses.smoothed_cross_entropy(x, targets, 0.1).sum())(jnp.log(mixture)[None, None])
    np.testing.assert_allclose(gradient, 0, atol=1e-6)

"""Text drawn token by token is what the model's own logits say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt import config as configs
from mini_gpt import generation
from mini_gpt.errors import UserError
from mini_gpt.model import MiniGPT, parameters
from tests import oracle

CONTEXT, VOCAB = 8, 13


def make(**overrides):
    base = {"context_length": CONTEXT, "model.d_model": 16, "model.num_layers": 2, "model.dtype": "float32"}
    base |= {"model.tie_embeddings": False, "model.use_bias": False}  # so that no token is likeliest everywhere
    config = configs.load("configs/default.py", base | overrides)
    definition, drawn = parameters.split(MiniGPT(config.model, VOCAB, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(drawn))))
    return definition, jax.tree.map(lambda leaf: leaf + 0.7 * jax.random.normal(next(keys), leaf.shape), drawn)


def generate(model, prompt, length=12, **kwargs):
    return generation.generate(*model, prompt, length=length, context_length=CONTEXT, **kwargs).tolist()


@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
def test_at_temperature_0_each_token_is_the_likeliest_after_the_last_context(position):
    model = make(**{"model.position": position})
    forward = jax.jit(parameters.merge(*model))
    for prompt in ([3], [1, 2, 3, 4], list(range(12))):
        tokens = list(prompt)
        drawn = generate(model, prompt, length=20, temperature=0.0)
        assert len(prompt) == 1 or len(set(drawn)) > 2, "a model that says one thing alone shows nothing"
        for token in drawn:
            seen = tokens[-CONTEXT:]  # what is to the right of it can't matter: the model is causal
            logits = forward(jnp.array([seen + [0] * (CONTEXT - len(seen))]))[0, len(seen) - 1]
            assert token == int(jnp.argmax(logits))
            tokens.append(token)


def test_isolated_documents_are_written_as_they_were_trained():
    model = make()
    tokens = [4, 5, 12, 6, 7]  # 12 is the separator: what is before it must not matter
    kept = generate(model, tokens, temperature=0.0, length=3, isolate_at=12)
    assert kept == generate(model, [9, 9, 12, 6, 7], temperature=0.0, length=3, isolate_at=12)
    alone = parameters.merge(*model)(jnp.array([[12, 6, 7]]))[0, -1]
    assert kept[0] == int(jnp.argmax(alone))


def test_seeds_reproduce_and_differ():
    model = make()
    assert generate(model, [1], seed=1) == generate(model, [1], seed=1) != generate(model, [1], seed=2)


def test_draws_follow_the_softmax_at_the_temperature_and_only_among_the_top_k():
    model, temperature = make(), 4.0
    logits = np.asarray(parameters.merge(*model)(jnp.array([[5, 2]]))[0, -1], np.float64) / temperature
    top = np.argsort(logits)[-3:]
    expected = np.zeros(VOCAB)
    expected[top] = np.exp(logits[top]) / np.exp(logits[top]).sum()
    assert abs(expected.max() - oracle.softmax(temperature * logits[top]).max()) > 0.2, "1 would not do as well"
    draws = [generate(model, [5, 2], length=1, temperature=temperature, top_k=3, seed=s)[0] for s in range(400)]
    found = np.bincount(draws, minlength=VOCAB) / len(draws)
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / np.sqrt(len(draws)))
    assert set(draws) <= set(top.tolist())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -1.0}, r"temperature: found -1\.0"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"top_k": -2}, "top_k: found -2"),
        ({"length": -1}, "length: found -1"),
        ({"prompt": []}, "prompt: found no token"),
    ],
)
def test_values_out_of_range_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        generate(make(), **({"prompt": [1]} | arguments))


def test_a_bidirectional_model_does_not_write():
    with pytest.raises(UserError, match=r"model\.causal: found False"):
        generate(make(**{"model.causal": False, "train.objective": "masked"}), [1])

"""A split's loss, against the model's own logits taken token by token."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt import losses, sharding
from mini_gpt.errors import UserError
from mini_gpt.evaluation import perplexity
from mini_gpt.model import MiniGPT, parameters

TOKEN_BYTES = np.array([1] * 256 + [0])


@pytest.fixture
def model(small):
    def make(**overrides):
        config = small(**overrides)
        definition, drawn = parameters.split(MiniGPT(config.model, 257, rngs=nnx.Rngs(0)))
        return (
            config,
            definition,
            jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(1), x.shape), drawn),
        )

    return make


def make_tokens(count):
    tokens = np.random.default_rng(0).integers(256, size=count)
    tokens[5::17] = 256
    return tokens


@pytest.mark.parametrize("devices", [1, 4])
def test_blocks_of_the_context_length_each_token_once(model, devices):
    config, definition, drawn = model(mesh__data=devices)
    tokens, mesh = make_tokens(300), sharding.make_mesh(config.mesh)
    score = perplexity.score_split(definition, drawn, config, tokens, TOKEN_BYTES, mesh)
    forward, total = jax.jit(parameters.merge(definition, drawn)), 0.0
    for start in range(0, 299, 32):
        block = tokens[start : start + 33]
        padded = jnp.array(np.pad(block, (0, 33 - len(block))))[None]
        total += float(losses.nll(forward(padded[:, :-1]), padded[:, 1:])[0, : len(block) - 1].sum())
    assert score.nll_sum == pytest.approx(total, rel=1e-5)
    assert (score.tokens, score.bytes) == (299, int((tokens[1:] != 256).sum()))


def test_isolated_documents_are_scored_as_they_were_trained(model):
    config, definition, drawn = model(data__isolate_documents=True)
    tokens, mesh = make_tokens(33), sharding.make_mesh(config.mesh)
    score = perplexity.score_split(definition, drawn, config, tokens, TOKEN_BYTES, mesh)
    opens = [0, *np.flatnonzero(tokens[:-1] == 256).tolist(), 32]
    forward, total = parameters.merge(definition, drawn), 0.0
    for start, end in itertools.pairwise(opens):  # each document alone, from its separator on
        logits = forward(jnp.array(tokens[start:end])[None])
        total += float(losses.nll(logits, jnp.array(tokens[start + 1 : end + 1])[None]).sum())
    assert score.nll_sum == pytest.approx(total, rel=1e-5)
    joined = perplexity.score_split(definition, drawn, model()[0], tokens, TOKEN_BYTES, mesh)
    assert joined.nll_sum != pytest.approx(total, rel=1e-3)


def test_what_can_not_be_scored_is_said(model):
    config, definition, drawn = model(model__position="learned")
    mesh = sharding.make_mesh(config.mesh)
    with pytest.raises(UserError, match="the split has 1 tokens; at least 2 are needed"):
        perplexity.score_split(definition, drawn, config, make_tokens(1), TOKEN_BYTES, mesh)
    masked, _, _ = model(train__objective="masked", model__causal=False)
    with pytest.raises(UserError, match="the split has 32 tokens; at least 33 are needed"):
        perplexity.score_split(definition, drawn, masked, make_tokens(32), TOKEN_BYTES, mesh)

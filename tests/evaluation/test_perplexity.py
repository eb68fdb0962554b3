"""A split's loss, against the model's own logits taken token by token."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.data import batches
from mini_gpt.evaluation import perplexity
from mini_gpt.model import MiniGPT, parameters
from mini_gpt.model import loss as losses
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError

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


def model_of(config, vocab_size):
    definition, drawn = parameters.split(MiniGPT(config.model, vocab_size, rngs=nnx.Rngs(0)))
    return config, definition, jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(1), x.shape), drawn)


def make_tokens(count):
    tokens = np.random.default_rng(0).integers(256, size=count)
    tokens[5::17] = 256
    return tokens


@pytest.mark.parametrize("devices", [1, 4])
def test_blocks_of_the_context_length_each_token_once(model, devices):
    config, definition, drawn = model(mesh__data=devices)
    tokens, mesh = make_tokens(300), sharding.make_mesh(*config.mesh.sizes)
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
    tokens, mesh = make_tokens(33), sharding.make_mesh(*config.mesh.sizes)
    score = perplexity.score_split(definition, drawn, config, tokens, TOKEN_BYTES, mesh)
    opens = [0, *np.flatnonzero(tokens[:-1] == 256).tolist(), 32]
    forward, total = jax.jit(parameters.merge(definition, drawn)), 0.0
    for start, end in itertools.pairwise(opens):  # each document alone, from its separator on
        logits = forward(jnp.array(tokens[start:end])[None])
        total += float(losses.nll(logits, jnp.array(tokens[start + 1 : end + 1])[None]).sum())
    assert score.nll_sum == pytest.approx(total, rel=1e-5)
    joined = perplexity.score_split(definition, drawn, model()[0], tokens, TOKEN_BYTES, mesh)
    assert joined.nll_sum != pytest.approx(total, rel=1e-3)


@pytest.mark.slow
def test_masked_documents_are_kept_apart_by_the_text_under_the_masks(model):
    overrides = {"train__objective": "masked", "model__causal": False, "train__mask_rate": 0.5}
    config, definition, drawn = model(data__isolate_documents=True, **overrides)
    tokens, mesh = make_tokens(32), sharding.make_mesh(*config.mesh.sizes)
    tokens[::5] = 256
    embedding = jnp.concatenate([drawn["embedding"], drawn["embedding"][:1] + 1])  # one row more, for the mask
    _, definition, _ = model_of(config, 258)
    drawn = drawn | {"embedding": embedding}
    score = perplexity.score_split(definition, drawn, config, tokens, TOKEN_BYTES, mesh)
    ((rows, batch),) = batches.masked_blocks(tokens, config, vocab_size=257, batch_size=1)
    assert (batch["inputs"][0, tokens == 256] != 256).any(), "some separators are masked"
    opens = [*np.flatnonzero(tokens == 256).tolist(), 32]
    forward, total = jax.jit(parameters.merge(definition, drawn)), 0.0
    for start, end in itertools.pairwise(opens):
        nll = losses.nll(forward(jnp.array(batch["inputs"][:, start:end])), jnp.array(batch["targets"][:, start:end]))
        total += float((nll * batch["weights"][:, start:end]).sum())
    assert rows == 1 and score.tokens == batch["weights"].sum()
    assert score.nll_sum == pytest.approx(total, rel=1e-5)


def test_evaluation_holds_no_more_sequences_at_a_time_than_training(model, monkeypatch):
    config, definition, drawn = model(train__batch_size=8, train__accumulation_steps=4)
    shapes, nll = set(), perplexity._nll

    def watched(*args):
        shapes.add(args[-1].shape)
        return nll(*args)

    monkeypatch.setattr(perplexity, "_nll", watched)
    mesh, seen = sharding.make_mesh(*config.mesh.sizes), []
    perplexity.score_split(definition, drawn, config, make_tokens(300), TOKEN_BYTES, mesh)
    assert shapes == {(2, 32)}
    shapes.clear()
    longer, _, _ = model(train__batch_size=8, train__accumulation_steps=4, context_length=64)
    fields = {"batch_tokens": 130, "advance": seen.append}
    perplexity.score_split(definition, drawn, longer, make_tokens(300), TOKEN_BYTES, mesh, **fields)
    assert shapes == {(2, 64)} and sum(seen) == 6 * 64, "300 tokens have five windows, in three batches of two"


def test_what_can_not_be_scored_is_said(model):
    config, _, _ = model(model__position="learned")
    with pytest.raises(UserError, match="the split has 1 tokens; at least 2 are needed"):
        perplexity.check_scorable(config, 1)
    perplexity.check_scorable(config, 2)
    masked, _, _ = model(train__objective="masked", model__causal=False)
    with pytest.raises(UserError, match="the split has 31 tokens; at least 32 are needed"):
        perplexity.check_scorable(masked, 31)

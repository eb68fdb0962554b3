"""Each function that takes token ids from a caller refuses ids outside the vocabulary, in one line."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import Layout
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.perplexity import make_nll_fn
from mini_gpt.generation import beam, decoding, filling
from mini_gpt.insight import attention
from mini_gpt.runtime import sharding, token_ids
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.random_models import random_parameters

VOCAB = 13
FIELDS = {"context_length": 8, "model.d_model": 16, "model.num_layers": 1, "model.dtype": "float32"}
MASKED = {"train.objective": "masked", "model.causal": False}
PAIRS = {"model.encoder_layers": 1, "data.corpus": "task:copy", "data.tokenizer": "characters"}


def make(**fields):
    config = loading.load("configs/default.py", FIELDS | fields)
    definition, parameters = random_parameters(config.model, VOCAB, noise=0.0)
    separator_id = 0 if config.model.encoder_layers else None
    return LoadedModel(parameters, definition, config, sharding.make_mesh(1, 1, 1), 1024, Layout(separator_id))


def with_id(token):
    return np.array([1, 2, token, 3])


def module(model, tokens, source=None):
    of_source = {} if source is None else {"source_BS": jnp.asarray(source)[None]}
    return model.merge()(jnp.asarray(tokens)[None], **of_source)


def nll(model, *arrays):
    return make_nll_fn(model)(*(array[None] for array in arrays))


DECODERS = {
    "generate": lambda model, tokens: decoding.generate(model, [tokens], length=2),
    "second prompt": lambda model, tokens: decoding.generate(model, [[1], tokens], length=2),
    "stream": lambda model, tokens: next(decoding.stream(model, [tokens], length=2)),
    "beams": lambda model, tokens: beam.search(model, [tokens], beam.Options(0, 2)),
    "inputs": lambda model, tokens: nll(model, tokens, with_id(0)),
    "targets": lambda model, tokens: nll(model, with_id(0), tokens),
    "attention maps": lambda model, tokens: attention.attention_maps(model, tokens[None]),
    "module": module,
}
ENCODERS = {
    "generate": lambda model, source: decoding.generate(model, [[0]], length=2, sources=[source]),
    "beams": lambda model, source: beam.search(model, [[0]], beam.Options(0, 2), [source]),
    "nll": lambda model, source: nll(model, with_id(0), with_id(0), source),
    "attention maps": lambda model, source: attention.maps_by_kind(model, with_id(0)[None], source[None]),
    "module": lambda model, source: module(model, with_id(0), source),
}


@pytest.mark.parametrize("token", [VOCAB, 99, -1])
@pytest.mark.parametrize("name", DECODERS)
def test_an_id_outside_the_vocabulary_is_refused(name, token):
    with pytest.raises(UserError, match=rf"\b2\]: found the token id {token}; must be in 0\.\.{VOCAB - 1}"):
        DECODERS[name](make(), with_id(token))


@pytest.mark.parametrize("token", [VOCAB, -2])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_id_outside_the_vocabulary_of_sources_is_refused(name, token):
    with pytest.raises(UserError, match=rf"source.*2\]: found the token id {token}; must be .*0\.\.{VOCAB - 1}"):
        ENCODERS[name](make(**PAIRS), with_id(token))


@pytest.mark.parametrize("name", ["nll", *slow("module", "attention maps")])
def test_padding_of_sources_is_allowed(name):
    ENCODERS[name](make(**PAIRS), np.array([0, 2, 3, -1]))


def test_a_text_to_fill_in_may_hold_the_mask_but_no_later_id():
    model = make(**MASKED)
    mask = VOCAB - 1
    assert filling.fill(model, with_id(mask)).indices_N.tolist() == [2]
    for token in (VOCAB, -1):
        with pytest.raises(UserError, match=rf"tokens_L\[2\]: found the token id {token}; must be in 0\.\.{mask}"):
            filling.fill(model, with_id(token))


def test_ids_that_are_not_integers_are_refused():
    with pytest.raises(UserError, match=re.escape("prompt: found the type float64; token ids must be integers")):
        decoding.generate(make(), [[1.5, 2.0]], length=1)


def test_ids_that_overflow_32_bits_are_refused():
    with pytest.raises(UserError, match=f"found the token id {2**32 + 1}"):
        decoding.generate(make(), [[1, 2**32 + 1]], length=1)


def test_the_limits_of_the_vocabulary_are_allowed():
    token_ids.check([0, VOCAB - 1], VOCAB, "tokens")
    token_ids.check([], VOCAB, "tokens")


def test_traced_tokens_are_not_checked():
    model = make()
    logits = jax.jit(model.merge())(jnp.array([[1, 2]]))
    np.testing.assert_allclose(logits, module(model, [1, 2]), rtol=1e-5, atol=1e-5)


def test_a_negative_id_has_no_text():
    assert ByteTokenizer().decode([97, -1, -2, 98]) == "ab"

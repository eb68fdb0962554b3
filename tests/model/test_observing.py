"""What is observed of a pass: it leaves the pass unchanged, it adds up, and it costs nothing elsewhere."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mini_gpt.insight import observing
from mini_gpt.model import layers
from tests.conftest import slow
from tests.model import test_encoder_decoder, test_gpt

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

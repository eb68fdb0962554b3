"""The Python names that code outside this project uses: they keep their arguments and results."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from mini_gpt import config
from mini_gpt.evaluation import scoring
from mini_gpt.model import MiniGPT, positions

SMALL = {"model.position": "rope", "model.num_layers": 2, "model.d_model": 8, "model.num_heads": 2}


def test_the_model_scores_tokens_by_the_public_names():
    loaded = config.load("configs/tiny.py", SMALL)
    assert isinstance(loaded, config.Config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.seed = 1
    encodings = positions.make(loaded.model, rngs=nnx.Rngs(0))
    assert isinstance(encodings, tuple) and len(encodings) == 2 and encodings[0] is encodings[1]
    model = MiniGPT(loaded.model, vocab_size=257, rngs=nnx.Rngs(0))
    tokens = np.arange(9, dtype=np.int32)

    forward = jax.jit(model)

    def nll(inputs_BL, targets_BL):
        logits_BLV = np.asarray(forward(inputs_BL), np.float64)
        log_sums_BL = np.log(np.exp(logits_BLV).sum(-1))
        return log_sums_BL - np.take_along_axis(logits_BLV, targets_BL[..., None], -1)[..., 0]

    losses = scoring.score_tokens(nll, tokens, window=4, stride=4, batch_size=1)
    expected = [nll(tokens[None, :4], tokens[None, 1:5]), nll(tokens[None, 4:8], tokens[None, 5:9])]
    np.testing.assert_allclose(losses, np.concatenate(expected, axis=None), rtol=1e-6)
    layout = {"positions_BL": np.arange(4)[None], "segments_BL": np.zeros((1, 4), np.int32), "dropout_key": None}
    np.testing.assert_allclose(forward(tokens[None, :4]), jax.jit(model)(tokens[None, :4], **layout), atol=1e-5)

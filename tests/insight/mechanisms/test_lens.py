"""The logit lens equals the predictions of a model that ends after each block."""

import dataclasses

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from mini_gpt import suites
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight.mechanisms import lens
from mini_gpt.model import build
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.run import Run
from tests.conftest import slow
from tests.random_models import random_model

TOKENIZER = CharacterTokenizer("abcdefghij")
SIZE = {"model__num_layers": 3, "model__num_heads": 2, "model__d_model": 8, "context_length": 8}


def cut(model, small, fields, depth):
    """Return the model with its first `depth` blocks only."""
    config = small(**SIZE | fields | {"model__num_layers": depth})
    definition, _ = build.abstract(config.model, len(model.parameters["embedding"]))
    parameters = {**model.parameters, "blocks": {n: model.parameters["blocks"][n] for n in range(depth)}}
    return dataclasses.replace(model, parameters=parameters, definition=definition, config=config)


@pytest.mark.parametrize(
    "fields", [{}, *slow({"model__norm_placement": "post", "model__position": "learned"}, {"model__output_bias": True})]
)
def test_each_depth_predicts_as_a_model_of_this_depth(small, fields):
    model = random_model(small(**SIZE | fields), TOKENIZER.token_bytes, noise=0.4)
    windows_BM = np.random.default_rng(0).integers(0, 10, (3, 7), np.int32)
    batch = {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:]}
    found, last_BLV = lens.read(model, batch, 2), np.float64(model.logits(batch["inputs"]))
    for depth in (1, 2, 3):
        logits_BLV = np.float64(cut(model, small, fields, depth).logits(batch["inputs"]))
        log_BLV = log_softmax(logits_BLV, axis=-1)
        nll_BL = -np.take_along_axis(log_BLV, batch["targets"][..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(found.nll_PBL[depth], nll_BL, rtol=1e-4, atol=1e-5)
        divergence_BL = (softmax(last_BLV, axis=-1) * (log_softmax(last_BLV, axis=-1) - log_BLV)).sum(-1)
        np.testing.assert_allclose(found.divergence_PBL[depth], divergence_BL, rtol=1e-3, atol=1e-5)
        top_BLT = np.argsort(-logits_BLV, axis=-1)[..., :2]
        np.testing.assert_array_equal(found.tokens_PBLT[depth], top_BLT)
        expected = np.exp(np.take_along_axis(log_BLV, top_BLT, axis=-1))
        np.testing.assert_allclose(found.probabilities_PBLT[depth], expected, rtol=1e-4)


def test_means_by_depth_count_each_target_by_its_weight(small):
    model = random_model(small(**SIZE), TOKENIZER.token_bytes, noise=0.4)
    windows_BM = np.random.default_rng(0).integers(0, 10, (3, 7), np.int32)
    weights_BL = np.zeros((3, 6), np.float32)
    weights_BL[0, 2:], weights_BL[1, 5], weights_BL[2] = 1, 1, 1
    batch = {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:], "weights": weights_BL}
    rows, found = lens.by_depth(model, [(2, batch)]), lens.read(model, batch)  # the last row is padding
    kept = np.concatenate([found.nll_PBL[:, 0, 2:], found.nll_PBL[:, 1, 5:]], axis=1)
    np.testing.assert_allclose([row["nll"] for row in rows], np.float64(kept).mean(axis=1))
    tokens_PL = np.concatenate([found.tokens_PBLT[:, 0, 2:, 0], found.tokens_PBLT[:, 1, 5:, 0]], axis=1)
    targets_L = np.append(batch["targets"][0, 2:], batch["targets"][1, 5])
    np.testing.assert_allclose([row["accuracy"] for row in rows], (tokens_PL == targets_L).mean(axis=1))
    np.testing.assert_allclose([row["agreement"] for row in rows], (tokens_PL == tokens_PL[-1]).mean(axis=1))
    assert rows[-1]["agreement"] == 1 and abs(rows[-1]["divergence"]) < 1e-6


@pytest.mark.slow
def test_the_suite_measures_the_split_and_a_text(trained, capsys):
    run = Run(trained())
    result = suites.evaluate(run, "lens", SuiteOptions())
    assert [row["depth"] for row in result["rows"]] == list(range(1 + run.config.model.num_layers))
    loss = suites.evaluate(run, "perplexity", SuiteOptions())["nll"]
    assert result["rows"][-1]["nll"] == pytest.approx(loss, rel=0.05)
    assert {path.name for path in (run.workdir / "eval").glob("lens*")} == {"lens.json", "lens.csv", "lens.png"}
    result = suites.evaluate(run, "lens", SuiteOptions(text="def main"))
    assert result["shown"]["inputs"] == list("def main") and len(result["shown"]["tokens"][0]) == 8

"""Importance and ablation of the heads of encoder, decoder and cross-attention, against other ways to compute them."""

import dataclasses

import numpy as np
import pytest

from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import examples, pruning, samples
from mini_gpt.model import editing
from tests.insight.test_maps_by_kind import PAIRS, without
from tests.random_models import random_model

TOKENIZER = CharacterTokenizer(tasks.ALPHABET)
PROBLEMS = [("abc", "cba"), ("ab", "ba"), ("acd", "dca"), ("dd", "dd"), ("bca", "acb")]
SIZE = {"model__encoder_layers": 1, "model__num_layers": 1, "model__num_heads": 2, "train__batch_size": 3}


def losses(model, parameters=None, mask_NBH=None):
    """Return the mean loss of each problem's answer, in float64."""
    edits = editing.NO_EDITS if mask_NBH is None else editing.head_mask(mask_NBH)
    changed = dataclasses.replace(model, parameters=parameters or model.parameters, edits=edits)
    found = []
    for problem in PROBLEMS:
        batch = examples.batch_of([examples.of_problem(problem, model.config, TOKENIZER)], (9, 8))
        nll_BL = np.float64(changed.nll(batch["inputs"], batch["targets"], batch["source"]))
        found.append((nll_BL * batch["weights"]).sum() / batch["weights"].sum())
    return np.array(found)


@pytest.mark.slow
def test_importance_and_ablation_of_all_kinds(small):
    model = random_model(small(**PAIRS | SIZE), TOKENIZER.token_bytes, noise=0.3)
    texts = list(
        samples.batches(model, [examples.of_problem(problem, model.config, TOKENIZER) for problem in PROBLEMS])
    )
    assert len(texts) > 1 and sum(count for count, _ in texts) == len(PROBLEMS)
    importance_NH, increase_NH = pruning.importance(model, texts), pruning.ablation(model, texts)
    layers = editing.attention_layers(model.config.model)
    assert layers == [("encoder", 0), ("decoder", 0), ("cross", 0)]
    whole_B = losses(model)
    for place, head in np.ndindex(3, 2):
        pruned = without(model.parameters, (*layers[place], head), 2)
        assert increase_NH[place, head] == pytest.approx(np.mean(losses(model, pruned) - whole_B), abs=1e-5)
        high, low = (np.ones((3, 1, 2), np.float32) for _ in range(2))
        high[place, 0, head], low[place, 0, head] = 1.01, 0.99
        slope_B = (losses(model, mask_NBH=high) - losses(model, mask_NBH=low)) / 0.02
        assert importance_NH[place, head] == pytest.approx(np.mean(np.abs(slope_B)), rel=0.02, abs=1e-4)
    assert np.abs(increase_NH).min() > 1e-4

"""The texts and the losses of benchmarks/fine_tuning.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import fine_tuning
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.runtime.errors import UserError
from tests.random_models import random_model


def test_windows_of_any_length_score_the_same_targets(small):
    model = random_model(small(), np.ones(20, int))
    texts_DM = np.random.default_rng(0).integers(0, 20, (3, 33)).astype(np.int32)
    found = fine_tuning.losses(model, texts_DM, (8, 16))
    for length in (8, 16):
        expected = []
        for document, start in np.ndindex(3, 4):
            first = 8 * start // length * length
            logits_LV = np.asarray(model(texts_DM[document : document + 1, first : first + length])[0], np.float64)
            log_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
            places = np.arange(8 * start, 8 * start + 8)
            expected.append(-log_LV[places - first, texts_DM[document, places + 1]].mean())
        np.testing.assert_allclose(found[str(length)], expected, rtol=1e-5)
    change = fine_tuning.summary(found, {"8": found["8"], "16": found["8"]})
    difference_P = found["16"] - found["8"]
    expected = {"nll": found["16"].mean(), "change": difference_P.mean(), "standard_error": difference_P.std(ddof=1)}
    assert change["16"] == pytest.approx(expected | {"standard_error": expected["standard_error"] / 12**0.5})


def test_texts_are_pieces_of_single_documents():
    lengths, separator = [5, 12, 8, 20, 9], 256
    tokens = np.concatenate([[separator, *range(10 * number, 10 * number + n)] for number, n in enumerate(lengths)])
    run = SimpleNamespace(store=SimpleNamespace(tokens={"validation": tokens}.get), tokenizer=ByteTokenizer())
    expected = [[separator, *range(10 * number, 10 * number + 9)] for number in (1, 3, 4)]
    expected.insert(2, list(range(38, 48)))
    assert fine_tuning.pieces(run, 9, 4).tolist() == expected
    across = [tokens[at : at + 10].tolist() for at in range(0, 54, 9)]
    assert fine_tuning.pieces(run, 9, 6, across=True).tolist() == across
    with pytest.raises(UserError, match="--pieces: found 5; the documents have 4 pieces of 9 tokens"):
        fine_tuning.pieces(run, 9, 5)

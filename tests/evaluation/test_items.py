"""Results of single items: parts of a text that add up to its loss, and their form in JSON files."""

import json

import numpy as np
import pytest

from mini_gpt.evaluation import items, scoring
from mini_gpt.evaluation.items import Items


@pytest.mark.parametrize("count", [1, 5, 64, 65, 1000])
def test_parts_of_a_text_add_up_to_its_score(count):
    rng = np.random.default_rng(count)
    nll, targets, token_bytes = rng.random(count).astype(np.float32), rng.integers(0, 9, count), rng.integers(1, 4, 9)
    score = scoring.score(nll, targets, token_bytes)
    for metric, expected in {"nll": score.nll, "bits_per_byte": score.bits_per_byte}.items():
        parts = score.items[metric]
        assert len(parts.sums_P) == min(count, items.PARTS) == len(parts.weights_P)
        assert parts.sums_P.sum() / parts.weights_P.sum() == pytest.approx(expected, rel=1e-12)
    lengths = score.items["nll"].weights_P
    assert lengths.max() - lengths.min() <= 1 and lengths.sum() == count


def test_items_survive_a_json_file():
    written = {"nll": Items(np.array([0.5, 3.25]), np.array([1.0, 7.0]))}
    read = items.unpacked(json.loads(json.dumps(items.packed(written)))["nll"])
    np.testing.assert_array_equal(read, written["nll"])


ONE, TWO, NAN = (
    items.packed({"x": Items(np.array(values), np.array(values))})["x"][0] for values in ([1.0], [1.0, 2.0], [np.nan])
)


@pytest.mark.parametrize(
    "texts", [None, [], [ONE], [ONE, TWO], [NAN, ONE], [ONE, NAN], ["?", ONE], [5, ONE], [ONE, ONE[:-2]]]
)
def test_damaged_items_are_refused(texts):
    with pytest.raises((ValueError, TypeError)):
        items.unpacked(texts)

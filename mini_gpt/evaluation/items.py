"""Results of single items, parts of a text or problems, so that runs can be compared on identical items."""

import base64
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

PARTS = 64  # of a text; the losses of neighbouring tokens are correlated, so a part must be long
STORED = "<f4"  # float32, the type of the losses


class Items(NamedTuple):
    """A metric of each item as sums_P / weights_P. The metric of all items is sum(sums_P) / sum(weights_P)."""

    sums_P: np.ndarray
    weights_P: np.ndarray


def parts_of(nll: np.ndarray, weights: np.ndarray) -> Items:
    """Return the loss of a text in up to PARTS parts of equal length. nll, weights: of each target."""
    starts = np.linspace(0, len(nll), min(PARTS, len(nll)), endpoint=False).astype(int)
    sums_P, weights_P = (np.add.reduceat(np.asarray(values, np.float64), starts) for values in (nll, weights))
    return Items(sums_P, weights_P)


def packed(by_metric: Mapping[str, Items]) -> dict[str, list[str]]:
    """Return {metric: [sums, weights]} for a JSON file: base64 texts of little-endian float32 values."""
    return {
        metric: [base64.b64encode(values.astype(STORED).tobytes()).decode() for values in items]
        for metric, items in by_metric.items()
    }


def unpacked(texts: list[str]) -> Items:
    """Return the items of one metric. Raises ValueError or TypeError for texts that `packed` does not write."""
    values = (np.frombuffer(base64.b64decode(text, validate=True), STORED).astype(float) for text in texts)
    sums_P, weights_P = values
    is_valid = sums_P.shape == weights_P.shape and np.isfinite(sums_P).all() and (weights_P >= 0).all()
    if not is_valid or not 0 < weights_P.sum() < np.inf:
        raise ValueError("invalid items: must have finite sums, and as many weights, at least 0 with a positive sum")
    return Items(sums_P, weights_P)

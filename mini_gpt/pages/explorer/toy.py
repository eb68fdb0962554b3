"""The page's toy example: attention of two heads in four dimensions, small enough to compute by hand.

In the first two dimensions "cat" is near "sat". In the last two "sat" is near "down". "The" is near no other word.
"""

from typing import Any

import numpy as np

WORDS = ("The", "cat", "sat", "down")
X_LD = np.array(
    [[0.5, -1.0, 1.0, 0.5], [2.0, 0.5, -0.5, 1.0], [1.5, 1.0, 1.0, -2.0], [-1.0, 1.5, 0.5, -1.5]], np.float32
)
_EYE = np.eye(4, dtype=np.float32)
PRESETS: dict[
    str, tuple[np.ndarray, np.ndarray]
] = {  # (W_Q, W_K). Head 1 has the first two columns, head 2 the others.
    "identity": (_EYE, _EYE),
    "swapped blocks": (_EYE, _EYE[:, [2, 3, 0, 1]]),
    "head 2 negated": (_EYE, _EYE * np.array([1, 1, -1, -1], np.float32)),
    "random": tuple(np.random.default_rng(7).normal(size=(2, 4, 4)).round(1).astype(np.float32)),
}


def data() -> dict[str, Any]:
    """Return the example in the form that the page reads."""
    presets = {name: [matrix.tolist() for matrix in pair] for name, pair in PRESETS.items()}
    return {"words": WORDS, "heads": 2, "x": X_LD.tolist(), "presets": presets}

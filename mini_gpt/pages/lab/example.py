"""The sentences of the lab: few words in four dimensions, small enough to compute by hand.

Each dimension has a meaning that was chosen by hand. The default matrices let a word of one dimension ask for words of
the other dimension of the same pair: a subject for a verb, a determiner for a place.
"""

from typing import Any

import numpy as np

from mini_gpt.pages.lab import encodings

DIMENSIONS = ("subject", "verb", "determiner", "place")
SENTENCES: dict[str, np.ndarray] = {  # x_LD of each word
    "The cat sat on the mat": np.array(
        [[0, 0, 2, 0], [2, 0, 0, 0], [0, 2, 1, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0.5, 0, 0, 2]], np.float32
    ),
    "The cat sat down": np.array([[0, 0, 2, 0], [2, 0, 0, 0], [0, 2, 1, 0], [0, 0, 0, 2]], np.float32),
}
_EYE = np.eye(4, dtype=np.float32)
PRESETS: dict[str, np.ndarray] = {  # w_DE; `random` is drawn by the page, with a seed
    "identity": _EYE,
    "swapped in pairs": _EYE[[1, 0, 3, 2]],
    "swapped halves": _EYE[[2, 3, 0, 1]],
    "negated": -_EYE,
    "swapped, half negated": _EYE[[1, 0, 3, 2]] * np.array([1, 1, -1, -1], np.float32),
    "zero": 0 * _EYE,
}
DEFAULTS = {"Q": "identity", "K": "swapped in pairs", "V": "identity", "O": "identity"}


def data() -> dict[str, Any]:
    """Return the sentences, the presets and the encodings in the form that the page reads."""
    return {
        "dimensions": DIMENSIONS,
        "sentences": {text: x_LD.tolist() for text, x_LD in SENTENCES.items()},
        "presets": {name: w_DE.tolist() for name, w_DE in PRESETS.items()},
        "defaults": DEFAULTS,
        "encodings": encodings.computed(len(DIMENSIONS), max(map(len, SENTENCES.values()))),
    }

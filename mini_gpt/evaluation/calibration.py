"""Whether the probabilities of predicted tokens are as large as the share of them that is right."""

import numpy as np

BINS = 15


def expected_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of predictions, in 0..1 (Guo et al. 2017, eq. 3).

    confidence: probabilities of the predictions.
    right: whether they are right. Both have shape [tokens].

    The error is the mean over BINS equal intervals of confidence, weighted by their predictions, of |share right - mean
    confidence|.
    """
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    sums = [np.bincount(bins, weights=values, minlength=BINS) for values in (confidence, right)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(confidence))

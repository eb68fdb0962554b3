"""Standard errors by the jackknife, where a statistic is computed again without each part (Tukey 1958); intervals."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

GROUPS = 16  # of neighbouring items; the losses of neighbouring tokens are correlated, so a group must be long


def jackknife(without: Sequence[float | None] | np.ndarray) -> float | None:
    """Return √((G − 1)/G · Σ (θ_g − mean)²), the standard error (Efron and Tibshirani 1993, eq. 11.5).

    without: the statistic without each of G parts of about equal size.

    None if there is only one part, or if the statistic is not known without one of them.
    """
    values_G = np.array(without, float)
    if len(values_G) < 2 or not np.isfinite(values_G).all():
        return None
    return float(np.sqrt((len(values_G) - 1) * values_G.var()))


def of_ratio(sums_P: Sequence[float] | np.ndarray, weights_P: Sequence[float] | np.ndarray) -> float | None:
    """Return the standard error of sum(sums_P) / sum(weights_P), from up to GROUPS groups of neighbours."""
    starts = np.linspace(0, len(sums_P), min(GROUPS, len(sums_P)), endpoint=False).astype(int)
    sums_G, weights_G = (np.add.reduceat(np.asarray(values, float), starts) for values in (sums_P, weights_P))
    sums_G, weights_G = sums_G[weights_G > 0], weights_G[weights_G > 0]
    if len(sums_G) < 2:
        return None
    return jackknife((sums_G.sum() - sums_G) / (weights_G.sum() - weights_G))


def mean(values_P: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean over the first axis of what is not NaN; NaN if all is."""
    stacked, count = np.asarray(values_P, float), np.isfinite(values_P).sum(axis=0)
    return np.where(count > 0, np.nansum(stacked, axis=0) / np.maximum(count, 1), np.nan)


def half_interval(values_P: Sequence[np.ndarray]) -> np.ndarray:
    """Return half the width of Student's 95% interval of `mean`; NaN for fewer than two values."""
    count = np.isfinite(values_P).sum(axis=0)
    squares = mean((np.asarray(values_P, float) - mean(values_P)) ** 2) * count
    freedom = np.maximum(count - 1, 1)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(squares / freedom / np.maximum(count, 1))
    return np.where(count > 1, half, np.nan)

"""Checks of the weights alone: non-finite numbers, rows or columns of zeros, and weights that look untrained."""

from collections.abc import Mapping

import numpy as np
from scipy.sparse import linalg

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.diagnosis.result import CheckResult, listed
from mini_gpt.model.parameters import by_name, with_layers
from mini_gpt.runtime import sharding

# Limits of `structure`.
UNTRAINED = 1.08  # all matrices of an untrained block are below
LEARNED = 1.4  # if the median of the other blocks' matrices is larger, these blocks are trained
SMALLEST = 16  # fewest rows and columns of a matrix that is compared with an untrained one


def check(model: LoadedModel) -> list[CheckResult]:
    """Check all weights for non-finite numbers, and the matrices of the blocks for the rest, if all are finite."""
    bad, zeros, ratios = {}, {}, {}
    for name, leaf in by_name(with_layers(model.parameters, stacked=False)).items():
        weights = sharding.to_host(leaf, model.mesh)  # one by one: all may take gigabytes
        bad[name] = int((~np.isfinite(weights)).sum())
        if weights.ndim == 2 and "blocks/" in name and not bad[name]:
            zeros[name] = zero_lines(weights)
            if min(weights.shape) >= SMALLEST and weights.any():
                ratios[name] = structure(weights.astype(np.float64))
    finite = _counted("finite", "Non-finite parameters", bad)
    if finite.found:
        return [finite]
    return [finite, _counted("zero weights", "Zero rows or columns", zeros), *untrained(ratios)]


def _counted(check: str, what: str, counts: Mapping[str, int]) -> CheckResult:
    """Check that all counts are 0. counts: of each parameter."""
    names = [f"{name} ({count})" for name, count in counts.items() if count]
    return CheckResult(check, float(sum(counts.values())), "none", bool(names), f"{what}: {listed(names)}.")


def untrained(ratios: Mapping[str, float]) -> list[CheckResult]:
    """Check for blocks whose matrices all look untrained. Returns nothing if this is so for all blocks.

    ratios: `structure` of each matrix.
    """
    largest: dict[str, float] = {}  # of each block, such as encoder/blocks/3
    for name, ratio in ratios.items():
        block = name[: name.index("/", name.index("blocks/") + len("blocks/"))]
        largest[block] = max(ratio, largest.get(block, 0))
    names = [block for block, ratio in largest.items() if ratio < UNTRAINED]
    others = [ratio for name, ratio in ratios.items() if not name.startswith(tuple(f"{block}/" for block in names))]
    if not others:
        return []
    least, median = min(largest.values()), float(np.median(others))
    found = bool(names) and median > LEARNED  # otherwise hardly trained, or by Muon, which keeps singular values even
    says = (
        f"Blocks that look untrained: {listed(names if found else [])}. Each block has a matrix with a singular value "
        f"at least {least:.2f} times the largest of an untrained one; the median of trained matrices is {median:.2f}."
    )
    limit = f"at least {UNTRAINED} for a matrix of each block, if the median of the others is above {LEARNED}"
    return [CheckResult("untrained weights", least, limit, found, says)]


def structure(matrix: np.ndarray) -> float:
    """Return the largest singular value, divided by its expectation for independent entries: std · (√rows + √columns).

    It is about 1 for an untrained matrix (Bai and Yin 1993), and larger for a trained one.
    """
    start = np.random.default_rng(0).normal(size=min(matrix.shape))  # the same for each call, so that results repeat
    (largest,) = linalg.svds(matrix, k=1, v0=start, return_singular_vectors=False)
    return float(largest / max(matrix.std() * sum(np.sqrt(matrix.shape)), 1e-30))


def zero_lines(matrix: np.ndarray) -> int:
    """Return the number of rows and columns that are zero."""
    return int(sum((matrix == 0).all(axis=axis).sum() for axis in (0, 1)))

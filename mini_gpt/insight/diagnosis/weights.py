"""Checks of the weights alone: matrices with zero rows or columns, and matrices that look newly drawn."""

import numpy as np

from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import by_name, with_layers
from mini_gpt.runtime import sharding

DRAWN = 1.08  # largest singular value / that of independent entries with the same deviation
LEARNED = 1.4  # the same, median over the other matrices, if the model has learned
SMALLEST = 16  # rows and columns of a matrix that is examined
MOST_NAMES = 4  # in a sentence


def check(model: LoadedModel, suspicious: bool) -> list[CheckResult]:
    """Check the matrices of the blocks and of positions. Returns nothing if one is non-finite.

    suspicious: whether the model is probably not the trained one; else only whole blocks count as newly drawn.
    """
    leaves = by_name(with_layers(model.parameters, stacked=False)).items()
    in_part = {name: leaf for name, leaf in leaves if leaf.ndim == 2 and name.startswith(("blocks/", "positions/"))}
    matrices = {name: sharding.to_host(leaf, model.mesh).astype(np.float64) for name, leaf in in_part.items()}
    if not all(np.isfinite(matrix).all() for matrix in matrices.values()):
        return []
    zeros = {name: zero_lines(matrix) for name, matrix in matrices.items() if name.startswith("blocks/")}
    listed = _listed([f"{name} ({count})" for name, count in zeros.items() if count])
    says = f"Zero rows or columns of the blocks' matrices: {listed or 'none'}."
    cause = f"weights set to zero in {listed}"
    results = [CheckResult("zero weights", float(sum(zeros.values())), "none", bool(listed), says, cause)]

    ratios = {name: structure(matrix) for name, matrix in matrices.items() if min(matrix.shape) >= SMALLEST}
    drawn = [name for name in ratios if ratios[name] < DRAWN]
    if len(drawn) == len(ratios):
        return results  # no matrix has learned
    median = float(np.median([ratios[name] for name in ratios.keys() - {*drawn}]))
    in_block = lambda name: [other for other in ratios if other.split("/")[:2] == name.split("/")[:2]]
    drawn = [name for name in drawn if suspicious or set(in_block(name)) <= set(drawn)]
    listed = _listed(drawn)
    says = (
        f"Largest singular values, divided by those of newly drawn matrices: least {min(ratios.values()):.2f}, "
        f"median without newly drawn ones {median:.2f}."
    )
    limit = f"at least {DRAWN}, if that median is above {LEARNED}"
    found, cause = bool(drawn) and median > LEARNED, f"weights that look newly drawn in {listed}"
    return [*results, CheckResult("redrawn weights", min(ratios.values()), limit, found, says, cause)]


def structure(matrix: np.ndarray) -> float:
    """Return the largest singular value, divided by its expectation for independent entries: std · (√rows + √columns).

    It is about 1 for a newly drawn matrix (Bai and Yin 1993), and larger for a trained one.
    """
    narrow = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    largest = np.sqrt(max(np.linalg.eigvalsh(narrow.T @ narrow)[-1], 0))
    return float(largest / max(matrix.std() * sum(np.sqrt(matrix.shape)), 1e-30))


def zero_lines(matrix: np.ndarray) -> int:
    """Return the number of rows and columns that are zero."""
    return int(sum((matrix == 0).all(axis=axis).sum() for axis in (0, 1)))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more

"""Checks of the weights alone: matrices with zero rows or columns, and matrices that look untrained."""

from collections.abc import Mapping

import numpy as np

from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import by_name, with_layers
from mini_gpt.runtime import sharding

BLOCKS = ("blocks/", "encoder/blocks/")  # the starts of the names of the blocks' parameters

# Limits of `structure`.
UNTRAINED, UNTRAINED_ALONE = 1.08, 1.03  # an untrained block, or a single untrained matrix, is below
LEARNED = 1.4  # if the median of all matrices above UNTRAINED is larger, the blocks are trained
SMALLEST = 16  # fewest rows and columns of a matrix that is examined
MOST_NAMES = 4  # in a sentence


def check(model: LoadedModel, suspicious: bool) -> list[CheckResult]:
    """Check the matrices of the blocks and of positions. Returns nothing if one is non-finite.

    suspicious: `Losses.suspicious`. If it is False, only whole blocks are reported as untrained.
    """
    leaves = by_name(with_layers(model.parameters, stacked=False)).items()
    # With scaled embeddings, learned positions start with a standard deviation of 1 and change little.
    parts = BLOCKS if model.config.model.scale_embeddings else (*BLOCKS, "positions/", "encoder/positions/")
    in_part = {name: leaf for name, leaf in leaves if leaf.ndim == 2 and name.startswith(parts)}
    zeros, ratios = {}, {}
    for name, leaf in in_part.items():  # one by one, because all of them in float64 may take gigabytes
        matrix = sharding.to_host(leaf, model.mesh).astype(np.float64)
        if not np.isfinite(matrix).all():
            return []
        if name.startswith(BLOCKS):
            zeros[name] = zero_lines(matrix)
        if min(matrix.shape) >= SMALLEST and matrix.any():
            ratios[name] = structure(matrix)
    listed = _listed([f"{name} ({count})" for name, count in zeros.items() if count])
    says = f"Zero rows or columns of the blocks' matrices: {listed or 'none'}."
    cause = f"weights set to zero in {listed}"
    results = [CheckResult("zero weights", float(sum(zeros.values())), "none", bool(listed), says, cause)]

    of_blocks = [ratio for name, ratio in ratios.items() if name.startswith(BLOCKS)]
    learned = [ratio for ratio in of_blocks if ratio >= UNTRAINED]
    if not learned:
        return results  # untrained, or trained by Muon, which keeps the singular values even
    median = float(np.median(learned))
    alone = UNTRAINED_ALONE if suspicious else 0
    untrained = [name for name, ratio in ratios.items() if ratio < alone or _is_in_untrained_block(name, ratios)]
    listed, least = _listed(untrained), min([ratios[name] for name in untrained] or of_blocks)
    says = (
        f"Largest singular values, divided by those of untrained matrices: least {least:.2f}, "
        f"median without untrained ones {median:.2f}."
    )
    limit = f"at least {UNTRAINED} for a matrix of each block, if the median is above {LEARNED}"
    found, cause = bool(untrained) and median > LEARNED, f"weights that look untrained in {listed}"
    return [*results, CheckResult("untrained weights", least, limit, found, says, cause)]


def _is_in_untrained_block(name: str, ratios: Mapping[str, float]) -> bool:
    """Return whether all matrices of the block with this matrix look untrained."""
    if not name.startswith(BLOCKS):
        return False
    block = _block(name)
    return all(ratio < UNTRAINED for other, ratio in ratios.items() if _block(other) == block)


def _block(name: str) -> str:
    """Return the name of the block of a parameter, such as encoder/blocks/3."""
    stack, _, rest = name.rpartition("blocks/")
    return f"{stack}blocks/{rest.split('/')[0]}"


def structure(matrix: np.ndarray) -> float:
    """Return the largest singular value, divided by its expectation for independent entries: std · (√rows + √columns).

    It is about 1 for an untrained matrix (Bai and Yin 1993), and larger for a trained one.
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

"""Pictures for TensorBoard during training, made as arrays: a Matplotlib figure takes longer than training steps."""

import numpy as np
from matplotlib import colormaps

GAP, PAPER = 3, 255  # pixels between maps, white
SMALLEST, LARGEST = 96, 256  # pixels of one map

COLOURS_X3 = (colormaps["magma"](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)
DIVERGING_X3 = (colormaps["RdBu_r"](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)


def map_grid(weights_NHLS: np.ndarray) -> np.ndarray:
    """Return RGB pixels, uint8: layers downwards, heads across; the root of each weight, which shows small ones."""
    rows = []
    for weights_HLS in weights_NHLS:
        tiles = [_tile(COLOURS_X3[_levels(np.sqrt(np.clip(weights_LS, 0, 1)))]) for weights_LS in weights_HLS]
        rows.append(_joined(tiles, axis=1))
    return _joined(rows, axis=0)


def similarity(table_PD: np.ndarray) -> np.ndarray:
    """Return RGB pixels, uint8, of the cosines between the rows of a table: white 0, red 1, blue -1."""
    step = max(1, -(-len(table_PD) // LARGEST))
    return _tile(DIVERGING_X3[_levels((cosines(table_PD[::step]) + 1) / 2)])


def cosines(table_PD: np.ndarray) -> np.ndarray:
    """Return the cosines between the rows of a table, float64; 0 where a row is zero."""
    rows_PD = table_PD.astype(np.float64)
    rows_PD = rows_PD / np.maximum(np.linalg.norm(rows_PD, axis=1, keepdims=True), 1e-12)
    return rows_PD @ rows_PD.T


def _levels(shares: np.ndarray) -> np.ndarray:
    return np.clip(np.round(np.nan_to_num(shares) * 255), 0, 255).astype(int)  # NaN is drawn as 0


def _tile(pixels: np.ndarray) -> np.ndarray:
    """Enlarge each entry of a small map to a square of pixels."""
    times = max(1, SMALLEST // len(pixels))
    return pixels.repeat(times, axis=0).repeat(times, axis=1)


def _joined(tiles: list[np.ndarray], axis: int) -> np.ndarray:
    shape = list(tiles[0].shape)
    shape[axis] = GAP
    gap = np.full(shape, PAPER, np.uint8)
    return np.concatenate([part for tile in tiles for part in (tile, gap)][:-1], axis=axis)

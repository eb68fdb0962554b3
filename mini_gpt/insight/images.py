"""Images for TensorBoard as arrays, because plotting with Matplotlib is slower than a training step."""

import numpy as np
from matplotlib import colormaps

GAP, PAPER = 3, 255  # pixels between maps, and their colour: white
SMALLEST, LARGEST = 96, 256  # pixels of one map

COLOURS_X3 = (colormaps["magma"](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)
DIVERGING_X3 = (colormaps["RdBu_r"](np.linspace(0, 1, 256))[:, :3] * 255).astype(np.uint8)


def map_grid(weights_NHLS: np.ndarray) -> np.ndarray:
    """Return RGB pixels, uint8: layers downwards, heads across; square roots make small weights visible."""
    pixels_NHLS3 = _enlarged(COLOURS_X3[_levels(np.sqrt(np.clip(weights_NHLS, 0, 1)))])
    with_gaps = np.pad(pixels_NHLS3, ((0, 0), (0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=PAPER)
    layers, heads, height, width, _ = with_gaps.shape
    return with_gaps.transpose(0, 2, 1, 3, 4).reshape(layers * height, heads * width, 3)[:-GAP, :-GAP]


def similarity(table_PD: np.ndarray) -> np.ndarray:
    """Return RGB pixels, uint8, of the cosines between the rows of a table: white 0, red 1, blue -1."""
    step = max(1, -(-len(table_PD) // LARGEST))
    return _enlarged(DIVERGING_X3[_levels((cosines(table_PD[::step]) + 1) / 2)])


def cosines(table_PD: np.ndarray) -> np.ndarray:
    """Return the cosines between the rows of a table, float64; 0 where a row is zero."""
    rows_PD = table_PD.astype(np.float64)
    rows_PD = rows_PD / np.maximum(np.linalg.norm(rows_PD, axis=1, keepdims=True), 1e-12)
    return rows_PD @ rows_PD.T


def _levels(shares: np.ndarray) -> np.ndarray:
    return np.clip(np.round(np.nan_to_num(shares) * 255), 0, 255).astype(int)  # NaN gets the first colour


def _enlarged(pixels: np.ndarray) -> np.ndarray:
    """Enlarge each entry of maps [..., L, S, 3] to a square of pixels."""
    times = max(1, SMALLEST // pixels.shape[-3])
    return pixels.repeat(times, axis=-3).repeat(times, axis=-2)

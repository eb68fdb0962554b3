"""Colours of maps in figures of Matplotlib. Masked pairs are hatched."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mini_gpt.insight import images

WEIGHTS = LinearSegmentedColormap.from_list("weights", images.WEIGHTS)
SIGNED = LinearSegmentedColormap.from_list("signed", images.SIGNED)
HATCHING, MARK = "#c9ccd2", "#b8431b"  # of masked pairs, and of frames
TICKS = (0, 0.01, 0.1, 0.25, 0.5, 1)  # of weights


def show_weights(axes: Axes, weights_LS: np.ndarray, seen_LS: np.ndarray | None = None) -> AxesImage:
    """Plot attention weights as colours by their square roots. seen_LS: False for masked pairs, which are hatched."""
    if seen_LS is not None:
        weights_LS = np.ma.masked_array(weights_LS, ~seen_LS)
        axes.patch.set(hatch="////", edgecolor=HATCHING, linewidth=0)
    return axes.imshow(weights_LS, cmap=WEIGHTS, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")


def weight_bar(figure: Figure, image: AxesImage, axes: Any, *, shrink: float = 0.8) -> Colorbar:
    """Add the colour bar of attention weights beside axes, or beside several."""
    bar = figure.colorbar(image, ax=axes, label="attention weight", shrink=shrink, pad=0.015, aspect=30)
    bar.set_ticks(TICKS, labels=[f"{tick:g}" for tick in TICKS])
    return bar


def heat_map(axes: Axes, values: np.ndarray, limit: float = 1, *, signed: bool = True, bar: str = "") -> AxesImage:
    """Plot values from -limit (signed) or 0 up to a limit as colours. bar: the name of a colour bar."""
    style: Any = {"cmap": SIGNED if signed else WEIGHTS, "vmin": -limit if signed else 0, "vmax": limit}
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **style)
    axes.tick_params(length=0)
    if bar:
        axes.figure.colorbar(image, ax=axes, label=bar, shrink=0.8)
    return image


def write_cells(
    image: AxesImage,
    text_of: Callable[[tuple[int, int], float], str],
    is_bold: Callable[[tuple[int, int]], bool] = lambda place: False,
    fontsize: float = 8,
) -> None:
    """Write a text into each cell (row, column) of a map, by its place and value."""
    values: Any = image.get_array()
    for place, value in np.ndenumerate(np.ma.filled(values, np.nan)):
        style: Any = {"color": ink_on(image, value), "weight": "bold" if is_bold(place) else "normal"}
        image.axes.text(place[1], place[0], text_of(place, value), ha="center", va="center", fontsize=fontsize, **style)


def ink_on(image: AxesImage, value: float) -> str:
    """Return the colour of text on a value's colour, black or white: the contrast is at least 4.5 (WCAG 2.2, 1.4.3)."""
    rgb = image.to_rgba(np.array([value]))[0, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "white"

"""Figures of measurements against length: loss by context length or position, accuracy by problem length."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator


@dataclass(frozen=True)
class Curve:
    """Points of one line: x, y, and for several seeds the lowest and highest y."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def draw_curves(axes: Axes, curves: Iterable[Curve], *, trained: float | None = None) -> None:
    """Draw each curve, with the range over seeds as a band; the x axis is logarithmic for a wide range of lengths."""
    lengths = set()
    for number, curve in enumerate(curves):
        colour = f"C{number}"
        axes.plot(curve.x, curve.y, color=colour, marker="o", markersize=4, label=curve.label)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        lengths |= set(curve.x)
    ticks = sorted(lengths)
    logarithmic = bool(ticks) and ticks[-1] > 4 * ticks[0]
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, tick_labels(ticks, logarithmic))
    axes.xaxis.set_minor_locator(NullLocator())
    if trained is not None:
        axes.axvline(trained, color="grey", linestyle="--", linewidth=1, zorder=0)
        axes.annotate("trained", (trained, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
                      textcoords="offset points", color="grey", fontsize=8)  # fmt: skip
    finish(axes)


def tick_labels(ticks: list[float], logarithmic: bool) -> list[str]:
    """Return a label for each of the sorted ticks, empty if it would touch the one before."""
    places = np.log2(ticks) if logarithmic else np.asarray(ticks)
    labels, last = [], -np.inf
    for tick, place in zip(ticks, places, strict=True):
        label = f"{tick:g}"
        fits = place - last >= 0.0225 * len(label) * (places[-1] - places[0])  # 0.0225: width of a digit over the axis
        labels.append(label if fits else "")
        last = place if fits else last
    return labels


def extrapolation_figure(curves: Iterable[Curve], by_position: Mapping[str, list[float]], *, trained: int) -> Figure:
    """Return a figure: loss by context length beside loss by position in the window, in nats a token."""
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_curves(left, curves, trained=trained)
    left.set_xlabel("context length (tokens)")
    left.set_ylabel("loss (nats a token)")
    left.set_title("The same targets at each context length")
    for length, nll in by_position.items():
        x, y = _binned(np.asarray(nll))
        right.plot(x, y, label=f"blocks of {length}", linewidth=1.5)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.axvline(trained, color="grey", linestyle="--", linewidth=1, zorder=0)
    right.set_xlabel("tokens of context before the target")
    right.set_ylabel("loss (nats a token)")
    right.set_title("By position in the window")
    finish(right)
    return figure


def panels_figure(
    panels: Mapping[str, list[Curve]], *, x: str, y: str, trained: float | None, title: str = ""
) -> Figure:
    """Return a figure with one panel for each entry, side by side, with one scale and one legend."""
    figure = Figure(figsize=(1.5 + 5 * len(panels), 4.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    figure.suptitle(title)
    for axes, (label, curves) in zip(all_axes, panels.items(), strict=True):
        draw_curves(axes, curves, trained=trained)
        axes.set_title(label)
        axes.set_xlabel(x)
        axes.legend().remove()
    all_axes[0].set_ylabel(y)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG; the file is replaced in one step."""
    draft = path.with_name(path.name + ".draft")
    figure.savefig(draft, dpi=130, format="png")
    draft.replace(path)


def _binned(nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means over half octaves; single positions are noisy if there are few blocks."""
    contexts = np.arange(1, len(nll) + 1)
    bins = np.ceil(2 * np.log2(contexts)).astype(int)  # closed above, so that the last position has no bin of its own
    numbers = np.unique(bins)
    mean = lambda values: np.array([values[bins == n].mean() for n in numbers])
    return mean(contexts), mean(nll)


def finish(axes: Axes) -> None:
    """Add the grid, the frame and the legend that all curves have."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)

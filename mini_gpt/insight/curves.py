"""The style of all figures, and plots of loss or accuracy against length or position."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mini_gpt.data import spans
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime import files

COLOURS = 10  # of matplotlib's cycle; later curves are dashed
LINES, MARKERS = ("-", "--", "-.", ":"), "os^Dv"  # 20 pairs, which differ in grey print


class Curve(NamedTuple):
    """One line of a plot. low, high: the range of y over several seeds."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, *, title: str | None = None, **options: Any):
    """Return a figure, and its axes as `Figure.subplots` returns them. size: in inches."""
    figure = Figure(figsize=size, layout="constrained")
    if title is not None:
        figure.suptitle(title)
    return figure, figure.subplots(rows, columns, **options)


def finish(axes: Axes, **labels: str) -> None:
    """Set the labels, and apply the style of all plots: grid, frame and legend."""
    axes.set(**labels)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def label_heads(axes: Axes, layers: int, heads: int, title: str) -> None:
    """Label the axes of a grid of layers (downwards) and heads, and remove its frame."""
    axes.set(xlabel="head", ylabel="layer", title=title)
    axes.set(xticks=range(0, heads, every(heads)), yticks=range(0, layers, every(layers)))
    axes.set_ylim(layers - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def every(count: int) -> int:
    """Return n so that a tick at each n-th of `count` heads or layers has room for its label."""
    return 1 + count // 25


def token_label(text: str) -> str:
    """Return a token's text with signs for line breaks, tabs, and spaces at its ends; ∅ for a token without text."""
    with_spaces = re.sub(r"\A +| +\Z", lambda spaces: "·" * len(spaces[0]), text)
    return with_spaces.replace("\n", "⏎").replace("\t", "⇥") or "∅"


def token_labels(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """Return the `token_label` of each token."""
    return [token_label(text) for text in spans.decode_each(tokens, tokenizer)]


def plot_curve(axes: Axes, curve: Curve, colour: str, style: str = "-", marker: str = "o") -> None:
    """Plot a curve, with the range over seeds as a band. A curve of one point is a large marker above the others."""
    size, layer = (9, 3) if len(curve.x) == 1 else (4, 2)
    axes.plot(curve.x, curve.y, style, color=colour, marker=marker, markersize=size, label=curve.label, zorder=layer)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def plot_nth_curve(axes: Axes, curve: Curve, number: int) -> None:
    """Plot a curve with the colour, the line and the marker of a number from 0."""
    plot_curve(axes, curve, f"C{number}", LINES[number % len(LINES)], MARKERS[number % len(MARKERS)])


def plot_curves(axes: Axes, curves: Iterable[Curve], *, trained: float | None = None) -> None:
    """Plot curves against length, on a logarithmic axis for a wide range. trained: the training length, to mark."""
    lengths = set()
    for number, curve in enumerate(curves):
        plot_nth_curve(axes, curve, number)
        lengths |= set(curve.x)
    ticks = sorted(lengths)
    logarithmic = bool(ticks) and ticks[-1] > 4 * ticks[0]
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, tick_labels(ticks, logarithmic))
    axes.xaxis.set_minor_locator(NullLocator())
    if trained is not None:
        _mark_trained_length(axes, trained)
        axes.annotate("trained", (trained, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
                      textcoords="offset points", color="grey", fontsize=8)  # fmt: skip
    finish(axes)


def tick_labels(ticks: list[float], logarithmic: bool) -> list[str]:
    """Return a label for each of the sorted ticks, empty if it would overlap the previous label."""
    places = np.log2(ticks) if logarithmic else np.asarray(ticks)
    labels, last = [], -np.inf
    for tick, place in zip(ticks, places, strict=True):
        label = f"{tick:g}"
        fits = place - last >= 0.0225 * len(label) * (places[-1] - places[0])  # 0.0225: digit width / axis width
        labels.append(label if fits else "")
        last = place if fits else last
    return labels


def extrapolation_figure(curves: Iterable[Curve], by_position: Mapping[str, list[float]], *, trained: int) -> Figure:
    """Return a plot of loss by context length beside a plot of loss by tokens of context, in nats per token."""
    figure, (left, right) = new_figure((11, 4.3), 1, 2, subplot_kw={"ylabel": "loss (nats per token)"})
    plot_curves(left, curves, trained=trained)
    left.set(xlabel="context length (tokens)", title="By context length")
    for length, nll in by_position.items():
        right.plot(*_binned(np.asarray(nll)), label=f"blocks of {length}", linewidth=1.5)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    _mark_trained_length(right, trained)
    finish(right, xlabel="tokens of context before the target", title="By context before the target")
    return figure


def panels_figure(panels: Mapping[str, list[Curve]], *, x: str, y: str, trained: float | None, title="") -> Figure:
    """Return a figure with one panel per entry, side by side, a common y axis and one legend."""
    size = (1.5 + 5 * len(panels), 4.6)
    figure, (all_axes,) = new_figure(size, 1, len(panels), title=title, sharey=True, squeeze=False)
    for axes, (label, curves) in zip(all_axes, panels.items(), strict=True):
        plot_curves(axes, curves, trained=trained)
        axes.set(title=label, xlabel=x)
        axes.legend().remove()
    all_axes[0].set_ylabel(y)
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in all_axes]
    handles = {label: handle for pair in pairs for handle, label in pair}  # each label once
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    return figure


def shares_figure(title: str, curves: list[Curve], *, x: str, y: str, trained: float | None) -> Figure:
    """Return a figure with one panel of shares from 0 to 1."""
    figure = panels_figure({title: curves}, x=x, y=y, trained=trained)
    figure.axes[0].set_ylim(-0.03, 1.03)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the path's suffix."""
    image = io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # TrueType: journals refuse Type 3
        figure.savefig(image, dpi=130, format=path.suffix[1:])
    files.write_bytes(path, image.getvalue())


def _binned(nll: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return context lengths and losses, averaged in bins of half an octave, as single positions are noisy."""
    contexts = np.arange(1, len(nll) + 1)
    bins = np.ceil(2 * np.log2(contexts)).astype(int)  # ceil: a length of 2^n shares a bin with shorter lengths
    in_bins = [bins == number for number in np.unique(bins)]
    lengths, losses = (np.array([values[is_in].mean() for is_in in in_bins]) for values in (contexts, nll))
    return lengths, losses


def _mark_trained_length(axes: Axes, length: float) -> None:
    axes.axvline(length, color="grey", linestyle="--", linewidth=1, zorder=0)

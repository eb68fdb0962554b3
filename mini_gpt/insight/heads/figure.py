"""The figure of a head report: a grid of labels, beside the strengths for each kind of key."""

import collections
import itertools
import textwrap
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from mini_gpt.insight import colours, curves
from mini_gpt.insight.heads.scores import layer_of

MOST_ROWS = 64  # heads that have a row each; a figure of more has a row for each layer
WIDEST = 12  # characters in a line of a label
MAPS = {"Set3": "012345679ab", "Pastel1": "034567", "Pastel2": "0123456"}  # of colours, unlike those below
PALETTE = [colormaps[name](int(number, 16)) for name, numbers in MAPS.items() for number in numbers]
OTHER_COLOURS = {"mixed": "#d8d8d8", "global": "#b3cde3"}  # of labels that are not kinds


def head_figure(rows: list[dict[str, Any]], *, title: str) -> Figure:
    """Return a figure: a grid of labels, layer 0 at the top, beside the strengths, one row per head.

    With more than MOST_ROWS heads, labels are colours, and each layer has one row: for each kind, its strongest head.
    """
    every = list(rows[0]["kinds"])  # a window may hide all keys of a kind from some layers
    kinds = [kind for kind in every if any(row["kinds"][kind]["queries"] for row in rows)] or every
    places, heads = list(dict.fromkeys(map(layer_of, rows))), 1 + max(row["head"] for row in rows)
    layers, is_large = len(places), len(rows) > MOST_ROWS
    cell_width, cell_height = (0.42, 0.3) if is_large else (1.15, 0.75)  # inches
    height = max(4.2, 1.8 + (0 if is_large else 0.2) * len(rows), 1.8 + cell_height * layers)
    left_width = max(4.0, cell_width * heads)
    ratios = (left_width, 1.5 + 0.55 * len(kinds))
    figure, (left, right) = curves.new_figure((3.5 + sum(ratios), height), 1, 2, title=title, width_ratios=ratios)
    curves.label_heads(left, layers, heads, "What each head attends to")
    left.set_xlim(-0.5, heads - 0.5)
    names = [f"{attention} {layer}".strip() for attention, layer in places]
    left.set_yticks(range(layers), names)
    if is_large:
        _plot_colours(left, rows, kinds)
        strongest = [_strongest([row for row in rows if layer_of(row) == place], kinds) for place in places]
        _plot_strengths(right, strongest, kinds, names, "layer: its strongest head")
    else:
        _plot_labels(left, rows, kinds)
        names = [f"{row.get('attention', '')} {row['layer']}.{row['head']}".strip() for row in rows]
        _plot_strengths(right, rows, kinds, names, "layer.head")
    return figure


def label_colours(kinds: list[str]) -> dict[str, Any]:
    """Return {label: colour} of these kinds, and of the labels that are not kinds."""
    return dict(zip(kinds, itertools.cycle(PALETTE), strict=False)) | OTHER_COLOURS


def _plot_labels(axes: Axes, rows: list[dict[str, Any]], kinds: list[str]) -> None:
    colour_of = label_colours(kinds)
    rounded = "round,pad=0,rounding_size=0.06"
    places = list(dict.fromkeys(map(layer_of, rows)))
    for row in rows:
        x, y, label = row["head"], places.index(layer_of(row)), row["label"]
        axes.add_patch(FancyBboxPatch((x - 0.44, y - 0.42), 0.88, 0.84, boxstyle=rounded, color=colour_of[label]))
        strength = row["kinds"].get(label, {}).get("strength")
        value = f"{strength:.2f}" if strength is not None else f"entropy {row['entropy']:.2f}"
        words = textwrap.fill(label, WIDEST)
        words += f" {row['offset']}" if label == "fixed offset" else ""
        axes.text(x, y, f"{words}\n{value}", ha="center", va="center", fontsize=8)


def _plot_colours(axes: Axes, rows: list[dict[str, Any]], kinds: list[str]) -> None:
    """Plot a small cell in its label's colour for each head, with the strength or the entropy, and a legend below."""
    colour_of, places = label_colours(kinds), list(dict.fromkeys(map(layer_of, rows)))
    for row in rows:
        x, y, label = row["head"], places.index(layer_of(row)), row["label"]
        axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, color=colour_of[label]))
        strength = row["kinds"].get(label, {}).get("strength")
        axes.text(x, y, f"{row['entropy'] if strength is None else strength:.2f}", ha="center", va="center", fontsize=7)
    counts = collections.Counter(row["label"] for row in rows).most_common()
    signs = [Patch(color=colour_of[label], label=f"{label}: {count}") for label, count in counts]
    axes.legend(handles=signs, loc="upper left", bbox_to_anchor=(0, -0.07), ncols=2, frameon=False, fontsize=8)


def _strongest(rows: list[dict[str, Any]], kinds: list[str]) -> dict[str, Any]:
    """Return for each kind the entry of the head with the largest strength, as one row."""
    strengths = np.array([[row["kinds"][kind]["strength"] for kind in kinds] for row in rows], float)
    places = np.nan_to_num(strengths, nan=-np.inf).argmax(axis=0)
    best = {kind: rows[place] for kind, place in zip(kinds, places, strict=True)}
    also = [kind for kind, row in best.items() if kind in (row["label"], *row["also"])]
    return {"kinds": {kind: row["kinds"][kind] for kind, row in best.items()}, "label": None, "also": also}


def _plot_strengths(axes: Axes, rows: list[dict[str, Any]], kinds: list[str], names: list[str], ylabel: str) -> None:
    strengths = np.array([[row["kinds"][kind]["strength"] for kind in kinds] for row in rows], float)  # null: NaN
    axes.set_facecolor("#dddddd")
    image = colours.heat_map(axes, strengths, bar="strength")
    axes.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8 if len(rows) < 50 else 6)
    if len(rows) <= MOST_ROWS:
        is_clear = lambda place: kinds[place[1]] in (rows[place[0]]["label"], *rows[place[0]]["also"])
        text_of = lambda _, strength: f"{strength:.1f}" if abs(strength) >= 0.1 else ""
        colours.write_cells(image, text_of, is_clear, fontsize=7.5)
    grey = ", grey is not measured" if np.isnan(strengths).any() else ""
    title = f"Strength for each kind: 0 is chance, 1 is all attention{grey}; bold: clear enough for a label"
    axes.set(ylabel=ylabel, title=title)
    axes.spines[:].set_visible(False)

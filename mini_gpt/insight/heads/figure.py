"""The figure of a head report: each head's label, and its strength for each kind of key."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

MIXED, GLOBAL = "#d8d8d8", "#b3cde3"


def head_figure(rows: list[dict[str, Any]], *, title: str) -> Figure:
    """Return a figure: a grid of labels, with layers upwards, beside the strengths, with one line per head."""
    kinds = [kind for kind, values in rows[0]["kinds"].items() if values["queries"]] or list(rows[0]["kinds"])
    layers, heads = (1 + max(row[axis] for row in rows) for axis in ("layer", "head"))
    height = max(4.2, 1.8 + 0.2 * len(rows), 1.8 + 0.75 * layers)
    figure = Figure(figsize=(3.5 + 1.15 * heads + 0.55 * len(kinds), height), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1.15 * heads, 1.5 + 0.55 * len(kinds)))
    _draw_labels(left, rows, kinds, layers, heads)
    _draw_strengths(right, rows, kinds)
    return figure


def _draw_labels(axes: Axes, rows: list[dict[str, Any]], kinds: list[str], layers: int, heads: int) -> None:
    colours = dict(zip(kinds, [colormaps["Set3"](n) for n in range(12)] * 2, strict=False)) | {
        "mixed": MIXED,
        "global": GLOBAL,
    }
    for row in rows:
        axes.add_patch(_square(row["head"], row["layer"], colours[row["label"]]))
        strength = row["kinds"].get(row["label"], {}).get("strength")
        figure_of = f"{strength:.2f}" if strength is not None else f"entropy {row['entropy']:.2f}"
        words = "\n".join(row["label"].split(" ")) if len(row["label"]) > 10 else row["label"]
        axes.text(row["head"], row["layer"], f"{words}\n{figure_of}", ha="center", va="center", fontsize=7)
    axes.set(xlim=(-0.5, heads - 0.5), ylim=(-0.5, layers - 0.5), xticks=range(heads), yticks=range(layers))
    axes.set(xlabel="head", ylabel="layer", title="What each head attends to")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _square(x: int, y: int, colour: Any):
    return FancyBboxPatch((x - 0.44, y - 0.42), 0.88, 0.84, boxstyle="round,pad=0,rounding_size=0.06", color=colour)


def _draw_strengths(axes: Axes, rows: list[dict[str, Any]], kinds: list[str]) -> None:
    strengths = np.array([[row["kinds"][kind]["strength"] or 0.0 for kind in kinds] for row in rows])
    image = axes.imshow(strengths, vmin=-1, vmax=1, cmap="PuOr_r", aspect="auto")
    axes.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    names = [f"{row['layer']}.{row['head']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8 if len(rows) < 50 else 6)
    for (y, x), strength in np.ndenumerate(strengths):
        if abs(strength) >= 0.1 and len(rows) <= 64:
            ink = "white" if abs(strength) > 0.6 else "black"
            axes.text(x, y, f"{strength:.1f}".replace("0.", "."), ha="center", va="center", fontsize=6.5, color=ink)
    axes.set(ylabel="layer.head", title="Strength for each kind: 0 as by chance, 1 all attention")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02)

"""Draw the results of benchmarks/open_model.py: python -m benchmarks.open_model_figure DIR.

Writes DIR.png, about heads, DIR_windows.png and DIR_beyond.png: those whose parts are in DIR.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mini_gpt.commands import command_line
from mini_gpt.insight import curves
from mini_gpt.insight.curves import Curve, finish, new_figure, plot_curve

FIGURES = {  # {end of name: parts}
    "": ("sinks", "induction", "facts", "pruning"),
    "_windows": ("windows",),
    "_beyond": ("beyond",),
}


def figure(found: dict[str, dict[str, Any]]) -> Figure:
    """Return a plot of each part, two in a row."""
    columns = min(2, len(found))
    rows = len(found) // columns
    drawn, grid = new_figure((5.5 * columns, 3.8 * rows), rows, columns, squeeze=False)
    for axes, part in zip(grid.flat, found, strict=True):
        DRAW[part](axes, found[part])
    return drawn


def _sinks(axes: Axes, found: dict[str, Any]) -> None:
    layers = list(range(len(found["mean_of_layer"])))
    plot_curve(axes, Curve("mean over heads", layers, found["mean_of_layer"]), "C0")
    plot_curve(axes, Curve("strongest head", layers, found["largest_of_layer"]), "C1")
    axes.axhline(found["uniform"], color="grey", linestyle=":", label="uniform attention")
    finish(axes, xlabel="layer", ylabel="weight on the first token", title="Attention sinks")


def _induction(axes: Axes, found: dict[str, Any]) -> None:
    labels = {"none": "all heads", "random": "random", "induction": "induction", "previous token": "previous token"}
    for offset, case in ((-0.2, "text"), (0.2, "repeated random tokens")):
        losses = [[each["nll"] for each in found["nll_without"][name][case]] for name in labels]
        means = np.array([np.mean(each) for each in losses])
        spread = np.abs([[min(each) for each in losses], [max(each) for each in losses]] - means)
        axes.bar(np.arange(len(labels)) + offset, means, 0.4, yerr=spread, label=case, capsize=3)
    axes.set_xticks(range(len(labels)), labels.values())
    finish(axes, ylabel="loss (nats per token)", title=f"Without {found['removed']} heads of a kind")


def _facts(axes: Axes, found: dict[str, Any]) -> None:
    nll, depths = np.array(found["nll_by_depth"]), list(range(len(found["nll_by_depth"])))
    error = np.array(found["standard_error_by_depth"])
    curve = Curve("loss of the capital", depths, nll.tolist(), (nll - error).tolist(), (nll + error).tolist())
    plot_curve(axes, curve, "C0")
    axes.axhline(0, color="grey", linewidth=0.8)
    title = f"Logit lens: “The capital of … is”, {found['facts']} countries"
    finish(axes, xlabel="layers before the output", ylabel="loss (nats)", title=title)


def _pruning(axes: Axes, found: dict[str, Any]) -> None:
    first, *rest = found["rows"]
    shares = [100 * row["share"] for row in found["rows"]]
    start = first["least important"]["nll"]
    random = [[each["nll"] for each in row["random"]] for row in rest]
    least = [start, *(row["least important"]["nll"] for row in rest)]
    bounds = [[start, *(bound(each) for each in random)] for bound in (np.mean, min, max)]
    plot_curve(axes, Curve("least important by gradient", shares, least), "C0")
    plot_curve(axes, Curve("random, five draws", shares, *bounds), "C1")
    finish(axes, xlabel="removed heads (%)", ylabel="loss (nats per token)", title="Pruning without training")


def _windows(axes: Axes, found: dict[str, Any]) -> None:
    first, *rest = found["rows"]
    labels = [f"{row['length']:,}\nby {row['stride']:,}" for row in rest]
    means, errors = zip(*(row["against the first"].values() for row in rest), strict=True)
    axes.errorbar(range(len(rest)), means, errors, fmt="o", capsize=4)
    axes.set_xticks(range(len(rest)), labels)
    axes.axhline(0, color="grey", linewidth=0.8, label=f"windows of {first['length']:,} without overlap")
    finish(axes, xlabel="window and stride (tokens)", ylabel="difference (nats per token)", title="Loss by window")


def _beyond(axes: Axes, found: dict[str, Any]) -> None:
    names = {"none": "RoPE as trained", "linear": "position interpolation", "ntk": "NTK-aware", "yarn": "YaRN"}
    width = 2 * found["trained_context"] // len(found["sliding"]["bins"])
    for shift, (scaling, name) in enumerate(names.items()):
        means, errors = zip(*(each.values() for each in found["against sliding"][scaling]["bins"]), strict=True)
        middles = width * (np.arange(len(means)) + 0.38 + 0.08 * shift)  # side by side, so that all bars can be seen
        axes.errorbar(middles, means, errors, fmt="-o", markersize=3, capsize=2, linewidth=1.2, label=name)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(found["trained_context"], color="grey", linestyle="--", linewidth=1)
    title = f"Loss against sliding windows of {found['trained_context']:,}"
    finish(axes, xlabel="position (tokens)", ylabel="difference (nats per token)", title=title)
    axes.xaxis.set_major_formatter("{x:,.0f}")


DRAW = {
    "sinks": _sinks,
    "induction": _induction,
    "facts": _facts,
    "pruning": _pruning,
    "windows": _windows,
    "beyond": _beyond,
}


@command_line.command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for end, parts in FIGURES.items():
        paths = {part: directory / f"{part}.json" for part in parts}
        if all(path.exists() for path in paths.values()):
            found = {part: json.loads(path.read_text()) for part, path in paths.items()}
            curves.save(figure(found), directory.with_name(f"{directory.name}{end}.png"))


if __name__ == "__main__":
    main()

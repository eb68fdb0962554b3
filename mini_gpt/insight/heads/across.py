"""Figures of heads over several runs or tasks: what they are by depth, and how much each of them matters."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from mini_gpt.insight import colours
from mini_gpt.insight.curves import label_heads, new_figure
from mini_gpt.insight.heads.figure import OTHER_COLOURS, label_colours
from mini_gpt.insight.heads.scores import layer_of

CLEAR = 11  # kinds whose colours alone tell them apart; bars of others are hatched


def by_depth_figure(runs: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Return a figure with a column for each run: the number of heads of each label by layer, above mean strengths.

    runs: {name: the rows of heads that `heads.report` returns}. Strengths are means over the heads of a layer, of the
    labels that some head has.
    """
    labels = list(dict.fromkeys(row["label"] for rows in runs.values() for row in rows))
    kinds = [label for label in labels if label not in OTHER_COLOURS]
    colour_of = label_colours(kinds)
    size = (2.6 + 3.6 * len(runs), 4.6 + 0.24 * len(kinds))
    ratios = {"height_ratios": [3, 0.6 + 0.24 * max(len(kinds), 1)], "squeeze": False}
    figure, grid = new_figure(size, 2, len(runs), title="Kinds of heads by depth", **ratios)
    image = None
    for (name, rows), bars, below in zip(runs.items(), *grid, strict=True):
        places = list(dict.fromkeys(map(layer_of, rows)))
        layers = [f"{kind} {layer}".strip() for kind, layer in places]
        under = np.zeros(len(places))
        for label in labels:
            counts = np.array([sum(row["label"] == label and layer_of(row) == at for row in rows) for at in places])
            style = {"color": colour_of[label], "edgecolor": "grey", "hatch": "///" if label in kinds[CLEAR:] else None}
            bars.bar(range(len(places)), counts, bottom=under, label=label, width=0.8, **style)
            under = under + counts
        bars.set(title=name, ylabel="heads", xticks=range(len(places)), xticklabels=layers, xlabel="layer")
        bars.yaxis.get_major_locator().set_params(integer=True)
        strengths_TN = np.array([[_mean_strength(rows, at, kind) for at in places] for kind in kinds or [""]], float)
        image = colours.heat_map(below, strengths_TN, signed=False)
        below.set(yticks=range(len(kinds)), yticklabels=kinds, xticks=range(len(places)), xticklabels=layers)
        below.set(xlabel="layer", title="mean strength")
    figure.colorbar(image, ax=list(grid[1]), label="0: chance, 1: all")
    handles = dict(zip(*reversed(grid[0, -1].get_legend_handles_labels()), strict=True))
    grid[0, -1].legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=8)
    return figure


def _mean_strength(rows: list[dict[str, Any]], place: tuple[str, int], kind: str) -> float:
    """Return the mean over the heads of a layer; NaN if no query of the layer has such keys."""
    of_layer = [row["kinds"].get(kind, {}).get("strength") for row in rows if layer_of(row) == place]
    known = [strength for strength in of_layer if strength is not None]
    return float(np.mean(known)) if known else np.nan


def importance_figure(tasks: Mapping[str, np.ndarray]) -> Figure:
    """Return a figure with a grid of heads for each task, all in one scale: the loss that each head prevents.

    tasks: {name: the rise of the loss without the head, ablation_NH in nats per token}; NaN: not measured. A title has
    Spearman's correlation with the first task, if the grids have one shape.
    """
    limit = max(np.nanmax(np.abs(ablation_NH)) for ablation_NH in tasks.values())
    first_NH = next(iter(tasks.values()))
    layers, heads = np.max([array.shape for array in tasks.values()], axis=0)
    size = (1.6 + len(tasks) * (1.0 + 0.62 * heads), 1.9 + 0.5 * layers)
    figure, grid = new_figure(size, 1, len(tasks), title="Loss without a head, minus the loss with it", squeeze=False)
    image = None
    for axes, (name, ablation_NH) in zip(grid[0], tasks.items(), strict=True):
        image = colours.heat_map(axes, ablation_NH, limit)
        both = ablation_NH.shape == first_NH.shape and ablation_NH is not first_NH
        said = f"\nrank correlation {rank_correlation(first_NH, ablation_NH):.2f}" if both else ""
        label_heads(axes, len(ablation_NH), len(ablation_NH[0]), f"{name}{said}")
        colours.write_cells(image, lambda _, value: f"{round(value, 2) + 0.0:.2f}" if np.isfinite(value) else "")
    figure.colorbar(image, ax=list(grid[0]), label="nats per token")
    return figure


def rank_correlation(first_NH: np.ndarray, second_NH: np.ndarray) -> float:
    """Return Spearman's correlation of the heads that both have measured; equal values have their mean rank."""
    both_NH = np.isfinite(first_NH) & np.isfinite(second_NH)
    return float(stats.spearmanr(first_NH[both_NH], second_NH[both_NH]).statistic)

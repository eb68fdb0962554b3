"""Figures of a study: metrics by length, paired differences with intervals, and training curves."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.insight import curves
from mini_gpt.insight.curves import Curve
from mini_gpt.study import tables
from mini_gpt.suites.base import Row, Suite

COLOURS = {"shown": "C2", "opposite shown": "C3", "equivalent": "C0"}  # of verdicts; others are grey


def by_length(suite: Suite, table: list[Row], trained: int | None) -> Figure:
    """Plot the mean of the suite's first value over the seeds, and its range, against the length."""
    value = suite.values[0]
    panels: dict[str, list[Curve]] = {}
    for label, labelled in tables.groups(table, "measured").items():
        for condition, rows in tables.groups(labelled, "condition").items():
            points = sorted((row for row in rows if value not in row["reasons"]), key=lambda row: row["length"])
            y, low, high = ([row[f"{value}_{part}"] for row in points] for part in ("mean", "lowest", "highest"))
            curve = Curve(condition, [row["length"] for row in points], y, low, high)
            panels.setdefault(label or suite.name, []).append(curve)
    title = "Mean, and range over the seeds"
    return curves.panels_figure(panels, title=title, x=suite.x_label, y=suite.y_label, trained=trained)


def differences(rows: Sequence[Row], level: float) -> dict[str, Figure]:
    """Plot each paired difference with its interval and its seeds; one figure for each metric, since units differ.

    rows: of comparisons.csv, with `differences` as a list.
    """
    by_metric = tables.groups([row for row in rows if row["difference"] is not None], "metric")
    return {metric: _differences(drawn, metric, level) for metric, drawn in by_metric.items()}


def _differences(rows: list[Row], metric: str, level: float) -> Figure:
    figure, axes = curves.new_figure((9, 1.4 + 0.34 * len(rows)), title="Paired differences")
    for place, row in enumerate(rows):
        colour, effect = COLOURS.get(row["verdict"], "grey"), row["smallest_effect"]
        axes.plot(row["differences"], [place] * row["seeds"], "|", color=colour, markersize=7, alpha=0.6)
        axes.plot(row["difference"], place, "o", color=colour, markersize=5)
        if row["interval_low"] is not None:
            axes.plot([row["interval_low"], row["interval_high"]], [place, place], color=colour, linewidth=2)
        if effect:
            axes.fill_betweenx([place - 0.4, place + 0.4], -effect, effect, color="grey", alpha=0.18, linewidth=0)
        right = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8}
        axes.annotate(row["verdict"], (1.01, place), color=colour, **right)
    several = len({(row["suite"], row["label"]) for row in rows}) > 1
    parts = [[f"{row['first']} − {row['second']}", *([row["suite"], row["label"]] if several else [])] for row in rows]
    labels = [", ".join([*filter(None, part), str(row["length"])]) for part, row in zip(parts, rows, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    label = f"difference of {metric}: mean, {100 * (1 - level):g}% interval, and each seed; shaded: too small to matter"
    curves.finish(axes, xlabel=label)
    return figure


def by_size(rows: Sequence[Row], level: float) -> dict[str, Figure]:
    """Plot the paired differences with intervals against the parameters of the second condition, for each metric.

    rows: of comparisons.csv; those without a size or an interval are left out.
    """
    found, drawn = {}, [row for row in rows if row.get("parameters_second") and row["interval_low"] is not None]
    for metric, of_metric in tables.groups(drawn, "metric").items():
        figure, axes = curves.new_figure((8, 4.4), title="Paired differences by size")
        where = lambda row: ", ".join(str(row[name]) for name in ("pair", "suite", "label", "length") if row[name])
        named = [row | {"curve": where(row)} for row in of_metric]
        for number, (label, points) in enumerate(tables.groups(named, "curve").items()):
            names = ("parameters_second", "difference", "interval_low", "interval_high")
            x, y, low, high = (np.array([row[name] for row in points]) for name in names)
            marker = curves.MARKERS[number % len(curves.MARKERS)]
            axes.errorbar(x, y, [y - low, high - y], fmt=marker, capsize=4, label=label)
        axes.axhline(0, color="black", linewidth=0.8)
        what = f"difference of {metric}: mean, {100 * (1 - level):g}% interval"
        curves.finish(axes, xscale="log", xlabel="parameters of the second condition", ylabel=what)
        found[metric] = figure
    return found


def training(losses: Mapping[str, list[np.ndarray]]) -> Figure:
    """Plot the training loss of each condition, as mean and range over the seeds."""
    figure, axes = curves.new_figure((8, 4.4))
    for number, (condition, seeds) in enumerate(losses.items()):
        all_SX = np.stack(seeds)
        share_X = (np.arange(all_SX.shape[1]) + 0.5) / all_SX.shape[1] * 100
        complete = np.isfinite(all_SX).all(axis=0)
        y, low, high = (part(all_SX[:, complete], axis=0) for part in (np.mean, np.min, np.max))
        curves.plot_nth_curve(
            axes, Curve(condition, *(list(part) for part in (share_X[complete], y, low, high))), number
        )
    curves.finish(axes, xlabel="training steps (%)", ylabel="training loss (nats per token)")
    axes.set_title("Training: mean, and range over the seeds")
    return figure

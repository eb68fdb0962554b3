"""The figure of a pruning curve: each head's importance, and the loss as heads go, by importance and at random."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.insight.curves import finish


def pruning_figure(importance_NH: np.ndarray, rows: list[dict[str, Any]], *, title: str) -> Figure:
    """Gives importances as a grid (layers upwards) beside the curves, loss in nats a token."""
    layers, heads = importance_NH.shape
    figure = Figure(figsize=(7.2 + 0.55 * heads, max(4.3, 1.6 + 0.4 * layers)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1.4 + 0.55 * heads, 5.5))
    image = left.imshow(importance_NH, origin="lower", cmap="YlGnBu", vmin=0, aspect="auto")
    left.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers), title="Importance of each head")
    left.tick_params(length=0)
    left.spines[:].set_visible(False)
    figure.colorbar(image, ax=left, label="mean |∂loss/∂mask|, nats a token", shrink=0.8)

    by_seed: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row)
    share = [100 * row["share"] for row in by_seed[None]]
    right.plot(
        share, [row["nll"] for row in by_seed.pop(None)], marker="o", markersize=4, label="least important first"
    )
    random = np.array([[row["nll"] for row in of_seed] for of_seed in by_seed.values()])
    right.plot(
        share, random.mean(axis=0), marker="o", markersize=4, color="C1", label=f"at random, {len(random)} seeds"
    )
    right.fill_between(share, random.min(axis=0), random.max(axis=0), color="C1", alpha=0.18, linewidth=0)
    right.set(
        xlabel="heads removed (%)", ylabel="loss (nats a token)", title="Loss without them, nothing trained again"
    )
    finish(right)
    return figure

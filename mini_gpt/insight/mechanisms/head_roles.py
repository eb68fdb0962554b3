"""What the circuits of all heads say: copying, the strongest pairs of tokens, and the earlier heads that are read."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import colours
from mini_gpt.insight.curves import label_heads, new_figure
from mini_gpt.insight.mechanisms.circuits import NOT_IN_QK, Head, unsupported
from mini_gpt.model import running

DISTANCE = 1  # tokens from the key to the query, in the QK circuit
LARGEST_LABELLED = 24  # heads; with more, the maps of composition have labels of layers only

Pair = tuple[int, int]


class Role(NamedTuple):
    """What one head does by its weights.

    copying: see `Head.copying`.
    attends: the pairs (query's token, key's token) with the largest logits relative to the mean of the query's row,
      which the softmax ignores; None if the QK circuit is no product of weights.
    writes: the pairs (attended token, token whose logit is raised) with the largest changes relative to the mean of the
      row.
    """

    layer: int
    head: int
    copying: float
    attends: list[Pair] | None
    writes: list[Pair]


def roles(
    model: LoadedModel, tokens_T: np.ndarray, pairs: int, places: Sequence[tuple[int, int]] | None = None
) -> list[Role]:
    """Return the role of each head, with this many pairs among the given tokens.

    places: (layer, head) of the heads; None: all.

    Raises UserError for a model field with which the OV circuit is not a product of weights.
    """
    module, config = running.unstack(model.merge()), model.config.model
    found = []
    places = [*np.ndindex(config.num_layers, config.num_heads)] if places is None else places
    for layer, number in places:
        head = Head(model, layer, number, module)
        has_qk = unsupported(config, NOT_IN_QK, head.kind.position) is None
        attends = _largest(head.qk(tokens_T, DISTANCE), tokens_T, pairs) if has_qk else None
        found.append(Role(layer, number, head.copying(tokens_T), attends, _largest(head.ov(tokens_T), tokens_T, pairs)))
    return found


def _largest(scores_TT: np.ndarray, tokens_T: np.ndarray, count: int) -> list[Pair]:
    """Return the token pairs (row, column) with the largest scores above the mean of the row, the largest first."""
    above_TT = scores_TT - scores_TT.mean(1, keepdims=True)
    flat = np.argsort(-above_TT, axis=None, kind="stable")[:count]
    rows, columns = np.unravel_index(flat, above_TT.shape)
    return list(zip(tokens_T[rows].tolist(), tokens_T[columns].tolist(), strict=True))


def roles_figure(copying_NH: np.ndarray, composition: dict[str, np.ndarray], *, title: str) -> Figure:
    """Return a figure: the copying scores of the heads, layer 0 at the top, and composition by input of the later head.

    composition: as `circuits.composition` returns it. A model of one layer has none.
    """
    layers, heads = copying_NH.shape
    maps = composition if layers > 1 else {}
    side = 1.8 + max(2.0, min(5.0, 0.17 * layers * heads))
    first = 1.8 + max(2.0, 0.5 * heads)
    size = (first + side * len(maps), max(side, 1.8 + 0.4 * layers))
    ratios = [first, *(side for _ in maps)]
    figure, panels = new_figure(size, 1, 1 + len(maps), title=title, width_ratios=ratios, squeeze=False)
    axes, *others = panels[0]
    colours.heat_map(axes, copying_NH, bar="score: 1 raises the attended token")
    label_heads(axes, layers, heads, "Copying")
    limit = max((np.nanmax(scores) for scores in maps.values()), default=1.0)
    for axes, (name, scores) in zip(others, maps.items(), strict=True):
        image = _composition_map(axes, scores.reshape(layers * heads, -1), limit, (layers, heads))
        axes.set_title(f"{name.capitalize()} composition")
        axes.set_ylabel("earlier head")
    if maps:
        figure.colorbar(image, ax=others, label="share of the norm", shrink=0.8, pad=0.01)
    return figure


def _composition_map(axes: Axes, scores: np.ndarray, limit: float, shape: tuple[int, int]) -> AxesImage:
    layers, heads = shape
    image = colours.heat_map(axes, scores, limit, signed=False)
    places = [float(number) for number in range(layers * heads)]
    names = [f"{layer}.{head}" for layer, head in np.ndindex(layers, heads)]
    if len(names) > LARGEST_LABELLED:
        places = [layer * heads + (heads - 1) / 2 for layer in range(layers)]
        names = [f"layer {layer}" for layer in range(layers)]
    axes.set_xticks(places, names, fontsize=8, rotation=90)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlabel("later head")
    for edge in range(1, layers):
        axes.axhline(edge * heads - 0.5, color="#d8d8d8", linewidth=0.6)
        axes.axvline(edge * heads - 0.5, color="#d8d8d8", linewidth=0.6)
    return image

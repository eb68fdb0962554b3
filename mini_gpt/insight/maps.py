"""Figures of attention maps, with the tokens as labels: of several models, and of each head of cross-attention."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mini_gpt.data import spans
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.insight import attention
from mini_gpt.insight.curves import new_figure
from mini_gpt.insight.examples import Alignment, Example
from mini_gpt.model.loaded import LoadedModel

ALIGNED = "#35d6ff"  # the colour of the frames around aligned tokens
NARROWEST, WIDEST, TOKEN = 2.2, 6.0, 0.09  # inches: limits of a map's width, and the space of one token
MOST_TOKENS = 32  # of a text; a pair is whole, because a part of a source has other attention
MOST_LABELS = 80  # tokens along an axis; more would overlap


class Panel(NamedTuple):
    """A model and what it reads: the tokens of a text, or a pair if the model has an encoder."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer
    text: np.ndarray | Example


class _Row(NamedTuple):
    """Maps side by side. weights_NLS: one for each of `titles`. queries, keys: the texts of the tokens."""

    label: str
    titles: list[str]
    weights_NLS: np.ndarray
    queries: list[str]
    keys: list[str]
    alignment: Alignment = ()


def figure(panels: Sequence[Panel]) -> Figure:
    """Return a figure of attention averaged over the heads: one map per layer, with keys across and queries downwards.

    A model has one row of maps, and with an encoder three: encoder, decoder and cross-attention, with the source across
    and the token to write downwards. Aligned tokens have a frame.
    """
    rows = [row for panel in panels for row in _rows(panel)]
    return _draw(rows, "Attention averaged over the heads")


def cross_figure(panel: Panel) -> Figure:
    """Return a figure of cross-attention: a map for each layer (downwards) and head (across), as in `figure`."""
    pair = panel.text
    assert isinstance(pair, Example)
    layers = attention.maps_by_kind(panel.model, pair.inputs[None], pair.source[None])["cross"]
    source, written = _texts(panel.tokenizer, pair.source), _texts(panel.tokenizer, pair.written)
    rows = []
    for layer, maps in enumerate(layers):
        weights_HLS = np.asarray(maps.weights_BHLS[0])
        titles = [f"head {layer}.{head}" for head in range(len(weights_HLS))]
        rows.append(_Row(f"layer {layer}: token to write", titles, weights_HLS, written, source, pair.alignment))
    return _draw(rows, f"{panel.name}: cross-attention")


def _rows(panel: Panel) -> list[_Row]:
    name, model, tokenizer, text = panel
    label = f"{name}\nposition={model.config.model.position}"
    averaged = lambda layers: np.stack([np.asarray(maps.weights_BHLS[0]).mean(axis=0) for maps in layers])
    titles = lambda layers: [f"layer {layer}" for layer in range(len(layers))]
    if not isinstance(text, Example):
        layers, texts = attention.attention_maps(model, text[None]), _texts(tokenizer, text)
        return [_Row(label, titles(layers), averaged(layers), texts, texts)]
    found = attention.maps_by_kind(model, text.inputs[None], text.source[None])
    source, inputs, written = (_texts(tokenizer, tokens) for tokens in text[:3])
    encoder, decoder, cross = ((kind, titles(found[kind]), averaged(found[kind])) for kind in attention.KINDS)
    return [
        _Row(f"{label}\n{encoder[0]}: source", *encoder[1:], source, source),
        _Row(f"{label}\n{decoder[0]}: token read", *decoder[1:], inputs, inputs),
        _Row(f"{label}\n{cross[0]}: token to write", *cross[1:], written, source, text.alignment),
    ]


def _texts(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
    return [spans.decode([token], tokenizer).replace("\n", "⏎") for token in tokens]


def _draw(rows: Sequence[_Row], title: str) -> Figure:
    columns = max(len(row.titles) for row in rows)
    side = lambda tokens: min(WIDEST, max(NARROWEST, TOKEN * tokens))
    width = side(max(len(row.keys) for row in rows))
    heights = [0.8 + width * len(row.queries) / max(len(row.keys), 1) for row in rows]
    size = ((width + 0.4) * columns + 1, sum(heights))
    title += ": " if size[0] > 9 else "\n"
    title += "square root of each weight, from 0 (black) to 1"
    figure, grid = new_figure(size, len(rows), columns, title=title, squeeze=False, height_ratios=heights)
    for row, line in zip(rows, grid, strict=True):
        for axes in line[len(row.titles) :]:
            axes.set_visible(False)
        for number, (axes, name, weights_LS) in enumerate(zip(line, row.titles, row.weights_NLS, strict=False)):
            _draw_map(axes, weights_LS, row if number == 0 else row._replace(queries=[]))
            axes.set_title(name, fontsize=9)
        line[0].set_ylabel(row.label, fontsize=9)
    return figure


def _draw_map(axes: Axes, weights_LS: np.ndarray, row: _Row) -> None:
    for labels, ticks in ((row.keys, axes.set_xticks), (row.queries, axes.set_yticks)):
        shown = labels if len(labels) <= MOST_LABELS else []
        ticks(range(len(shown)), shown, fontsize=5.5)
    if max(map(len, row.keys)) > 2:
        axes.tick_params(axis="x", labelrotation=90)  # otherwise longer labels would overlap
    axes.tick_params(length=0, pad=1)
    axes.imshow(np.sqrt(weights_LS), cmap="magma", vmin=0, vmax=1)
    for (first, end), (first_query, end_query) in row.alignment:
        corner = (first + 0.5, first_query - 0.5)  # the first source token is a separator
        axes.add_patch(Rectangle(corner, end - first, end_query - first_query, fill=False, edgecolor=ALIGNED))

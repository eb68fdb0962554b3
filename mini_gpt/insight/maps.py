"""Figures of attention maps, with the tokens as labels: of several models, and of each head of cross-attention."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from mini_gpt.data import spans
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, colours, removed
from mini_gpt.insight.curves import new_figure, token_labels
from mini_gpt.insight.examples import Alignment, Example
from mini_gpt.insight.observing import AttentionMaps
from mini_gpt.insight.words import Words, grouped, of_tokens

NARROWEST, WIDEST, TOKEN = 2.4, 7.0, 0.115  # inches: limits of a map's width, and the space of one token
MOST_TOKENS = 32  # of a text; a pair is whole, because a part of a source has other attention
MOST_HEADS = 6  # of a figure of heads side by side
MOST_LABELS = 80  # tokens along an axis; more would overlap


class Panel(NamedTuple):
    """A model and what it reads: the tokens of a text, also to show by words, or a pair if it has an encoder."""

    name: str
    model: LoadedModel
    tokenizer: Tokenizer
    text: np.ndarray | Words | Example


class _Row(NamedTuple):
    """Maps side by side.

    weights_NLS: one for each of `titles`.
    queries, keys: the texts of the tokens.
    seen_NLS: False for masked pairs.
    """

    label: str
    titles: list[str]
    weights_NLS: np.ndarray
    seen_NLS: np.ndarray
    queries: list[str]
    keys: list[str]
    alignment: Alignment = ()


def figure(panels: Sequence[Panel]) -> Figure:
    """Return a figure of attention averaged over the heads: one map per layer, with keys across and queries downwards.

    A model has one row of maps, and with an encoder three: encoder, decoder and cross-attention, with the source across
    and the token to write downwards. Aligned tokens have a frame.
    """
    return _draw([row for panel in panels for row in _rows(panel)], "Attention averaged over the heads")


def heads_figure(panel: Panel) -> Figure:
    """Return a figure of up to MOST_HEADS heads side by side, as in `figure`: those with the lowest relative entropy.

    The relative entropy is the mean over the text's queries, see `attention.relative_entropy`.
    """
    layers, texts = _of_text(panel)
    weights_XLS, seen_XLS = (  # axis X: the heads of all layers
        np.concatenate([array[0] for array in arrays])
        for arrays in zip(*((maps.weights_BHLS, maps.seen_BHLS) for maps in layers), strict=True)
    )
    entropy_XL = np.concatenate(
        [attention.relative_entropy(maps.weights_BHLS, maps.seen_BHLS.sum(-1))[0] for maps in layers]
    )
    heads = sorted(np.argsort(entropy_XL.mean(axis=-1), kind="stable")[:MOST_HEADS].tolist())
    names = [f"{layer}.{head}" for layer, head in removed.existing(panel.model.config.model)]
    rows = []
    for first in range(0, len(heads), 3):
        chosen = heads[first : first + 3]
        titles = [f"head {names[head]}, entropy {entropy_XL[head].mean():.2f}" for head in chosen]
        label = f"position={panel.model.config.model.position}"
        rows.append(_Row(label, titles, weights_XLS[chosen], seen_XLS[chosen], texts, texts))
    return _draw(rows, f"{panel.name}: {len(heads)} heads of the lowest entropy")


def cross_figure(panel: Panel) -> Figure:
    """Return a figure of cross-attention: a map for each layer (downwards) and head (across), as in `figure`."""
    pair = panel.text
    assert isinstance(pair, Example)
    layers = attention.maps_by_kind(panel.model, pair.inputs[None], pair.source[None])["cross"]
    source, written = (token_labels(tokens, panel.tokenizer) for tokens in (pair.source, pair.written))
    rows = []
    for layer, maps in enumerate(layers):
        weights_HLS, seen_HLS = np.asarray(maps.weights_BHLS[0]), np.asarray(maps.seen_BHLS[0])
        titles = [f"head {layer}.{head}" for head in range(len(weights_HLS))]
        rows.append(
            _Row(f"layer {layer}: token to write", titles, weights_HLS, seen_HLS, written, source, pair.alignment)
        )
    return _draw(rows, f"{panel.name}: cross-attention")


def _rows(panel: Panel) -> list[_Row]:
    name, model, tokenizer, text = panel
    label = f"{name}\nposition={model.config.model.position}"
    if not isinstance(text, Example):
        layers, texts = _of_text(panel)
        return [_averaged(label, layers, texts, texts)]
    found = attention.maps_by_kind(model, text.inputs[None], text.source[None])
    source, inputs, written = (token_labels(tokens, tokenizer) for tokens in text[:3])
    cross = _averaged(f"{label}\ncross: token to write", found["cross"], written, source)
    return [
        _averaged(f"{label}\nencoder: source", found["encoder"], source, source),
        _averaged(f"{label}\ndecoder: token read", found["decoder"], inputs, inputs),
        cross._replace(alignment=text.alignment),
    ]


def _of_text(panel: Panel) -> tuple[list[AttentionMaps], list[str]]:
    _, model, tokenizer, text = panel
    assert not isinstance(text, Example)
    if not isinstance(text, Words):
        return attention.attention_maps(model, text[None]), token_labels(text, tokenizer)
    word_L, words = of_tokens(spans.decode_in_turn(text.tokens, tokenizer))
    return grouped(attention.attention_maps(model, text.tokens[None]), word_L), [*map(str.strip, words)]


def _averaged(label: str, layers: Sequence[AttentionMaps], queries: list[str], keys: list[str]) -> _Row:
    """Return the row of the layers' maps, each the mean over heads. A pair is seen if some head sees it."""
    titles = [f"layer {layer}" for layer in range(len(layers))]
    weights_NLS = np.stack([np.asarray(maps.weights_BHLS[0]).mean(axis=0) for maps in layers])
    seen_NLS = np.stack([np.asarray(maps.seen_BHLS[0]).any(axis=0) for maps in layers])
    return _Row(label, titles, weights_NLS, seen_NLS, queries, keys)


def _draw(rows: Sequence[_Row], title: str) -> Figure:
    columns = max(len(row.titles) for row in rows)
    width = min(WIDEST, max(NARROWEST, TOKEN * max(len(row.keys) for row in rows)))
    heights = [0.8 + width * len(row.queries) / max(len(row.keys), 1) for row in rows]
    size = ((width + 0.4) * columns + 1.8, sum(heights))
    title += ": " if size[0] > 9 else "\n"
    title += "queries downwards, keys across" + ("; masked pairs are hatched" if any(map(_has_masked, rows)) else "")
    figure, grid = new_figure(size, len(rows), columns, title=title, squeeze=False, height_ratios=heights)
    figure.set_layout_engine("constrained", h_pad=0.1)  # inches, between rows
    for row, line in zip(rows, grid, strict=True):
        for axes in line[len(row.titles) :]:
            axes.set_visible(False)
        for number, (axes, name) in enumerate(zip(line, row.titles, strict=False)):
            image = _draw_map(axes, number, row if number == 0 else row._replace(queries=[]))
            axes.set_title(name, fontsize=10)
        line[0].set_ylabel(row.label, fontsize=10)
    colours.weight_bar(figure, image, grid, shrink=min(1.0, 4 / size[1]))
    return figure


def _has_masked(row: _Row) -> bool:
    return not row.seen_NLS.all()


def _draw_map(axes: Axes, number: int, row: _Row) -> AxesImage:
    """Plot a map of a row, with its tokens and the frames around aligned tokens."""
    for labels, ticks in ((row.keys, axes.set_xticks), (row.queries, axes.set_yticks)):
        shown = labels if len(labels) <= MOST_LABELS else []
        ticks(range(len(shown)), shown, fontsize=7)
    if max(map(len, row.keys)) > 2:
        axes.tick_params(axis="x", labelrotation=90)  # otherwise longer labels would overlap
    axes.tick_params(length=0, pad=1)
    seen_LS = row.seen_NLS[number]
    image = colours.show_weights(axes, row.weights_NLS[number], None if seen_LS.all() else seen_LS)
    for (first, end), (first_query, end_query) in row.alignment:
        corner = (first + 0.5, first_query - 0.5)  # the first source token is a separator
        axes.add_patch(
            Rectangle(corner, end - first, end_query - first_query, fill=False, edgecolor=colours.MARK, linewidth=1.5)
        )
    return image

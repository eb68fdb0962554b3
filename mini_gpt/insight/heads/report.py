"""A report on each head, over many texts: scores for each kind of key, a label, the strongest pair, and a figure."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from mini_gpt.data import tokenizers
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.insight import attention, curves
from mini_gpt.insight.heads import inputs as head_inputs
from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.insight.heads import templates as head_templates
from mini_gpt.insight.heads.inputs import Inputs
from mini_gpt.insight.heads.scores import HeadSums, StrongestPairs
from mini_gpt.insight.heads.templates import PLACES, Templates
from mini_gpt.model.loaded import LoadedModel

INDUCTION_ROWS = 32
SHORTEST_REPEATED = 6  # tokens of a row for induction; in shorter rows, all periods would be two tokens
FEWEST_REPEATED = 3  # different tokens; with two, all periods would be equal
CLEAR, CLEAR_BY_CONTENT = 0.5, 0.25  # least strength for a label; heads without content stay below the second
FEWEST = 50  # least number of queries for a label
EVEN = 0.9  # least entropy / entropy of uniform attention for the label "global"
AROUND = 12  # tokens of text shown before each token of a pair
IMPLIED = {"local window": ("previous token", "next token", "self", "fixed offset")}  # dropped if one of these is clear
LAST = ("local window", "self", "first token", "delimiter")  # wide kinds and attention sinks
OTHER_COLOURS = {"mixed": "#d8d8d8", "global": "#b3cde3"}  # of labels that are not kinds


def head_report(
    model: LoadedModel,
    tokenizer: Tokenizer,
    inputs: Inputs,
    train_tokens: np.ndarray,
    *,
    advance: Advance = progress.silent,
) -> list[dict[str, Any]]:
    """Return a row for each head, layer by layer.

    kinds: for each kind of key its score (mean weight on such keys), chance, strength (0 by chance, at most 1) and
    number of queries. offset: key - query of the kind "fixed offset". entropy: of the weights, divided by the log of
    the number of visible keys. distance: mean distance to keys, in tokens. A kind is clear with at least FEWEST queries
    and a strength of at least CLEAR, or CLEAR_BY_CONTENT. label: the strongest clear kind; kinds in LAST rank after all
    others. Without a clear kind, it is "global" if attention is nearly uniform, otherwise "mixed". also: the other
    clear kinds. pair: the largest weight on another token, with its text.

    Rare tokens are those that are rare in `train_tokens`. Induction is measured on repeated random tokens that are not
    rare, in rows of the context length; all other kinds on `inputs`. No token is masked, even under the masked
    objective (Clark et al. 2019).
    """
    vocabulary = head_inputs.vocabulary(tokenizer, train_tokens)

    def templates(rows: Sequence[int]) -> Templates:
        tokens_BL = inputs.tokens_BL[rows]
        opens_BL = np.arange(tokens_BL.shape[1]) == np.zeros((len(tokens_BL), 1), int)
        if model.layout.separator_id is not None:
            opens_BL = opens_BL | (tokens_BL == model.layout.separator_id)
        found = head_templates.of_tokens(tokens_BL, opens_BL, vocabulary, causal=model.config.model.causal)
        return found | inputs.relations(rows)

    layers = _measure(model, inputs, templates, advance)
    frequent = np.flatnonzero(~vocabulary.is_rare_V[: tokenizers.separator(tokenizer)])
    repeated: Sequence[_Layer | None] = [None] * len(layers)
    length = model.config.context_length
    # Random tokens are no words: with position ids, they would have positions that were never trained.
    if length >= SHORTEST_REPEATED and len(frequent) >= FEWEST_REPEATED and not model.layout.operator_ids:
        random_BL, period_B = head_templates.repeated_tokens(frequent, length, INDUCTION_ROWS, seed=0)
        random = Inputs(random_BL, np.ones(random_BL.shape, bool))
        template = lambda rows: head_templates.induction(length, period_B[rows])
        repeated = _measure(model, random, template, advance)
    return [
        _row(number, head, layer, induction) | {"pair": _pair(layer.pairs, head, inputs.tokens_BL, tokenizer)}
        for number, (layer, induction) in enumerate(zip(layers, repeated, strict=True))
        for head in range(model.config.model.num_heads)
    ]


def cost(inputs: Inputs, context_length: int) -> int:
    """Return the number of tokens that the model processes for a report."""
    return inputs.tokens_BL.size + INDUCTION_ROWS * context_length


def by_depth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each layer: means over its heads, and the number of heads with each label."""
    summary = []
    for layer in sorted({row["layer"] for row in rows}):
        heads = [row for row in rows if row["layer"] == layer]
        labels = [row["label"] for row in heads]
        mean = lambda values: float(np.mean(list(values)))
        kinds = [kind for kind, values in heads[0]["kinds"].items() if values["queries"]]
        summary.append(
            {
                "layer": layer,
                "entropy": mean(row["entropy"] for row in heads),
                "distance": mean(row["distance"] for row in heads),
                "labels": {label: labels.count(label) for label in sorted(set(labels))},
                "strengths": {kind: mean(row["kinds"][kind]["strength"] for row in heads) for kind in kinds},
            }
        )
    return summary


def label_of(strengths: dict[str, tuple[float | None, int]], entropy: float) -> tuple[str, list[str]]:
    """Return a head's label and its other clear kinds. strengths: {kind: (strength, queries)}."""
    least = lambda kind: CLEAR if kind in (*PLACES, "fixed offset") else CLEAR_BY_CONTENT
    clear = {
        kind: strength
        for kind, (strength, queries) in strengths.items()
        if strength is not None and queries >= FEWEST and strength >= least(kind)
    }
    for wide, narrow in IMPLIED.items():
        if any(kind in clear for kind in narrow):
            clear.pop(wide, None)
    if not clear:
        return ("global" if entropy >= EVEN else "mixed"), []
    ordered = sorted(clear, key=lambda kind: (kind in LAST, -round(clear[kind], 2)))  # the first listed wins a tie
    return ordered[0], ordered[1:]


class _Layer(NamedTuple):
    """Measurements of one layer, in NumPy: float64 sums for each of `kinds`, and a strongest pair for each row."""

    kinds: tuple[str, ...]
    sums: HeadSums
    pairs: StrongestPairs


def _measure(
    model: LoadedModel,
    inputs: Inputs,
    templates: Callable[[Sequence[int]], Templates],
    advance: Advance,
) -> list[_Layer]:
    """Measure each layer on all rows, except the copies that fill the last batch."""
    kinds: tuple[str, ...] = ()
    parts: list[list[tuple[HeadSums, StrongestPairs]]] = []
    at_a_time = attention.rows_at_a_time(model, inputs.tokens_BL.shape[1], len(inputs.tokens_BL))
    for count, rows in in_full_batches(range(len(inputs.tokens_BL)), at_a_time):
        found, tokens_BL = templates(rows), inputs.tokens_BL[rows]
        is_query_BL = inputs.is_query_BL[rows] & (np.arange(at_a_time) < count)[:, None]
        arguments = (np.stack(list(found.values()), axis=1), is_query_BL)
        kinds = tuple(found)
        rows_B = np.array(rows, np.int32)
        parts.append(attention.each_layer(model, tokens_BL, head_scores.measure, arguments, rows_B=rows_B))
        advance(tokens_BL[:count].size)
    measured = []
    for of_layer in zip(*parts, strict=True):
        sums, pairs = zip(*of_layer, strict=True)
        total = jax.tree.map(lambda *field: np.sum(np.asarray(field, np.float64), axis=0), *sums)
        measured.append(_Layer(kinds, total, jax.tree.map(lambda *field: np.concatenate(field), *pairs)))
    return measured


def _row(number: int, head: int, layer: _Layer, induction: _Layer | None) -> dict[str, Any]:
    kinds = head_scores.of_kinds(layer.kinds, layer.sums, head)
    offset, kinds["fixed offset"] = head_scores.fixed_offset(layer.sums, head)
    repeated = head_scores.of_kinds(induction.kinds, induction.sums, head) if induction else {}
    kinds["induction"] = repeated.get("induction", head_scores.NOT_MEASURED)
    queries = max(float(layer.sums.queries), 1)
    entropy, distance = (float(sum_H[head]) / queries for sum_H in (layer.sums.entropy_H, layer.sums.distance_H))
    label, also = label_of({kind: (each["strength"], each["queries"]) for kind, each in kinds.items()}, entropy)
    row = {"layer": number, "head": head, "label": label, "also": also, "entropy": entropy, "distance": distance}
    return row | {"offset": offset, "kinds": kinds}


def _pair(pairs: StrongestPairs, head: int, tokens_BL: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    row = int(pairs.weight_BH[:, head].argmax())
    query, key = divmod(int(pairs.index_BH[row, head]), tokens_BL.shape[1])
    text = tokens_BL[row]
    shown = lambda position: {
        "token": tokenizer.decode(text[position : position + 1]),
        "before": tokenizer.decode(text[max(0, position - AROUND) : position]),
    }
    weight = float(pairs.weight_BH[row, head])
    return {"weight": weight, "distance": query - key, "query": shown(query), "key": shown(key)}


def head_figure(rows: list[dict[str, Any]], *, title: str) -> Figure:
    """Return a figure: a grid of labels, layer 0 at the bottom, beside the strengths, one row per head."""
    every = list(rows[0]["kinds"])  # a window may hide all keys of a kind from some layers
    kinds = [kind for kind in every if any(row["kinds"][kind]["queries"] for row in rows)] or every
    layers, heads = (1 + max(row[axis] for row in rows) for axis in ("layer", "head"))
    height = max(4.2, 1.8 + 0.2 * len(rows), 1.8 + 0.75 * layers)
    size, ratios = (3.5 + 1.15 * heads + 0.55 * len(kinds), height), (1.15 * heads, 1.5 + 0.55 * len(kinds))
    figure, (left, right) = curves.new_figure(size, 1, 2, title=title, width_ratios=ratios)
    curves.label_heads(left, layers, heads, "What each head attends to")
    left.set(xlim=(-0.5, heads - 0.5), ylim=(-0.5, layers - 0.5))
    _plot_labels(left, rows, kinds)
    _plot_strengths(right, rows, kinds)
    return figure


def _plot_labels(axes: Axes, rows: list[dict[str, Any]], kinds: list[str]) -> None:
    palette = [colormaps[name](number) for name, size in (("Set3", 12), ("Pastel1", 9)) for number in range(size)]
    colours = dict(zip(kinds, palette, strict=False)) | OTHER_COLOURS
    rounded = "round,pad=0,rounding_size=0.06"
    for row in rows:
        x, y, label = row["head"], row["layer"], row["label"]
        axes.add_patch(FancyBboxPatch((x - 0.44, y - 0.42), 0.88, 0.84, boxstyle=rounded, color=colours[label]))
        strength = row["kinds"].get(label, {}).get("strength")
        value = f"{strength:.2f}" if strength is not None else f"entropy {row['entropy']:.2f}"
        words = label.replace(" ", "\n") if len(label) > 10 else label
        words += f" {row['offset']}" if label == "fixed offset" else ""
        axes.text(x, y, f"{words}\n{value}", ha="center", va="center", fontsize=7)


def _plot_strengths(axes: Axes, rows: list[dict[str, Any]], kinds: list[str]) -> None:
    strengths = np.array([[row["kinds"][kind]["strength"] or 0.0 for kind in kinds] for row in rows])
    image = axes.imshow(strengths, vmin=-1, vmax=1, cmap="PuOr_r", aspect="auto")
    axes.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    names = [f"{row['layer']}.{row['head']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8 if len(rows) < 50 else 6)
    for (y, x), strength in np.ndenumerate(strengths):
        if abs(strength) >= 0.1 and len(rows) <= 64:
            ink = "white" if abs(strength) > 0.6 else "black"
            axes.text(x, y, f"{strength:.1f}".replace("0.", "."), ha="center", va="center", fontsize=6.5, color=ink)
    axes.set(ylabel="layer.head", title="Strength for each kind: 0 is chance, 1 is all attention")
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02)

"""What each head of a model attends to, over many texts: scores for each kind of key, a label, the strongest pair."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.insight import attention
from mini_gpt.insight.heads import inputs as head_inputs
from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.insight.heads.inputs import Inputs
from mini_gpt.insight.heads.scores import HeadSums, StrongestPairs
from mini_gpt.model.gpt import Trace
from mini_gpt.model.loaded import LoadedModel

INDUCTION_ROWS = 32
SHORTEST_REPEATED = 4  # tokens of a row for induction; in shorter ones, a token follows itself
FEWEST_REPEATED = 3  # different tokens, for the same reason
CLEAR = 0.5  # least strength for a label
FEWEST = 50  # least number of queries for a label
EVEN = 0.9  # least entropy over that of even attention for the label "global"
AROUND = 12  # tokens of text shown before each token of a pair
NOT_MEASURED = {"score": None, "chance": None, "strength": None, "queries": 0}
IMPLIED = {"local window": ("previous token", "next token", "self")}  # no label if one of these narrower kinds is clear

Templates = dict[str, np.ndarray]


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
    number of queries. entropy: of the weights, over the log of the number of visible keys. distance: mean, in tokens.
    label: the strongest kind with a strength of at least CLEAR and at least FEWEST queries; otherwise "global" if
    attention is even, or "mixed". also: the other kinds that are clear. pair: the largest weight on another token, with
    its text.

    train_tokens: show which tokens are rare. Induction is measured on repeated random tokens that are not rare, all
    other kinds on `inputs`. No token is masked, under the masked objective either (Clark et al. 2019).
    """
    length, vocab_size = inputs.tokens_BL.shape[1], tokenizers.vocab_size(tokenizer)
    is_delimiter_V, is_rare_V = head_inputs.delimiters(tokenizer), head_inputs.rare(train_tokens, vocab_size)

    def templates(rows: slice) -> Templates:
        tokens_BL = inputs.tokens_BL[rows]
        opens_BL = np.arange(length) == np.zeros((len(tokens_BL), 1), int)
        if model.separator_id is not None:
            opens_BL = opens_BL | (tokens_BL == model.separator_id)
        found = head_scores.positional_templates(length, opens_BL, causal=model.config.model.causal)
        return found | head_scores.token_templates(tokens_BL, is_delimiter_V, is_rare_V) | inputs.relations(rows)

    at_a_time = attention.rows_at_a_time(model, length, len(inputs.tokens_BL))
    layers = _measure(model, inputs, templates, at_a_time, advance)
    frequent = np.flatnonzero(~is_rare_V[: tokenizers.separator(tokenizer)])
    repeated: Sequence[_Layer | None] = [None] * len(layers)
    if length >= SHORTEST_REPEATED and len(frequent) >= FEWEST_REPEATED:
        random_BL, period_B = head_scores.repeated_tokens(frequent, length, INDUCTION_ROWS, seed=0)
        random = Inputs(random_BL, np.ones(random_BL.shape, bool), lambda rows: {})
        template = lambda rows: head_scores.induction_template(length, period_B[rows])
        repeated = _measure(model, random, template, at_a_time, advance)
    return [
        _row(number, head, layer, induction) | {"pair": _pair(layer.pairs, head, inputs.tokens_BL, tokenizer)}
        for number, (layer, induction) in enumerate(zip(layers, repeated, strict=True))
        for head in range(model.config.model.num_heads)
    ]


def cost(inputs: Inputs) -> int:
    """Return the number of tokens that a report puts through the model."""
    rows, length = inputs.tokens_BL.shape
    return (rows + INDUCTION_ROWS) * length


def by_depth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each layer the means over its heads, and the number of heads with each label."""
    summary = []
    for layer in sorted({row["layer"] for row in rows}):
        heads = [row for row in rows if row["layer"] == layer]
        labels = [row["label"] for row in heads]
        mean = lambda values: float(np.mean(list(values)))
        summary.append(
            {
                "layer": layer,
                "entropy": mean(row["entropy"] for row in heads),
                "distance": mean(row["distance"] for row in heads),
                "labels": {label: labels.count(label) for label in sorted(set(labels))},
                "strengths": {
                    kind: mean(row["kinds"][kind]["strength"] for row in heads)
                    for kind, values in heads[0]["kinds"].items()
                    if values["queries"]
                },
            }
        )
    return summary


def label_of(strengths: dict[str, tuple[float | None, int]], entropy: float) -> tuple[str, list[str]]:
    """Return a head's label and the other kinds that are clear, from (strength, queries) by kind."""
    clear = {
        kind: strength
        for kind, (strength, queries) in strengths.items()
        if strength is not None and queries >= FEWEST and strength >= CLEAR
    }
    for wide, narrow in IMPLIED.items():
        if any(kind in clear for kind in narrow):
            clear.pop(wide, None)
    if not clear:
        return ("global" if entropy >= EVEN else "mixed"), []
    ordered = sorted(clear, key=lambda kind: -round(clear[kind], 2))  # of equal kinds, the first listed
    return ordered[0], ordered[1:]


class _Layer(NamedTuple):
    """What was measured of one layer, in NumPy: float64 sums for each of `kinds`, and pairs of each row."""

    kinds: tuple[str, ...]
    sums: HeadSums
    pairs: StrongestPairs


def _measure(
    model: LoadedModel, inputs: Inputs, templates: Callable[[slice], Templates], at_a_time: int, advance: Advance
) -> list[_Layer]:
    """Measure each layer on all rows. The last batch is padded with rows that do not count."""
    kinds: tuple[str, ...] = ()
    parts: list[list[tuple[HeadSums, StrongestPairs]]] = []
    for first in range(0, len(inputs.tokens_BL), at_a_time):
        rows = slice(first, first + at_a_time)
        tokens_BL, found = inputs.tokens_BL[rows], templates(rows)
        count, kinds = len(tokens_BL), tuple(found)
        padded = lambda array, count=count, **options: np.pad(
            array, [(0, at_a_time - count), *[(0, 0)] * (array.ndim - 1)], **options
        )
        arguments = (padded(np.stack(list(found.values()), axis=1)), padded(inputs.counts_BL[rows]))
        layers = attention.each_layer(model, padded(tokens_BL, mode="edge"), _sums_and_pairs, arguments)
        parts.append([(sums, StrongestPairs(*(array[:count] for array in pairs))) for sums, pairs in layers])
        advance(tokens_BL.size)
    measured = []
    for of_layer in zip(*parts, strict=True):
        sums, pairs = zip(*of_layer, strict=True)
        total = jax.tree.map(lambda *field: np.sum(np.asarray(field, np.float64), axis=0), *sums)
        measured.append(_Layer(kinds, total, jax.tree.map(lambda *field: np.concatenate(field), *pairs)))
    return measured


def _sums_and_pairs(
    trace: Trace, tokens_BL: jax.Array, templates_BTLS: jax.Array, counts_BL: jax.Array
) -> tuple[HeadSums, StrongestPairs]:
    del tokens_BL
    sums = head_scores.head_sums(trace.attention, templates_BTLS, counts_BL)
    return sums, head_scores.strongest_pairs(trace.attention, counts_BL)


def _row(number: int, head: int, layer: _Layer, induction: _Layer | None) -> dict[str, Any]:
    kinds = _kinds(layer, head) | (_kinds(induction, head) if induction else {"induction": NOT_MEASURED})
    sums = layer.sums
    entropy, distance = (
        float(sum_H[head]) / max(float(sums.choosing), 1) for sum_H in (sums.entropy_H, sums.distance_H)
    )
    label, also = label_of({kind: (of["strength"], of["queries"]) for kind, of in kinds.items()}, entropy)
    row = {"layer": number, "head": head, "label": label, "also": also, "entropy": entropy, "distance": distance}
    return row | {"kinds": kinds}


def _kinds(layer: _Layer, head: int) -> dict[str, dict[str, Any]]:
    """Return {kind: its numbers} for one head."""
    kinds: dict[str, dict[str, Any]] = {}
    sums = layer.sums
    for number, kind in enumerate(layer.kinds):
        mass, chance, queries = (
            float(sums.mass_HT[head, number]),
            float(sums.chance_T[number]),
            float(sums.queries_T[number]),
        )
        kinds[kind] = NOT_MEASURED
        if queries:
            strength = float(head_scores.strength(mass, chance, queries))
            kinds[kind] = {
                "score": float(mass / queries),
                "chance": float(chance / queries),
                "strength": strength,
                "queries": int(queries),
            }
    return kinds


def _pair(pairs: StrongestPairs, head: int, tokens_BL: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    row = int(pairs.weight_BH[:, head].argmax())
    query, key = divmod(int(pairs.index_BH[row, head]), tokens_BL.shape[1])
    text = tokens_BL[row]
    shown = lambda place: {
        "token": tokenizer.decode(text[place : place + 1]),
        "before": tokenizer.decode(text[max(0, place - AROUND) : place]),
    }
    weight = float(pairs.weight_BH[row, head])
    return {"weight": weight, "distance": query - key, "query": shown(query), "key": shown(key)}

"""A report on each head, over many texts or pairs: scores for each kind of key, a label, and the strongest pair."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mini_gpt.data import batches, spans, tokenizers
from mini_gpt.data.batches import Batch, in_full_batches
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention
from mini_gpt.insight.examples import Example, batch_of
from mini_gpt.insight.heads import cross, english_stories
from mini_gpt.insight.heads import inputs as head_inputs
from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.insight.heads import templates as head_templates
from mini_gpt.insight.heads.inputs import Inputs
from mini_gpt.insight.heads.kinds import OF_SOURCE, PLACES
from mini_gpt.insight.heads.scores import NOT_MEASURED, HeadSums, StrongestPairs, layer_of
from mini_gpt.insight.heads.templates import Templates, Vocabulary
from mini_gpt.insight.uncertainty import jackknife
from mini_gpt.runtime import progress

INDUCTION_ROWS = 32
SHORTEST_REPEATED = 6  # tokens of a row for induction; in shorter rows, all periods would be two tokens
FEWEST_REPEATED = 3  # different tokens; with two, all periods would be equal
PARTS = 8  # of the texts, at least, for standard errors
CLEAR, CLEAR_BY_CONTENT = 0.5, 0.25  # least strength for a label; heads without content stay below the second
FEWEST = 50  # least number of queries for a label
EVEN = 0.9  # least entropy / entropy of uniform attention for the label "global"
Measure = Callable[..., tuple[Any, StrongestPairs]]
MEASURES: dict[str, Measure] = {"encoder": head_scores.measure, "decoder": head_scores.measure}
MEASURES["cross"] = head_scores.measure_cross
AROUND = 12  # tokens of text shown before each token of a pair
IMPLIED = {"local window": ("previous token", "next token", "self", "fixed offset")}  # dropped if one of these is clear
SINKS = ("first token", "delimiter", "source separator", "last source token", "source delimiter")
LAST = ("local window", "self", *SINKS)  # wide kinds and attention sinks


def head_report(
    model: LoadedModel, tokenizer: Tokenizer, inputs: Inputs, train_tokens: np.ndarray
) -> list[dict[str, Any]]:
    """Return a row for each head, layer by layer.

    kinds: for each kind of key its score (mean weight on such keys), chance, strength (0 by chance, at most 1) and
      number of queries; except of a fixed offset, also the standard error of the strength over batches of texts.
    offset: key - query of the kind "fixed offset".
    entropy: of the weights, divided by the log of the number of visible keys.
    distance: mean distance to keys, in tokens. A kind is clear with at least FEWEST queries and a strength of at least
      CLEAR, or CLEAR_BY_CONTENT.
    label: the strongest clear kind; kinds in LAST rank after all others. Without a clear kind, it is "global" if
      attention is nearly uniform, otherwise "mixed".
    also: the other clear kinds.
    pair: the largest weight on another token, with its text.

    Rare tokens are those that are rare in `train_tokens`. Induction is measured on repeated random tokens that are not
    rare, in rows of the context length; all other kinds on `inputs`. No token is masked, even under the masked
    objective (Clark et al. 2019).
    """
    vocabulary = head_inputs.vocabulary(tokenizer, train_tokens)
    frequent = np.flatnonzero(~vocabulary.is_rare_V[: tokenizers.vocab_size(tokenizer)])
    frequent = frequent[frequent != tokenizers.separator(tokenizer)]
    of_rows = lambda rows: _of_rows(model, inputs, rows, vocabulary)
    layers, measured = _measure(model, inputs, of_rows)
    texts_BL = inputs.tokens_BL[measured]
    repeated: Sequence[_Layer | None] = [None] * len(layers)
    length = model.config.context_length
    # Random tokens are no words: with position ids, they would have positions that were never trained.
    if length >= SHORTEST_REPEATED and len(frequent) >= FEWEST_REPEATED and not model.layout.operator_ids:
        random_BL, period_B = head_templates.repeated_tokens(frequent, length, INDUCTION_ROWS, seed=0)
        random_BL = batches.begun(random_BL, tokenizer.first)
        random = Inputs(random_BL, np.ones(random_BL.shape, bool))
        of_random = lambda rows: head_templates.induction(length, period_B[rows], tokenizer.first is not None)
        repeated, _ = _measure(model, random, of_random)
    return [
        _head_row(number, head, layer, induction)
        | {"pair": _strongest_pair(layer.pairs, head, (texts_BL, texts_BL), tokenizer)}
        for number, (layer, induction) in enumerate(zip(layers, repeated, strict=True))
        for head in range(model.config.model.num_heads)
    ]


def text_templates(model: LoadedModel, tokenizer: Tokenizer, inputs: Inputs, train_tokens: np.ndarray) -> Templates:
    """Return the templates of `head_report` for texts that are shown; induction is after copies in the texts."""
    rows = range(len(inputs.tokens_BL))
    found = _of_rows(model, inputs, rows, head_inputs.vocabulary(tokenizer, train_tokens))
    return found | {"induction": head_templates.after_copies(inputs.tokens_BL)}


def _of_rows(model: LoadedModel, inputs: Inputs, rows: Sequence[int], vocabulary: Vocabulary) -> Templates:
    tokens_BL = inputs.tokens_BL[rows]
    opens_BL = np.arange(tokens_BL.shape[1]) == np.zeros((len(tokens_BL), 1), int)
    if model.layout.separator_id is not None:
        opens_BL = opens_BL | (tokens_BL == model.layout.separator_id)
    found = head_templates.of_tokens(tokens_BL, opens_BL, vocabulary, causal=model.config.model.causal)
    return found | inputs.relations(rows)


def cost(inputs: Inputs, context_length: int) -> int:
    """Return the number of tokens that the model processes for a report."""
    return inputs.tokens_BL.size + INDUCTION_ROWS * context_length


def by_depth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each layer: means over its heads, and the number of heads with each label.

    With an encoder, the layers of the three kinds of attention are separate.
    """
    summary = []
    for place in dict.fromkeys(map(layer_of, rows)):
        heads = [row for row in rows if layer_of(row) == place]
        labels = [row["label"] for row in heads]
        kinds = [kind for kind, values in heads[0]["kinds"].items() if values["queries"]]
        summary.append(
            {name: heads[0][name] for name in ("attention", "layer") if name in heads[0]}
            | {
                "entropy": _mean([row["entropy"] for row in heads]),
                "distance": _mean([row["distance"] for row in heads]),
                "labels": {label: labels.count(label) for label in sorted(set(labels))},
                "strengths": {kind: _mean([row["kinds"][kind]["strength"] for row in heads]) for kind in kinds},
            }
        )
    return summary


def _mean(values: list[float | None]) -> float | None:
    """Return the mean; None if a value is not known."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def label_of(strengths: dict[str, tuple[float | None, int]], entropy: float) -> tuple[str, list[str]]:
    """Return a head's label and its other clear kinds. strengths: {kind: (strength, queries)}."""
    clear = {}
    for kind, (strength, queries) in strengths.items():
        least = CLEAR if kind in (*PLACES, *OF_SOURCE, "fixed offset") else CLEAR_BY_CONTENT
        if strength is not None and queries >= FEWEST and strength >= least:
            clear[kind] = strength
    for wide, narrow in IMPLIED.items():
        if any(kind in clear for kind in narrow):
            clear.pop(wide, None)
    if not clear:
        return ("global" if entropy >= EVEN else "mixed"), []
    ordered = sorted(clear, key=lambda kind: (kind in LAST, -round(clear[kind], 2)))  # the first listed wins a tie
    return ordered[0], ordered[1:]


class _Layer(NamedTuple):
    """Measurements of one layer, in NumPy: float64 sums for each of `kinds`, and a strongest pair for each row.

    sums: HeadSums, or CrossSums of cross-attention.
    without: the sums without each batch.
    """

    kinds: tuple[str, ...]
    sums: Any
    pairs: StrongestPairs
    without: Sequence[Any]


def _measure(
    model: LoadedModel, inputs: Inputs, templates: Callable[[Sequence[int]], Templates]
) -> tuple[list[_Layer], list[int]]:
    """Measure each layer on all rows. Returns the rows too, with the copies that fill the last batch."""
    kinds: tuple[str, ...] = ()
    measured: list[int] = []
    parts: list[list[tuple[HeadSums, StrongestPairs]]] = []
    at_a_time = _rows_at_a_time(model, inputs.tokens_BL.shape[1], len(inputs.tokens_BL))
    for count, rows in in_full_batches(range(len(inputs.tokens_BL)), at_a_time):
        found, tokens_BL = templates(rows), inputs.tokens_BL[rows]
        is_query_BL = inputs.is_query_BL[rows] & (np.arange(at_a_time) < count)[:, None]
        arguments = (np.stack(list(found.values()), axis=1), is_query_BL, english_stories.wider(found))
        kinds = tuple(found)
        measured += rows
        rows_B = np.array(rows, np.int32)
        parts.append(attention.each_layer(model, tokens_BL, head_scores.measure, arguments, rows_B=rows_B))
        progress.advance(tokens_BL[:count].size)
    return _summed(kinds, parts), measured


def _rows_at_a_time(model: LoadedModel, length: int, count: int) -> int:
    """Return the rows of a batch: few enough that there are PARTS of them."""
    return model.rows_at_a_time(length, "maps", -(-count // PARTS))


def _summed(kinds: tuple[str, ...], parts: list[list[Any]]) -> list[_Layer]:
    """Return the measurements of each layer. parts: for each batch, (sums, pairs) of each layer."""
    measured = []
    for of_layer in zip(*parts, strict=True):
        sums, pairs = zip(*of_layer, strict=True)
        total = jax.tree.map(lambda *field: np.sum(np.asarray(field, np.float64), axis=0), *sums)
        without = [jax.tree.map(np.subtract, total, part) for part in sums]
        measured.append(_Layer(kinds, total, jax.tree.map(lambda *field: np.concatenate(field), *pairs), without))
    return measured


def _head_row(number: int, head: int, layer: _Layer, induction: _Layer | None = None) -> dict[str, Any]:
    """Return the row of a head, without its strongest pair. induction: measured on repeated tokens."""
    kinds, sums, offset, distance = _of_kinds(layer, head), layer.sums, None, None
    queries = max(float(sums.queries), 1)
    if isinstance(sums, HeadSums):
        offset, kinds["fixed offset"] = head_scores.fixed_offset(sums, head)
        repeated = _of_kinds(induction, head) if induction else {}
        kinds["induction"] = repeated.get("induction", NOT_MEASURED)
        distance = float(sums.distance_H[head]) / queries
    entropy = float(sums.entropy_H[head]) / queries
    label, also = label_of({kind: (each["strength"], each["queries"]) for kind, each in kinds.items()}, entropy)
    row = {"layer": number, "head": head, "label": label, "also": also, "entropy": entropy, "distance": distance}
    return row | {"offset": offset, "kinds": kinds}


def _of_kinds(layer: _Layer, head: int) -> dict[str, dict[str, Any]]:
    kinds = head_scores.of_kinds(layer.kinds, layer.sums, head)
    others = [head_scores.of_kinds(layer.kinds, sums, head) for sums in layer.without]
    errors = {kind: jackknife([other[kind]["strength"] for other in others]) for kind in kinds}
    return {kind: found | {"error": errors[kind]} for kind, found in kinds.items()}


def _strongest_pair(
    pairs: StrongestPairs, head: int, texts: tuple[np.ndarray, np.ndarray], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the strongest pair of a head, with the text before both. texts: the tokens of queries, and of keys."""
    row = int(pairs.weight_BH[:, head].argmax())
    query, key = divmod(int(pairs.index_BH[row, head]), texts[1].shape[1])
    found: dict[str, Any] = {"weight": float(pairs.weight_BH[row, head]), "distance": query - key}
    for name, position, text_BL in (("query", query, texts[0]), ("key", key, texts[1])):
        found[name] = {
            "token": spans.decode(text_BL[row, position : position + 1], tokenizer),
            "before": spans.decode(text_BL[row, max(0, position - AROUND) : position], tokenizer),
        }
    return found


def pair_report(
    model: LoadedModel, tokenizer: Tokenizer, pairs: Sequence[Example], train_pairs: Sequence[Example]
) -> list[dict[str, Any]]:
    """Return a row for each head, with the fields of `head_report`, and with attention (encoder, decoder or cross).

    Each row has the kinds of keys of all three. Kinds that do not apply have no queries: those of the others, and
    induction, because random tokens have no source. Cross-attention has no distance and no offset, and it alone has a
    slope, see `CrossSums`. Rare tokens are counted in the sources and in the inputs of `train_pairs`.
    """
    separator, vocabularies = tokenizers.separator(tokenizer), _vocabularies(tokenizer, train_pairs)
    size = max(len(pair.source) for pair in pairs), max(len(pair.inputs) for pair in pairs)
    rows = _rows_at_a_time(model, max(size), len(pairs))
    kinds: dict[str, tuple[str, ...]] = {}
    parts: dict[str, list[list[Any]]] = {kind: [] for kind in attention.KINDS}
    shown: list[Example] = []
    for number, part in in_full_batches(pairs, rows):
        shown += part
        batch = batch_of(part, size)
        counted_BL = (np.arange(len(part)) < number)[:, None]
        is_query = {"encoder": (batch["source"] >= 0) & counted_BL, "decoder": (batch["weights"] > 0) & counted_BL}
        is_query["cross"] = is_query["decoder"]
        found = _templates(part, batch, vocabularies, separator)
        kinds = {kind: tuple(of_kind) for kind, of_kind in found.items()}
        arguments = {kind: (np.stack(list(found[kind].values()), axis=1), is_query[kind]) for kind in found}
        layers = attention.each_layer_by_kind(model, batch["inputs"], batch["source"], MEASURES, arguments)
        for kind, of_kind in layers.items():
            parts[kind].append(of_kind)
        progress.advance(number * sum(size))
    every = batch_of(shown, size)
    sides = {"encoder": ("source", "source"), "decoder": ("inputs", "inputs"), "cross": ("targets", "source")}
    texts = {kind: (every[queries], every[keys]) for kind, (queries, keys) in sides.items()}
    return _rows({kind: _summed(kinds[kind], parts[kind]) for kind in parts}, texts, tokenizer)


def pair_templates(tokenizer: Tokenizer, pair: Example, train_pairs: Sequence[Example]) -> dict[str, Templates]:
    """Return {kind of attention: the templates of `pair_report`} of one pair."""
    batch = batch_of([pair], (len(pair.source), len(pair.inputs)))
    return _templates([pair], batch, _vocabularies(tokenizer, train_pairs), tokenizers.separator(tokenizer))


def _vocabularies(tokenizer: Tokenizer, train_pairs: Sequence[Example]) -> dict[str, Vocabulary]:
    sources, inputs = [pair.source for pair in train_pairs], [pair.inputs[1:] for pair in train_pairs]
    sides = (("encoder", sources), ("decoder", inputs))
    return {kind: head_inputs.vocabulary(tokenizer, np.concatenate(texts)) for kind, texts in sides}


def pair_cost(pairs: Sequence[Example]) -> int:
    """Return the number of tokens that the model processes for a report."""
    return len(pairs) * (max(len(pair.source) for pair in pairs) + max(len(pair.inputs) for pair in pairs))


def _templates(
    pairs: Sequence[Example], batch: Batch, vocabularies: dict[str, Vocabulary], separator: int
) -> dict[str, Templates]:
    inputs_BL, source_BS = batch["inputs"], np.where(batch["source"] < 0, separator, batch["source"])
    opens_BL, opens_BS = (np.indices(tokens.shape)[1] == 0 for tokens in (inputs_BL, source_BS))
    of_tokens = head_templates.of_tokens
    return {
        "encoder": of_tokens(source_BS, opens_BS, vocabularies["encoder"], causal=False),
        "decoder": of_tokens(inputs_BL, opens_BL, vocabularies["decoder"], causal=True),
        "cross": cross.templates(pairs, inputs_BL, batch["source"], vocabularies["encoder"]),
    }


def _rows(
    measured: dict[str, list[_Layer]], texts: dict[str, tuple[np.ndarray, np.ndarray]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    rows = []
    for kind, layers in measured.items():
        for number, layer in enumerate(layers):
            for head in range(layer.pairs.weight_BH.shape[1]):
                pair, slope = _strongest_pair(layer.pairs, head, texts[kind], tokenizer), None
                if kind == "cross":
                    pair["distance"] = None
                    slope = float(layer.sums.slope_H[head]) / float(layer.sums.rows) if layer.sums.rows else None
                rows.append({"attention": kind} | _head_row(number, head, layer) | {"slope": slope, "pair": pair})
    every = dict.fromkeys(kind for row in rows for kind in row["kinds"])
    return [row | {"kinds": {kind: row["kinds"].get(kind, NOT_MEASURED) for kind in every}} for row in rows]

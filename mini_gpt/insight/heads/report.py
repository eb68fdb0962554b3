"""What each head of a model attends to, over many texts: scores for every kind of head, a label, a strong pair."""

import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.insight import attention
from mini_gpt.insight.heads import python_source
from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.insight.heads.scores import HeadSums
from mini_gpt.model.gpt import Trace
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters

TOKENS = 65_536  # that the rows have in all
INDUCTION_ROWS = 32
SHORTEST_REPEATED = 4  # tokens; in fewer, what followed is the token itself
FEWEST_REPEATED = 3  # different ones, likewise
RARE = 0.05  # the rarest tokens, which make up this share of the text
CLEAR = 0.5  # strength from which a score gives a head its label
FEWEST = 50  # queries for that
EVEN = 0.9  # entropy over that of even attention, from which a head without another label is global
AROUND = 12  # tokens of text shown before each token of a pair
NONE_ASKED = {"score": None, "chance": None, "strength": None, "queries": 0}
IMPLIED = {"local window": ("previous token", "next token", "self")}  # what is clear by a narrower kind


class Rows(NamedTuple):
    """What a model reads while its heads are looked at.

    counts_BL: which queries count, filling left out. relations(rows): templates_BLS of what belongs together in them by
    syntax and reference, by kind.
    """

    tokens_BL: np.ndarray
    counts_BL: np.ndarray
    relations: Callable[[slice], dict[str, np.ndarray]]


def rows_of_text(tokens: np.ndarray, tokenizer: Tokenizer, length: int) -> Rows:
    """Gives windows at even distances over a split, with the syntax and references of what parses as Python."""
    starts = windows(tokens, length)
    tokens_BL = np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)
    related = _relations(tokens, tokenizer, starts, length)
    relations = lambda rows: {kind: related(kind, starts[rows]) for kind in python_source.KINDS}
    return Rows(tokens_BL, np.ones(tokens_BL.shape, bool), relations)


def rows_of_problems(inputs_BL: np.ndarray, tokenizer: Tokenizer) -> Rows:
    """Gives a task's problems, as the model reads them: what they are filled up with does not count."""
    return Rows(inputs_BL, inputs_BL != tokenizers.separator(tokenizer), lambda rows: {})


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Gives starts of windows at even distances, as many as have TOKENS tokens, or as the split has."""
    count = max(1, min(TOKENS // length, len(tokens) // length))
    return np.linspace(0, len(tokens) - length, count).astype(int)


def head_report(
    definition: nnx.GraphDef,
    parameters: Parameters,
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    texts: Rows,
    train_tokens: np.ndarray,
    *,
    batch_tokens: int | None = None,
    advance: Advance = progress.silent,
) -> list[dict[str, Any]]:
    """Gives a row for each head, layer by layer.

    kinds: for each kind of head its score (mean weight on such keys), what chance gives, the strength (0 by chance, 1
    at most) and the number of queries that were asked. entropy: of the weights, over the log of the number of visible
    keys. distance: mean, in tokens. label: the strongest of the kinds whose strength is CLEAR or more with FEWEST
    queries or more, else global where attention is even, else mixed; `also` holds the others. pair: the largest weight
    on another token, with its text.

    train_tokens: tell how rare a token is. Induction is measured on repeated random tokens, none of them rare, all else
    on the texts. A model of the masked objective sees them whole, as in Clark et al. (2019).
    """
    tokens_BL, length = texts.tokens_BL, config.context_length
    isolate_at = tokenizers.isolate_at(config.data, tokenizer.token_bytes)
    is_delimiter_V, is_rare_V = delimiters(tokenizer), rare(train_tokens, tokenizers.vocab_size(tokenizer))
    model = LoadedModel(parameters, definition, config, mesh, isolate_at, batch_tokens or config.batch_tokens)
    rows = attention.rows_at_a_time(model, length, len(tokens_BL))
    sums, kinds, best = None, (), None
    for first in range(0, len(tokens_BL), rows):
        some = slice(first, min(first + rows, len(tokens_BL)))
        some_BL, counts_BL = tokens_BL[some], texts.counts_BL[some]
        opens_BL = np.arange(length) == np.zeros((len(some_BL), 1), int)
        if isolate_at is not None:
            opens_BL = opens_BL | (some_BL == isolate_at)
        templates = head_scores.positional_templates(length, opens_BL, causal=config.model.causal)
        templates |= head_scores.token_templates(some_BL, is_delimiter_V, is_rare_V)
        templates |= texts.relations(some)
        kinds = tuple(templates)
        layers = _sums(model, some_BL, counts_BL, templates, rows)
        best = _stronger(best, layers, some_BL, first)
        sums = _added(sums, layers)
        advance(some_BL.size)
    induced = [None] * len(sums)
    frequent = np.flatnonzero(~is_rare_V[: tokenizers.separator(tokenizer)])  # what is hardly ever read is no test
    if length >= SHORTEST_REPEATED and len(frequent) >= FEWEST_REPEATED:
        induced = None
        random_BL, period_B = head_scores.repeated_tokens(frequent, length, INDUCTION_ROWS, seed=0)
        for first in range(0, len(random_BL), rows):
            some_BL, some_B = random_BL[first : first + rows], period_B[first : first + rows]
            templates, counts_BL = head_scores.induction_template(length, some_B), np.ones(some_BL.shape, bool)
            layers = _sums(model, some_BL, counts_BL, templates, rows)
            induced = _added(induced, layers)
            advance(some_BL.size)
    return [
        _row(layer, head, kinds, text, random, _pair(best[layer][head], tokens_BL, tokenizer))
        for layer, (text, random) in enumerate(zip(sums, induced, strict=True))
        for head in range(len(text.entropy_H))
    ]


def cost(texts: Rows) -> int:
    """Gives the tokens that a report puts through the model."""
    rows, length = texts.tokens_BL.shape
    return (rows + INDUCTION_ROWS) * length


def by_depth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives for each layer the means over its heads, and how many have each label."""
    summary = []
    for layer in sorted({row["layer"] for row in rows}):
        heads = [row for row in rows if row["layer"] == layer]
        labels = [row["label"] for row in heads]
        strengths = {
            kind: float(np.mean([row["kinds"][kind]["strength"] for row in heads]))
            for kind, values in heads[0]["kinds"].items()
            if values["queries"]
        }
        summary.append(
            {
                "layer": layer,
                "entropy": float(np.mean([row["entropy"] for row in heads])),
                "distance": float(np.mean([row["distance"] for row in heads])),
                "labels": {label: labels.count(label) for label in sorted(set(labels))},
                "strengths": strengths,
            }
        )
    return summary


def delimiters(tokenizer: Tokenizer) -> np.ndarray:
    """Says of each token whether it is punctuation or a line's end and nothing else, or the separator; last, False for
    what hides a token from the masked objective."""
    texts = (tokenizer.decode([token]) for token in range(tokenizers.separator(tokenizer)))
    return np.array([*map(_is_delimiter, texts), True, False])


def _is_delimiter(text: str) -> bool:
    inner = text.strip(" \t")
    return bool(inner) and all(c in "\r\n" or (c != "_" and unicodedata.category(c)[0] == "P") for c in inner)


def rare(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Says of each token whether it is among the rarest, which together make up RARE of a text; False as the last."""
    counts_V = perplexity.token_counts(tokens, vocab_size)
    order = np.argsort(counts_V, kind="stable")
    is_rare_V = np.zeros(vocab_size + 1, bool)
    is_rare_V[order] = np.cumsum(counts_V[order]) <= RARE * counts_V.sum()
    return is_rare_V


def _relations(tokens: np.ndarray, tokenizer: Tokenizer, starts: np.ndarray, length: int):
    """Gives a function from kind and starts of windows to a template_BLS, of what parses as Python."""
    pairs: dict[str, list[tuple[int, int]]] = {kind: [] for kind in python_source.KINDS}
    reach = length * int(tokenizer.token_bytes.max())
    for begin, document in _documents(tokens, tokenizers.separator(tokenizer), starts, length):
        ends = np.cumsum(tokenizer.token_bytes[document])
        text = tokenizer.decode(document)
        if not len(ends) or len(text.encode()) != ends[-1]:
            continue  # cut within a character
        for relation in python_source.relations(text, reach):
            query = begin + int(np.searchsorted(ends, relation.query, side="right"))
            start = int(starts[max(0, np.searchsorted(starts, query, side="right") - 1)])  # of the window that holds it
            if not start <= query < start + length:
                continue
            for span in relation.keys:
                first, last = np.searchsorted(ends, (span[0], span[1] - 1), side="right")
                keys = range(max(begin + first, start), begin + last + 1)
                pairs[relation.kind] += [(query, key) for key in keys if key != query]
    sorted_pairs = {kind: np.array(sorted(found), int).reshape(-1, 2) for kind, found in pairs.items()}

    def template(kind: str, starts: np.ndarray) -> np.ndarray:
        template_BLS = np.zeros((len(starts), length, length), bool)
        for row, start in enumerate(starts):
            first, last = np.searchsorted(sorted_pairs[kind][:, 0], (start, start + length))
            inside = sorted_pairs[kind][first:last] - start
            inside = inside[inside[:, 1] >= 0]
            template_BLS[row, inside[:, 0], inside[:, 1]] = True
        return template_BLS

    return template


def _documents(tokens: np.ndarray, separator: int, starts: np.ndarray, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (place, tokens) of each document that a window touches."""
    separators = np.flatnonzero(tokens == separator)
    begins, ends = np.append(0, separators + 1), np.append(separators, len(tokens))
    first, last = np.searchsorted(ends, starts), np.searchsorted(ends, starts + length - 1)
    touched = {number for pair in zip(first, last, strict=True) for number in range(pair[0], pair[1] + 1)}
    for number in sorted(touched):
        if number < len(ends):
            yield int(begins[number]), np.asarray(tokens[begins[number] : ends[number]])


def _sums(model, tokens_BL, counts_BL, templates, rows) -> list[HeadSums]:
    """Gives each layer's sums; fills the batch up with rows that count nothing, so that programs see one shape."""
    missing = rows - len(tokens_BL)
    templates_BTLS = np.stack(list(templates.values()), axis=1)
    if missing:
        tokens_BL = np.concatenate([tokens_BL, np.repeat(tokens_BL[:1], missing, axis=0)])
    counts_BL = np.pad(counts_BL, ((0, missing), (0, 0)))
    templates_BTLS = np.pad(templates_BTLS, ((0, missing), (0, 0), (0, 0), (0, 0)))
    return attention.each_layer(model, tokens_BL, _head_sums, (templates_BTLS, counts_BL))


def _head_sums(trace: Trace, *arguments) -> HeadSums:
    return head_scores.head_sums(trace.attention, *arguments)


def _added(sums: list[HeadSums] | None, layers: list[HeadSums]) -> list[HeadSums]:
    """Adds in float64; what belongs to single rows is left out."""
    wide = [HeadSums(*(np.asarray(value, np.float64) for value in layer[:6]), None, None) for layer in layers]
    if sums is None:
        return wide
    return [
        HeadSums(*(a + b for a, b in zip(old[:6], new[:6], strict=True)), None, None)
        for old, new in zip(sums, wide, strict=True)
    ]


def _stronger(best, layers: list[HeadSums], tokens_BL: np.ndarray, first: int) -> list[list[tuple]]:
    """Gives for each layer and head (weight, window, place) of the strongest pair so far."""
    count = len(tokens_BL)
    found = []
    for number, layer in enumerate(layers):
        heads = []
        for head in range(layer.strongest_BH.shape[1]):
            row = int(layer.strongest_BH[:count, head].argmax())
            new = (
                float(layer.strongest_BH[row, head]),
                first + row,
                int(layer.strongest_place_BH[row, head]),
            )
            heads.append(new if best is None else max(best[number][head], new, key=lambda pair: pair[0]))
        found.append(heads)
    return found


def _pair(best: tuple, tokens_BL: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    weight, row, place = best
    query, key = divmod(place, tokens_BL.shape[1])
    text = tokens_BL[row]

    def shown(token: int) -> dict[str, str]:
        return {
            "token": tokenizer.decode(text[token : token + 1]),
            "before": tokenizer.decode(text[max(0, token - AROUND) : token]),
        }

    return {"weight": weight, "distance": query - key, "query": shown(query), "key": shown(key)}


def _row(layer: int, head: int, kinds, text: HeadSums, random: HeadSums, pair: dict[str, Any]) -> dict[str, Any]:
    scores = {kind: _kind(text, head, place) for place, kind in enumerate(kinds)}
    scores["induction"] = NONE_ASKED if random is None else _kind(random, head, 0)
    entropy = float(text.entropy_H[head] / max(text.choosing, 1))
    label, also = label_of({kind: (of["strength"], of["queries"]) for kind, of in scores.items()}, entropy)
    return {
        "layer": layer,
        "head": head,
        "label": label,
        "also": also,
        "entropy": entropy,
        "distance": float(text.distance_H[head] / max(text.choosing, 1)),
        "kinds": scores,
        "pair": pair,
    }


def _kind(sums: HeadSums, head: int, place: int) -> dict[str, float | int | None]:
    queries = int(sums.queries_T[place])
    if not queries:
        return NONE_ASKED
    mass, chance = float(sums.mass_HT[head, place]), float(sums.chance_T[place])
    return {
        "score": mass / queries,
        "chance": chance / queries,
        "strength": float(head_scores.strength(mass, chance, queries)),
        "queries": queries,
    }


def label_of(strengths: dict[str, tuple[float | None, int]], entropy: float) -> tuple[str, list[str]]:
    """Gives a head's label, and the other kinds that are clear, from (strength, queries) by kind."""
    clear = {
        kind: strength for kind, (strength, queries) in strengths.items() if queries >= FEWEST and strength >= CLEAR
    }
    for wide, narrow in IMPLIED.items():
        if any(kind in clear for kind in narrow):
            clear.pop(wide, None)
    if not clear:
        return ("global" if entropy >= EVEN else "mixed"), []
    ordered = sorted(clear, key=lambda kind: -round(clear[kind], 2))  # of equals, the kind that stands before
    return ordered[0], ordered[1:]

"""The explorer: one HTML file that shows a model's attention in a browser, also offline."""

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.data import spans
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, encodings, figures, images
from mini_gpt.insight.encodings import Curves
from mini_gpt.insight.examples import Example
from mini_gpt.insight.heads import typical
from mini_gpt.insight.heads.kinds import MEANINGS, OF_PYTHON, OF_STORIES
from mini_gpt.insight.heads.templates import Templates
from mini_gpt.insight.observing import AttentionMaps
from mini_gpt.insight.words import Words, grouped, of_tokens
from mini_gpt.model.positions import biases, waves
from mini_gpt.pages import document
from mini_gpt.pages.explorer import largest, vectors
from mini_gpt.pages.explorer.largest import FLOOR, HIDDEN, MOST_STEPS
from mini_gpt.runtime.errors import UserError, require

PAGE = Path(__file__).parent / "page.html"
MOST_PAIRS = 36 * 512 * 513 // 2  # pairs of tokens that fit in the page: 6 layers of 6 causal heads, 512 tokens
LONGEST = 512  # tokens, of a page with all weights
MOST_WHOLE_HEADS = 36  # of a model whose pages always have all weights; with more, `largest` shows longer texts
FARTHEST = 1024  # tokens between a query and a key, in the curves of T5's biases
FARTHEST_OF_OTHERS, MOST_CARDS, MOST_LINES = 256, 12, 8  # of encodings that have no card of their own
MOST_POSITIONS = 256  # most rows of a learned table in the figure of cosines
MOST_BYTES = 4_700_000  # of the compressed logits in base64, and of vectors; the page must stay under 5 MB


class HeadLabel(NamedTuple):
    """What a head attends to most. strength: 0 is chance, 1 is all attention; None for the labels mixed and global."""

    name: str
    strength: float | None


class HeadLabels(NamedTuple):
    """The labels of heads for each kind of attention, layer and head.

    measured_on: in words.
    templates: for each kind of attention, the keys of each kind in the text of the page, mask_BLS with B = 1.
    """

    by_kind: Mapping[str, list[list[HeadLabel]]]
    measured_on: str
    templates: Mapping[str, Templates]


def most_tokens(config: Config) -> int:
    """Return the largest number of tokens that a page can show."""
    heads = config.model.num_layers * config.model.num_heads
    pairs = MOST_PAIRS / heads  # of one head
    whole = min(LONGEST, config.context_length, int((2 * pairs if config.model.causal else pairs) ** 0.5))
    if heads <= MOST_WHOLE_HEADS:
        return whole
    return max(whole, min(largest.LONGEST, config.context_length, largest.MOST_ROWS // heads))


def explorer(
    model: LoadedModel,
    tokenizer: Tokenizer,
    text: np.ndarray | Words | Example,
    *,
    title: str,
    subtitle: str,
    labels: HeadLabels | None = None,
) -> str:
    """Return the HTML page for up to `most_tokens` tokens, or for a pair that `check_fits` allows."""
    labels_of = lambda kind: (labels.by_kind[kind], labels.templates[kind]) if labels else (None, {})
    shown: dict[str, Any]
    if isinstance(text, Example):
        source, inputs, written = (spans.decode_each(tokens, tokenizer) for tokens in text[:3])
        axes = {"encoder": (source, source), "decoder": (inputs, inputs), "cross": (written, source)}
        entries = _entries(model.config.model, text)
        held = {}
        for kind, maps in attention.maps_by_kind(model, text.inputs[None], text.source[None]).items():
            share = entries[kind] / sum(entries.values())
            held[kind] = _held(maps, axes[kind], labels_of(kind), causal=kind == "decoder", share=share)
        if text.alignment:  # [first key, end, first query, end]; the first source token is a separator
            held["cross"]["alignment"] = [(1 + first, 1 + end, *queries) for (first, end), queries in text.alignment]
        shown = {"kinds": held}
    elif isinstance(text, Words):
        shown = {"attention": _of_words(model, tokenizer, text.tokens, labels)}
    else:
        config, tokens = model.config.model, spans.decode_each(text, tokenizer)
        pairs = len(text) * (len(text) + 1) // 2 if config.causal else len(text) ** 2
        if config.num_layers * config.num_heads * pairs <= MOST_PAIRS:
            layers = attention.attention_maps(model, text[None])
            shown = {"attention": _held(layers, (tokens, tokens), labels_of("decoder"), causal=config.causal)}
        else:
            sizes = {"tokens": tokens, "layers": config.num_layers, "heads": config.num_heads}
            of_heads, templates = labels_of("decoder")
            held, query_NHK = largest.packed(model, text, _stacked(templates, (len(text), len(text))))
            typical_of = _typical(query_NHK, of_heads, templates)
            known = {"labels": of_heads, "typical": typical_of, "relations": _relations(templates)}
            shown = {"attention": {**sizes, **known, **held}}
        left = max(0, MOST_BYTES - len(shown["attention"]["logits"]))
        if of_text := vectors.packed(model, text, min(vectors.MOST_BYTES, left)):
            shown["attention"]["vectors"] = of_text
    titles = {"title": title, "subtitle": subtitle, "labels_from": labels.measured_on if labels else None}
    data = {**titles, **shown, "meanings": MEANINGS, "positions": _positions(model, text)}
    try:
        return document.build(PAGE, data)
    except ValueError:
        raise UserError("--suite=explorer: the model's attention is not finite; take another --checkpoint") from None


def _of_words(
    model: LoadedModel, tokenizer: Tokenizer, tokens: np.ndarray, labels: HeadLabels | None
) -> dict[str, Any]:
    most = int((MOST_PAIRS / model.config.model.num_layers / model.config.model.num_heads) ** 0.5)
    require(len(tokens) <= most, "--words", len(tokens), f"must be at most {most} tokens; give a shorter --text")
    word_L, words = of_tokens(spans.decode_in_turn(tokens, tokenizer))
    layers = grouped(attention.attention_maps(model, tokens[None]), word_L)
    of_heads = labels.by_kind["decoder"] if labels else None
    return _held(layers, (words, words), (of_heads, {}), causal=model.config.model.causal)


def check_fits(config: Config, pair: Example) -> None:
    """Raise UserError if a pair is too long for a page."""
    longest = max(len(pair.source), len(pair.inputs))
    if longest > LONGEST or sum(_entries(config.model, pair).values()) > MOST_PAIRS:
        remedy = "too many for a page; give a shorter --text"
        raise UserError(f"--suite=explorer: found a source or target of {longest} tokens, {remedy}")


def _entries(model: ModelConfig, pair: Example) -> dict[str, int]:
    source, target = len(pair.source), len(pair.inputs)
    each = {"encoder": source**2, "decoder": target * (target + 1) // 2, "cross": target * source}
    layers = {"encoder": model.encoder_layers, "decoder": model.num_layers, "cross": model.num_layers}
    return {kind: layers[kind] * model.num_heads * number for kind, number in each.items()}


def _held(
    maps: list[AttentionMaps],
    texts: tuple[list[str], list[str]],
    labels: tuple[list[list[HeadLabel]] | None, Templates],
    *,
    causal: bool,
    share: float = 1.0,
) -> dict[str, Any]:
    """Return what the page holds of one kind of attention.

    texts: the tokens of queries, and of keys.
    labels: with the templates of their kinds.
    """
    logits_NHLS = np.stack([layer.logits_BHLS[0] for layer in maps])
    weights_NHLS = np.stack([layer.weights_BHLS[0] for layer in maps])
    seen_NHLS = np.stack([layer.seen_BHLS[0] for layer in maps])
    templates_TLS = _stacked(labels[1], seen_NHLS.shape[2:])
    layers = zip(weights_NHLS, seen_NHLS, strict=True)
    query_NHK = np.stack([typical.queries(weights_HLS, seen_HLS, templates_TLS) for weights_HLS, seen_HLS in layers])
    return {
        "tokens": texts[0],
        **({} if texts[0] == texts[1] else {"keys": texts[1]}),
        "layers": len(maps),
        "heads": logits_NHLS.shape[1],
        "labels": labels[0],
        "typical": _typical(query_NHK, *labels),
        "telling": typical.telling_head(typical.telling(weights_NHLS, of_itself=texts[0] is texts[1])),
        "relations": _relations(labels[1]),
        **packed(logits_NHLS, weights_NHLS, seen_NHLS, causal=causal, share=share),
    }


def _stacked(templates: Templates, shape: tuple[int, ...]) -> np.ndarray:
    """Return templates_TLS, also of no kinds."""
    return np.array([mask_BLS[0] for mask_BLS in templates.values()], bool).reshape(-1, *shape)


def _relations(templates: Templates) -> dict[str, list[list[int]]]:
    found = {kind: np.argwhere(templates[kind][0]).tolist() for kind in OF_STORIES | OF_PYTHON if kind in templates}
    return {kind: pairs for kind, pairs in found.items() if pairs}


def _typical(query_NHK: np.ndarray, labels: list[list[HeadLabel]] | None, templates: Templates) -> list[list[int]]:
    """Return the query[layer][head] on which the page opens, see `typical.queries`."""
    names = [[label.name for label in layer] for layer in labels] if labels else None
    return typical.of_labels(query_NHK, list(templates), names)


def _positions(model: LoadedModel, text: Any = None) -> dict[str, Any]:
    """Return the encodings' constants, the cosines of a learned table, T5's biases, and curves of other encodings."""
    config, learned, t5 = model.config.model, None, None
    pattern, layers = config.position_pattern, encodings.of_layers(model)
    alone = [[encoding for encoding in layer if type(encoding) in encodings.WITH_FIGURES] for layer in layers]
    used = {encoding.name: encoding for layer in alone for encoding in layer}
    if "learned" in used:
        table_PD = np.asarray(used["learned"].embedding[...])
        every = -(-len(table_PD) // MOST_POSITIONS)
        levels = np.round(127 * images.cosines(table_PD[::every])).astype(np.int8)
        learned = {"every": every, "size": len(levels), "cosines": base64.b64encode(levels.tobytes()).decode()}
    if "t5" in used:
        table = np.asarray(used["t5"].bias_table[...])
        t5 = table[figures.t5_buckets(config, min(FARTHEST, 2 * config.t5.max_distance))].T.round(4).tolist()
    rope, rotated = config.rope.of_first_layer, config.rotated_width
    assert isinstance(rope.base, float) and isinstance(rope.factor, float)
    curves = encodings.curves(layers, config, np.arange(FARTHEST_OF_OTHERS))
    curves += encodings.places(model, text) if isinstance(text, np.ndarray) else []
    factors_P = waves.rope_frequencies(rope, rotated) / waves.geometric_frequencies(rope.base, rotated)
    width = config.sinusoidal.columns or config.d_model
    return {
        "pattern": [pattern[layer % len(pattern)] for layer in range(config.num_layers)],
        "known": [next((encoding.name for encoding in layer), None) for layer in alone],
        "width": width,
        "waves": waves.geometric_frequencies(10, width).tolist(),  # radians per token; base 10**x: to the power of x
        "rotated": rotated,
        "base": rope.base if "rope" in used else config.sinusoidal.base,
        "scaling": None if rope.scaling == "none" else f"{rope.scaling}, factor {rope.factor:g}",
        "turns": waves.geometric_frequencies(10, rotated).tolist(),  # of RoPE, as `waves`
        "factors": factors_P.tolist(),  # frequency with scaling / without, for each pair
        "slopes": biases.alibi_slopes(config.num_heads, config.alibi_exponent),
        "learned": learned,
        "t5": t5,
        "curves": [_card(found) for found in curves[:MOST_CARDS]],
    }


def _card(curves: Curves) -> dict[str, Any]:
    """Return what the page holds of an encoding without a card of its own: the curves of the first heads."""
    values_HS = curves.values_HS
    if curves.kind == "similarity":
        values_HS = values_HS[:, np.isfinite(values_HS[0])]  # up to the farthest positions that were trained
    lines = [[None if np.isnan(y) else float(f"{y:.6g}") for y in values_S] for values_S in values_HS.tolist()]
    fields = {"name": curves.name, "kind": curves.kind, "meaning": curves.meaning, "layers": curves.layers}
    named = zip(curves.labels, lines, strict=True)
    shown = [{"name": label, "values": values} for label, values in named][:MOST_LINES]
    return fields | {"heads": len(lines), "lines": shown}


def packed(
    logits_NHLS: np.ndarray, weights_NHLS: np.ndarray, seen_NHLS: np.ndarray, *, causal: bool, share: float = 1.0
) -> dict[str, Any]:
    """Return each row's largest logit, and the square roots of (largest logit - logit), quantised and compressed.

    share: of MOST_BYTES that the logits may take.
    error: the largest difference between the model's weights and those that the page computes.
    """
    top_NHL1 = np.where(seen_NHLS, logits_NHLS, -np.inf).max(axis=-1, keepdims=True)
    top_NHL1 = np.where(np.isfinite(top_NHL1), top_NHL1, 0)
    roots = np.sqrt(np.clip(top_NHL1 - logits_NHLS, 0, FLOOR) / FLOOR)
    shape = logits_NHLS.shape[2:]
    rows, columns = np.tril_indices(shape[0]) if causal else np.indices(shape).reshape(2, -1)
    for steps in (MOST_STEPS // 2**halvings for halvings in range(8)):  # until the logits fit in the page
        levels = np.where(seen_NHLS, np.round(roots * steps), HIDDEN).astype(np.uint8)
        text = base64.b64encode(zlib.compress(levels[:, :, rows, columns].tobytes(), 9)).decode()
        if len(text) <= share * MOST_BYTES:
            break
    else:
        raise ValueError(f"{levels.shape} attention maps do not fit in a page; give at most `most_tokens` tokens")
    restored = np.where(seen_NHLS, np.exp(-FLOOR * (levels / steps) ** 2), 0)
    restored = restored / np.maximum(restored.sum(axis=-1, keepdims=True), 1e-30)
    return {
        "causal": causal,
        "steps": steps,
        "floor": FLOOR,
        "hidden": HIDDEN,
        "row_max": base64.b64encode(top_NHL1.astype("<f4").tobytes()).decode(),
        "logits": text,
        "error": float(np.abs(restored - weights_NHLS).max()),
    }

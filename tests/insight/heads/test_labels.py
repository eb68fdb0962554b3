"""Heads made by hand get their labels; figures of labels over runs and tasks."""

import functools
import itertools
import random

import jax
import numpy as np
import pytest

from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.insight.heads import across
from mini_gpt.insight.heads import inputs as head_inputs
from mini_gpt.insight.heads import report as head_report
from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.insight.heads import templates as head_templates
from mini_gpt.insight.heads.kinds import PLACES
from mini_gpt.insight.heads.templates import Vocabulary
from mini_gpt.insight.observing import AttentionMaps, Layer
from tests.conftest import slow
from tests.random_models import random_model

# Heads made by hand get their label on Python source, and heads without content get no label of content.

L, ROWS = 128, 64
CAUSAL_LS = np.tril(np.ones((L, L), bool))
BACK_LS = np.arange(L)[:, None] - np.arange(L)


measure = jax.jit(head_scores.measure)


def source():
    """Return the tokens of Python source with functions, calls, names and nested brackets; ROWS windows of L bytes."""
    rng, lines = random.Random(0), []
    names = ["alpha", "be_ta", "x1", "index", "total", "w"]
    while sum(map(len, lines)) < ROWS * L:
        a, b, c, d = (rng.choice(names) for _ in range(4))
        expression = rng.choice([f"({a} + {b})", f"[{a}, ({b} * {c}), {d}]", f"{a}[{b}]({c})", f"{a} + {b} - {c}"])
        lines.append(rng.choice([f"{d} = {expression}\n", f"def {a}({b}):\n    return {expression}\n{a}({c})\n"]))
    return ByteTokenizer().encode("".join(lines)).astype(np.uint16)


@functools.cache
def templates():
    """Return {kind: template_BLS} of windows of Python source, one byte per token."""
    tokenizer, tokens = ByteTokenizer(), source()
    texts = head_inputs.of_text(tokens, tokenizer, L)
    opens_BL = np.arange(L) == np.zeros((ROWS, 1))
    vocabulary = head_inputs.vocabulary(tokenizer, tokens)
    found = head_templates.of_tokens(texts.tokens_BL, opens_BL, vocabulary, causal=True)
    return found | texts.relations(range(ROWS))


def labelled(weights_BLS):
    """Return the label of a head, its other labels, its offset and {kind: strength}."""
    kinds = templates()
    maps = AttentionMaps(weights_BLS[:, None] * 0, np.float32(weights_BLS)[:, None], CAUSAL_LS[None])
    stacked_BTLS = np.stack(list(kinds.values()), axis=1)
    sums, _ = measure(Layer(maps, *[None] * 6), stacked_BTLS, np.ones((ROWS, L), bool))
    sums = head_scores.HeadSums(*map(np.asarray, sums))
    values = head_scores.of_kinds(tuple(kinds), sums, 0)
    offset, values["fixed offset"] = head_scores.fixed_offset(sums, 0)
    entropy = float(sums.entropy_H[0] / sums.queries)
    label, also = head_report.label_of({kind: (v["strength"], v["queries"]) for kind, v in values.items()}, entropy)
    return label, also, offset, {kind: v["strength"] for kind, v in values.items()}


def normalised(weights_BLS):
    return weights_BLS / np.maximum(weights_BLS.sum(-1, keepdims=True), 1e-9)


RESTS = {"first token": np.arange(L) == np.zeros((L, 1)), "self": BACK_LS == 0, "uniform": CAUSAL_LS}
CONTENT = ("delimiter", "current word", "word start", "duplicate token", "rare token")
CONTENT += ("matching bracket", "earlier use of a name", "definition of a call")
QUICK = ("current word", "matching bracket")


@pytest.mark.parametrize(
    "strengths, expected",
    [
        ({"local window": 0.9, "current word": 0.25}, ("current word", ["local window"])),
        ({"local window": 0.9, "current word": 0.24}, ("local window", [])),
        ({"fixed offset": 0.49, "previous token": 0.49, "delimiter": 0.3}, ("delimiter", [])),
        ({"induction": 0.26, "previous token": 0.5}, ("previous token", ["induction"])),
        ({"first token": 0.49, "induction": 0.2}, ("mixed", [])),
    ],
)
def test_content_needs_less_strength_for_a_label(strengths, expected):
    assert head_report.label_of({kind: (value, 50) for kind, value in strengths.items()}, 0.3) == expected
    assert head_report.label_of({kind: (value, 49) for kind, value in strengths.items()}, 0.3) == ("mixed", [])


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, *slow(0.9)])
@pytest.mark.parametrize("kind", [*QUICK, *slow(*(kind for kind in CONTENT if kind not in QUICK))])
def test_content_comes_before_resting_places(kind, share):
    of_kind_BLS = templates()[kind] & CAUSAL_LS
    for rest_LS in RESTS.values():
        rest_BLS = np.broadcast_to(normalised(rest_LS), of_kind_BLS.shape)
        found_BLS = share * normalised(of_kind_BLS) + (1 - share) * rest_BLS
        label, also, _, strengths = labelled(np.where(of_kind_BLS.any(-1, keepdims=True), found_BLS, rest_BLS))
        assert label == kind, (label, also, strengths)
        assert share < 1 or strengths[kind] == pytest.approx(1, abs=1e-3), strengths


def positional():
    """Yield the label of a head that does not depend on content, its offset, and its weights_LS."""
    sink_LS = RESTS["first token"]
    for back in (0, 1, 2, 3, 5, 8, 16, 40, 64):
        label = {0: "self", 1: "previous token"}.get(back, "fixed offset")
        yield label, -back, np.where((back <= np.arange(L))[:, None], back == BACK_LS, sink_LS)
    yield "first token", None, sink_LS
    yield "global", None, CAUSAL_LS
    yield "local window", None, CAUSAL_LS & (BACK_LS < 4)
    for scale in (8.0, 32.0):
        yield "mixed", None, CAUSAL_LS * np.exp(-BACK_LS / scale)


QUICK, OTHERS = [*positional()][1::4], [case for at, case in enumerate(positional()) if at % 4 != 1]


@pytest.mark.parametrize(("expected", "offset", "weights_LS"), [*QUICK, *slow(*OTHERS)])
def test_heads_without_content_get_no_label_of_content(expected, offset, weights_LS):
    label, _, found, strengths = labelled(np.broadcast_to(normalised(weights_LS), (ROWS, L, L)))
    assert label.replace("global", "mixed") == expected.replace("global", "mixed"), strengths
    assert found == offset or label != "fixed offset"
    content = {kind: strengths[kind] for kind in strengths.keys() - {*PLACES, "fixed offset"}}
    assert all(strength is None or strength < 0.25 for strength in content.values()), content


@pytest.mark.slow
@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal", "rope", "t5"])
def test_an_untrained_model_has_no_labels(small, position):
    tokenizer = ByteTokenizer()
    fields = {"model__num_layers": 2, "context_length": 64, "model__d_model": 64, "model__num_heads": 4}
    model = random_model(small(model__position=position, **fields), tokenizer.token_bytes, noise=0)
    tokens = source()
    rows = head_report.head_report(model, tokenizer, head_inputs.of_text(tokens, tokenizer, 64), tokens)
    assert {row["label"] for row in rows} == {"global"}
    strengths = [v["strength"] for row in rows for v in row["kinds"].values() if v["queries"]]
    assert max(map(abs, strengths)) < 0.1


def test_letters_and_delimiters_of_tokens():
    text = "".join(sorted("a_1 =<+(.\n\té"))
    tokenizer = CharacterTokenizer(text)
    vocabulary = Vocabulary(*(column_V[tokenizer.encode(text)] for column_V in all_of(tokenizer)))
    assert "".join(np.array([*text])[vocabulary.is_delimiter_V]) == "\n(+.<="
    assert "".join(np.array([*text])[vocabulary.starts_with_letter_V]) == "1_aé"
    assert (vocabulary.starts_with_letter_V == vocabulary.ends_with_letter_V).all()
    assert [bool(column_V[len(text)]) for column_V in all_of(tokenizer)] == [True, True, False, False], "the separator"
    assert not any(column_V[-1] for column_V in all_of(tokenizer)), "the mask token"
    is_letter_V = all_of(ByteTokenizer()).starts_with_letter_V
    assert is_letter_V[[*"é".encode()]].all() and not is_letter_V[[*b" -\n"]].any()


def all_of(tokenizer):
    return head_inputs.vocabulary(tokenizer, np.zeros(0, int))


def test_words_have_any_number_of_tokens():
    texts = ["def", " foo", "bar", "(x", "1", ")", " =", "_y", " ", "z"]
    letter = lambda text: text.isalnum() or text == "_"
    starts_V, ends_V = (np.array([letter(text[place]) for text in texts]) for place in (0, -1))
    none_V = np.zeros(len(texts), bool)
    tokens_BL = np.arange(len(texts))[None]
    vocabulary = Vocabulary(none_V, none_V, starts_V, ends_V)
    kinds = head_templates.of_tokens(tokens_BL, tokens_BL == 0, vocabulary, causal=True)
    assert [texts[key] for key in np.flatnonzero(kinds["word start"][0].any(0))] == [" foo", "(x", "_y", "z"]
    pairs = {(texts[query], texts[key]) for query, key in np.argwhere(kinds["current word"][0]) if key < query}
    assert pairs == {("bar", " foo"), ("1", "(x")}


# Figures of heads over runs and tasks.


def head(layer, number, label, **strengths):
    kinds = {kind.replace("_", " "): {"strength": strength, "queries": 9} for kind, strength in strengths.items()}
    return {"layer": layer, "head": number, "label": label, "kinds": kinds}


HEADS = [
    head(0, 0, "previous token", previous_token=0.8, induction=0.0),
    head(0, 1, "previous token", previous_token=0.6, induction=0.1),
    head(1, 0, "induction", previous_token=0.2, induction=0.7),
    head(1, 1, "mixed", previous_token=0.0, induction=0.1),
]


def test_bars_count_labels_by_layer_and_the_map_has_mean_strengths():
    bars, _, below, *_ = across.by_depth_figure({"a": HEADS, "b": HEADS[::-1]}).axes
    counts = {container.get_label(): [bar.get_height() for bar in container] for container in bars.containers}
    assert counts == {"previous token": [2, 0], "induction": [0, 1], "mixed": [0, 1]}
    assert [label.get_text() for label in below.get_yticklabels()] == ["previous token", "induction"]
    np.testing.assert_allclose(below.get_images()[0].get_array(), [[0.7, 0.1], [0.05, 0.4]])


def test_labels_look_different():
    labels = [*map(str, range(20)), "mixed", "global"]
    bars = across.by_depth_figure({"a": [head(0, 0, label) for label in labels]}).axes[0].containers
    looks = [(*bar[0].get_facecolor(), bar[0].get_hatch() is None) for bar in bars]
    assert all(np.abs(np.subtract(a, b)).max() > 0.04 for a, b in itertools.combinations(looks, 2))


def test_importance_has_a_column_for_each_task_and_one_scale():
    tasks = {"copy": np.array([[0.5, 0.1], [0.2, 0.0]]), "reverse": np.array([[-0.1, 0.3], [1.5, np.nan]])}
    drawn = across.importance_figure(tasks)
    assert {image.get_clim() for axes in drawn.axes[:2] for image in axes.get_images()} == {(-1.5, 1.5)}
    assert drawn.axes[1].get_title() == "reverse\nrank correlation -0.50"


def test_equal_values_have_their_mean_rank():
    first, second = np.array([[1, 2, 2, 5]]), np.array([[3, 1, 2, 9]])
    ranks = np.array([1, 2.5, 2.5, 4]), np.array([3, 1, 2, 4])
    assert across.rank_correlation(first, second) == pytest.approx(np.corrcoef(*ranks)[0, 1])

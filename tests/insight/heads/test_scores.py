"""Scores of heads, and the query that is typical of a head."""

import math

import jax
import numpy as np
import pytest

from mini_gpt.insight.heads import scores as head_scores
from mini_gpt.insight.heads import templates, typical
from mini_gpt.insight.heads import templates as head_templates
from mini_gpt.insight.heads.report import label_of
from mini_gpt.insight.heads.templates import Vocabulary
from mini_gpt.insight.observing import AttentionMaps, Layer
from tests.conftest import slow

# Scores label synthetic attention maps correctly at any length, and equal sums over single pairs.


def causal(length):
    return np.tril(np.ones((length, length), bool))


def normalised(weights_LS):
    return weights_LS / weights_LS.sum(-1, keepdims=True)


def shifted(length, by):
    """Return [L, L] weights with all weight on the key `by` positions before the query, or on the first key."""
    weights_LS = np.zeros((length, length))
    weights_LS[np.arange(length), np.maximum(np.arange(length) - by, 0)] = 1
    return weights_LS


def no_kinds(size):
    return Vocabulary(*np.zeros((4, size), bool))


def traced(weights_BHLS, visible_BLS):
    return Layer(AttentionMaps(weights_BHLS * 0, np.float32(weights_BHLS), visible_BLS), *[None] * 6)


def heads_of(length):
    uniform = normalised(causal(length))
    sink = shifted(length, length)
    return {
        "previous token": shifted(length, 1),
        "self": shifted(length, 0),
        "local window": (shifted(length, 1) + shifted(length, 2) + shifted(length, 3)) / 3,
        "first token": sink,
        "global": uniform,
        "mixed": (shifted(length, 1) + sink + uniform) / 3,
        "fixed offset": shifted(length, 7),
        "fixed offset too": shifted(length, 13),
    }


def measured(weights_HLS, tokens_L, templates):
    """Return {kind: (strength, queries)} for each head, the entropies [H], and (sums, strongest pairs)."""
    length = len(tokens_L)
    templates_BTLS = np.stack(list(templates.values()), axis=1)
    trace = traced(weights_HLS[None], causal(length)[None])
    sums, strongest = jax.jit(head_scores.measure)(trace, templates_BTLS, np.ones((1, length), bool))
    sums = head_scores.HeadSums(*map(np.asarray, sums))
    rows = []
    for head in range(len(weights_HLS)):
        kinds = head_scores.of_kinds(tuple(templates), sums, head)
        kinds["fixed offset"] = head_scores.fixed_offset(sums, head)[1]
        rows.append({kind: (values["strength"] or 0.0, values["queries"]) for kind, values in kinds.items()})
    return rows, sums.entropy_H / sums.queries, (sums, strongest)


@pytest.mark.parametrize("length", [64, *slow(300, 1024)])
def test_synthetic_heads_get_their_label_at_any_length(length):
    tokens_L = np.random.default_rng(0).permutation(length)
    opens_BL = np.arange(length)[None] == 0
    drawn_V = np.random.default_rng(1).random(length)
    drawn_V[tokens_L[0]] = 0.5  # neither a delimiter nor rare
    vocabulary = no_kinds(length)._replace(is_delimiter_V=drawn_V < 0.1, is_rare_V=drawn_V > 0.95)
    templates = head_templates.of_tokens(tokens_L[None], opens_BL, vocabulary, causal=True)
    heads = heads_of(length)
    strengths, entropy_H, _ = measured(np.stack(list(heads.values())), tokens_L, templates)
    for name, of, entropy in zip(heads, strengths, entropy_H, strict=True):
        if name in of:
            assert of[name][0] == pytest.approx(1, abs=0.02), (name, of)
        assert label_of(of, entropy)[0] == name.removesuffix(" too"), (name, of)
    even = strengths[list(heads).index("global")]
    assert all(abs(strength) < 1e-5 for strength, _ in even.values()), "uniform attention is at chance level"
    assert entropy_H[list(heads).index("global")] == pytest.approx(1, abs=1e-5)
    # A row's standard deviation is no useful score: with 44 keys or more, it is below 0.15 for every head.
    one_hot = shifted(length, 1)[-1]
    assert one_hot.std() < 0.15 and one_hot.std() == pytest.approx(math.sqrt(1 / length * (1 - 1 / length)))


def test_sums_equal_those_over_single_pairs():
    rng, length = np.random.default_rng(2), 12
    weights_HLS = np.stack([normalised(rng.random((length, length)) * causal(length)) for _ in range(3)])
    tokens_L, delimiter_V, rare_V = np.array([2, 1, 3, 2, 0, 4, 0, 3, 1, 2, 2, 0]), np.arange(5) == 1, np.arange(5) >= 3
    opens_L = np.isin(np.arange(length), [0, 5])
    letter_V = np.arange(5) >= 2
    vocabulary = Vocabulary(delimiter_V, rare_V, letter_V, letter_V)
    templates = head_templates.of_tokens(tokens_L[None], opens_L[None], vocabulary, causal=True)
    other = lambda i, j: j not in (i, 0, 5)
    letters = lambda i, j: all(tokens_L[j : i + 1] >= 2)
    is_kind = {
        "previous token": lambda i, j: j == i - 1,
        "self": lambda i, j: j == i,
        "local window": lambda i, j: i - 3 <= j <= i,
        "first token": lambda i, j: j in (0, 5),
        "delimiter": lambda i, j: tokens_L[j] == 1 and other(i, j),
        "current word": lambda i, j: letters(i, j) and other(i, j),
        "word start": lambda i, j: letters(j, j) and other(i, j) and not letters(j - 1, j - 1),
        "duplicate token": lambda i, j: tokens_L[j] == tokens_L[i] and other(i, j),
        "rare token": lambda i, j: tokens_L[j] >= 3 and other(i, j),
    }
    assert list(templates) == list(is_kind)
    _, entropy_H, (sums, strongest) = measured(weights_HLS, tokens_L, templates)
    offset_mass = lambda head, back: sum(weights_HLS[head, i, i - back] for i in range(max(back, 1), length))
    offset_uniform = lambda back: sum(1 / (i + 1) for i in range(max(back, 1), length))
    for head, back in np.ndindex(3, length):
        assert sums.mass_HO[head, back + length - 1] == pytest.approx(offset_mass(head, back), rel=1e-5)
        assert sums.uniform_O[back + length - 1] == pytest.approx(offset_uniform(back), rel=1e-5)
        assert sums.queries_O[back + length - 1] == length - max(back, 1)
    for place, of_kind in enumerate(is_kind.values()):
        keys_of = {i: [j for j in range(i + 1) if of_kind(i, j)] for i in range(length)}
        keys_of = {i: keys for i, keys in keys_of.items() if 0 < len(keys) < i + 1}
        assert sums.queries_T[place] == len(keys_of) > 0
        assert sums.uniform_T[place] == pytest.approx(sum(len(keys) / (i + 1) for i, keys in keys_of.items()))
        for head in range(3):
            mass = sum(weights_HLS[head, i, j] for i, keys in keys_of.items() for j in keys)
            assert sums.mass_HT[head, place] == pytest.approx(mass, rel=1e-5)
            mass_at = lambda back, head=head, of=keys_of: sum(weights_HLS[head, i, i - back] for i in of if i >= back)
            uniform_at = lambda back, of=keys_of: sum(1 / (i + 1) for i in of if i >= back)
            factor = [mass_at(back) / max(uniform_at(back), 1e-9) for back in range(length)]
            chance = lambda i, j, factor=factor: factor[i - j] / sum(factor[: i + 1])
            by_distance = sum(chance(i, j) for i, keys in keys_of.items() for j in keys)
            assert sums.by_distance_HT[head, place] == pytest.approx(by_distance, rel=1e-5)
    for head, weights_LS in enumerate(weights_HLS):
        rows = range(1, length)
        entropies = [-sum(w * math.log(w) for w in weights_LS[i, : i + 1]) / math.log(i + 1) for i in rows]
        assert entropy_H[head] == pytest.approx(np.mean(entropies), rel=1e-5)
        distances = [sum(weights_LS[i, j] * (i - j) for j in range(i + 1)) for i in rows]
        assert sums.distance_H[head] == pytest.approx(sum(distances), rel=1e-5)
        pairs = {(i, j): weights_LS[i, j] for i in range(11, length) for j in range(i)}  # queries with all 12 keys
        i, j = max(pairs, key=pairs.get)
        assert strongest.weight_BH[0, head] == pytest.approx(pairs[i, j])
        assert divmod(int(strongest.index_BH[0, head]), length) == (i, j)


def test_padding_does_not_count():
    length = 8
    weights_BHLS = np.stack([normalised(causal(length))[None]] * 2).astype(np.float32)
    opens_BL = np.arange(length)[None] == np.zeros((2, 1))
    templates = head_templates.of_tokens(np.zeros((2, length), int), opens_BL, no_kinds(1), causal=True)
    stacked = np.stack(list(templates.values()), axis=1)
    is_query_BL = np.array([[True] * length, [True] * 5 + [False] * 3])
    trace = traced(weights_BHLS, causal(length)[None])
    full, half, both = (head_scores.measure(trace, stacked, is_query_BL[rows])[0] for rows in ([0, 0], [1, 1], [0, 1]))
    for name in set(head_scores.HeadSums._fields) - {"by_distance_HT"}:
        alone = np.asarray(getattr(full, name)) + np.asarray(getattr(half, name))
        np.testing.assert_allclose(np.asarray(getattr(both, name)), alone / 2, rtol=1e-6)
    assert both.queries == 7 + 4 and half.queries_T[0] == 2 * 4


def test_bidirectional_attention_has_a_next_token_kind():
    templates = head_templates.of_tokens(np.zeros((1, 6), int), np.zeros((1, 6), bool), no_kinds(1), causal=False)
    assert list(templates)[:5] == ["previous token", "next token", "self", "local window", "first token"]
    assert templates["next token"][0, 2].tolist() == [False, False, False, True, False, False]
    assert templates["local window"][0, 2].tolist() == [True] * 6


def test_induction_keys_follow_earlier_copies_of_the_query():
    frequent = np.arange(3, 90)
    for tokens, length, most in ((frequent, 65, 32), (frequent[:7], 33, 7)):
        tokens_BL, period_B = head_templates.repeated_tokens(tokens, length, rows=12, seed=1)
        assert tokens_BL.shape == (12, length) and set(tokens_BL.flat) <= set(tokens)
        assert len(set(period_B)) > 2 and most // 2 <= min(period_B) < max(period_B) <= most
        assert len({tuple(row) for row in tokens_BL}) == 12
        (template_BLS,) = head_templates.induction(length, period_B).values()
        for row, period in enumerate(period_B):
            assert len(set(tokens_BL[row, :period])) == period
            assert (tokens_BL[row, :-period] == tokens_BL[row, period:]).all()
        for row, query, key in np.ndindex(template_BLS.shape):
            follows = 0 < key <= query and tokens_BL[row, key - 1] == tokens_BL[row, query]
            assert template_BLS[row, query, key] == (follows and query >= period_B[row])


@pytest.mark.slow
def test_a_fixed_distance_is_not_induction():
    tokens_BL, period_B = head_templates.repeated_tokens(np.arange(60), length=64, rows=32, seed=0)
    templates_BTLS = head_templates.induction(64, period_B)["induction"][:, None]
    for back in (3, 20, 24, 31):
        trace = traced(np.broadcast_to(shifted(64, back), (32, 1, 64, 64)), causal(64)[None])
        sums, _ = head_scores.measure(trace, templates_BTLS, np.ones(tokens_BL.shape, bool))
        for chance in (sums.uniform_T, sums.by_distance_HT[0]):
            assert head_scores.strength(sums.mass_HT[0, 0], chance[0], sums.queries_T[0]) < 0.15


# The query that is typical of a head: of its label, or of its mean pattern.

LENGTH = 12
SEEN_LS = np.tri(LENGTH, dtype=bool)
PREVIOUS_LS = np.eye(LENGTH, k=-1, dtype=bool)


def uniform() -> np.ndarray:
    return SEEN_LS / SEEN_LS.sum(-1, keepdims=True)


def of_one_head(weights_LS, *kinds_LS, seen_LS=SEEN_LS) -> list[int]:
    kinds_TLS = np.array(kinds_LS, bool).reshape(-1, *weights_LS.shape)
    return typical.queries(weights_LS[None].astype(np.float32), seen_LS[None], kinds_TLS)[0].tolist()


def test_the_typical_query_of_a_kind_reads_such_keys_the_most():
    weights_LS = uniform()
    weights_LS[5] = 0.02 * SEEN_LS[5] + 0.88 * PREVIOUS_LS[5]
    weights_LS[9] = 0.05 * SEEN_LS[9] + 0.5 * PREVIOUS_LS[9]
    assert of_one_head(weights_LS, PREVIOUS_LS)[0] == 5


def test_a_query_that_can_only_read_such_keys_is_not_typical():
    """The second token has a weight of 0.9 on the previous one, of two keys; the eighth has 0.8, of eight."""
    weights_LS = uniform()
    weights_LS[1, :2] = 0.9, 0.1
    weights_LS[7] = 0.2 / 7 * SEEN_LS[7]
    weights_LS[7, 6] = 0.8
    assert of_one_head(weights_LS, PREVIOUS_LS)[0] == 7
    assert of_one_head(uniform(), SEEN_LS)[0] == -1, "a query that sees keys of this kind only"


def test_a_kind_that_no_query_reads_has_no_typical_query():
    weights_LS = uniform()
    avoided_LS = np.zeros_like(SEEN_LS)
    assert of_one_head(weights_LS, avoided_LS, PREVIOUS_LS)[:2] == [-1, -1]


@pytest.mark.parametrize("shape", [(12, 12), (12, 9), (9, 12)])
def test_without_a_kind_the_query_nearest_to_the_mean_is_typical(shape):
    """Each query reads the keys at its own two distances in turn, but one reads both as the mean does."""
    weights_LS = np.zeros(shape)
    for query in range(2, min(shape)):
        weights_LS[query, [query, query - 2]] = (0.9, 0.1) if query % 2 else (0.1, 0.9)
    weights_LS[6, [6, 4]] = 0.5, 0.5
    seen_LS = weights_LS > 0
    assert of_one_head(weights_LS, seen_LS=seen_LS) == [6]


def test_a_head_opens_on_the_query_of_its_label():
    query_NHK = np.array([[[3, -1, 8], [4, 5, 9], [6, 7, 2]]])
    of_labels = lambda *names: typical.of_labels(query_NHK, ["self", "induction"], [names] if names else None)
    assert of_labels("self", "induction", "mixed") == [[3, 5, 2]]
    assert of_labels("induction", "", "self") == [[8, 9, 6]], "no query reads the keys of induction"
    assert of_labels() == [[8, 9, 2]]


def test_in_a_text_induction_reads_what_followed_a_copy():
    tokens_BL = np.array([[4, 7, 4, 4, 9, 7]])
    assert np.argwhere(templates.after_copies(tokens_BL)[0]).tolist() == [[2, 1], [3, 1], [5, 2]]

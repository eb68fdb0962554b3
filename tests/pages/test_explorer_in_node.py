"""The explorer's scripts in Node: the game, the heads side by side, the opening token, and the products of a pair."""

import base64

import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight.attention import attention_maps
from mini_gpt.model.positions.biases import alibi_slopes
from mini_gpt.pages.explorer import page as explorer
from mini_gpt.pages.explorer import vectors
from tests.conftest import SMALL, slow
from tests.pages import node
from tests.pages.test_explorer import COMMON, data_of
from tests.random_models import random_model

FOLDER = explorer.PAGE.parent
SCRIPTS = [COMMON / f"{name}.js" for name in ("arrays", "numbers", "random", "tokens")]
SCRIPTS += [FOLDER / f"{name}.js" for name in ("attention", "heads", "guess", "beside_view")]
LENGTH = 12


def held(weights_NHLS, **more):
    seen_LS = np.tri(LENGTH, dtype=bool)
    logits_NHLS = np.log(np.maximum(weights_NHLS, 1e-7)).astype(np.float32)
    packed = explorer.packed(logits_NHLS, weights_NHLS, np.broadcast_to(seen_LS, logits_NHLS.shape), causal=True)
    layers, heads = weights_NHLS.shape[:2]
    return packed | {"tokens": list("abcdefghijkl"), "layers": layers, "heads": heads} | more


def weights_of(seed, layers=1, heads=1):
    weights = np.random.default_rng(seed).gamma(0.3, size=(layers, heads, LENGTH, LENGTH)) + 1e-3
    weights = np.tril(weights)
    return weights / weights.sum(-1, keepdims=True)


def in_node(expression, given):
    made = "const held = new Attention(given.held, await unpack(given.held.logits));"
    return node.evaluate(SCRIPTS, f"(async () => {{ {made} return {expression}; }})()", given)


LABELS = [[["subject of the verb", 0.5]]]
PAIRS = [[5, 2], [6, 2], [6, 3], [9, 8], [10, 1]]


@pytest.mark.parametrize(
    ("truth", "true_of"),
    [
        ({}, {}),
        ({"labels": LABELS, "relations": {"object of the verb": PAIRS}}, {}),
        ({"alignment": [[2, 4, 5, 8], [0, 1, 9, 10]]}, {query: {2, 3} for query in (5, 6, 7)} | {9: {0}}),
        ({"labels": LABELS, "relations": {"subject of the verb": PAIRS}}, {5: {2}, 6: {2, 3}, 9: {8}, 10: {1}}),
    ],
)
def test_scores_are_mean_weights_of_the_chosen_keys(truth, true_of):
    weights_LS = weights_of(0)[0, 0]
    given = {"held": held(weights_LS[None, None], **truth)}
    queries = in_node("queriesOf(held, 0, 0, 3)", given)
    assert sorted(set(queries)) == sorted(queries) and len(queries) == 8 and min(queries) >= 3
    assert {*queries[: len(true_of)]} == {*true_of}
    assert in_node("queriesOf(held, 0, 0, 3)", given) == queries != in_node("queriesOf(held, 0, 0, 4)", given)
    guesses = [query - 1 for query in queries[:5]]
    found = in_node(
        "scoresOf(held, 0, 0, given.queries, given.guesses)", given | {"queries": queries, "guesses": guesses}
    )
    played = queries[:5]
    others = [query for query in range(LENGTH) if query not in queries]
    by_offset = [sum(weights_LS[i, i - by] for i in others if i >= by) for by in range(LENGTH)]
    best = int(np.argmax(by_offset))
    assert found["offset"]["by"] == best
    expected = {
        "reader": weights_LS[played, guesses].mean(),
        "head": weights_LS[played].max(-1).mean(),
        "even": np.mean([1 / (query + 1) for query in played]),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=0.01), name
    assert found["offset"]["score"] == pytest.approx(
        np.mean([weights_LS[i, i - best] if i >= best else 0 for i in played]), abs=0.01
    )
    if not true_of:
        assert found["hits"] is None
        return
    known = [query for query in played if query in true_of]
    hits = {"reader": lambda i: i - 1, "head": lambda i: int(weights_LS[i].argmax()), "offset": lambda i: i - best}
    for name, chosen in hits.items():
        assert found["hits"][name] == pytest.approx(np.mean([chosen(i) in true_of[i] for i in known])), name


def test_six_heads_are_the_strongest_of_each_label_and_then_the_next_strongest():
    labels = [
        [["previous token", 0.9], ["previous token", 0.8], ["mixed", None], ["induction", 0.2]],
        [["mixed", None], ["self", 0.1], ["previous token", 0.3], ["previous token", 0.95]],
    ]
    given = {"held": held(weights_of(1, 2, 4), labels=labels)}
    assert in_node("sixHeads(held)", given) == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 1], [1, 3]]
    given["held"]["labels"] = None
    assert in_node("sixHeads(held)", given) == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]


def test_removed_heads_are_not_chosen_and_not_in_a_mean():
    weights = weights_of(1, heads=3)
    given = {"held": held(weights, labels=[[["mixed", None], ["removed", None], ["mixed", None]]])}
    assert in_node("[headsOf(held, 0), sixHeads(held)]", given) == [[0, 2], [[0, 0], [0, 2]]]
    assert in_node("held.meansAt(0)(5, 2)", given) == pytest.approx(weights[0, ::2, 5, 2].mean(), abs=0.01)


@pytest.mark.parametrize("is_long", [False, *slow(True)])
def test_a_head_opens_on_the_query_that_its_label_describes_best(small, monkeypatch, is_long):
    """A head without a label, and one whose label has no keys in the text, open on the query of their mean pattern."""
    if is_long:
        monkeypatch.setattr(explorer, "MOST_PAIRS", 0)
    tokenizer, length = tokenizers.ByteTokenizer(), 32
    model = random_model(small(model__position="rope"), tokenizer.token_bytes, noise=0.5)
    tokens = np.random.default_rng(0).integers(0, 256, length).astype(np.int32)
    keys = {"previous token": np.eye(length, k=-1, dtype=bool)[None], "matching bracket": np.zeros((1, 32, 32), bool)}
    names = ["previous token", "previous token", "mixed", "matching bracket"]
    labels = explorer.HeadLabels(
        {"decoder": [[explorer.HeadLabel(name, None) for name in names]]}, "", {"decoder": keys}
    )
    page = explorer.explorer(model, tokenizer, tokens, title="", subtitle="", labels=labels)
    weights_HLS = attention_maps(model, tokens[None])[0].weights_BHLS[0]
    above_HL = [[weights_LS[i, i - 1] - 1 / (i + 1) for i in range(1, length)] for weights_LS in weights_HLS]
    mean_HS = [[np.diagonal(weights_LS, -behind).mean() for behind in range(length)] for weights_LS in weights_HLS]
    nearest = [
        np.argmin([np.abs(np.pad(row[: i + 1][::-1], (0, length - 1 - i)) - mean).sum() for i, row in enumerate(rows)])
        for rows, mean in zip(weights_HLS, mean_HS, strict=True)
    ]
    typical = data_of(page)["attention"]["typical"]
    assert typical == [[1 + np.argmax(above_HL[0]), 1 + np.argmax(above_HL[1]), *nearest[2:]]]
    assert data_of(page)["attention"].get("kept") == (32 if is_long else None)


def test_with_queries_shown_a_key_that_the_typical_query_reads_opens():
    weights_LS = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.7, 0.2, 0], [0.3, 0.1, 0.1, 0.5]])
    logits_LS = np.log(np.maximum(weights_LS, 1e-6)).astype(np.float32)
    packed = explorer.packed(logits_LS[None, None], weights_LS[None, None], np.tri(4, dtype=bool), causal=True)
    given = packed | {"tokens": list("abcd"), "layers": 1, "heads": 1, "typical": [[2]]}
    expression = "[0, MEAN].map((head) => ['query', 'key'].map((side) => held.opening(side, 0, head)))"
    assert in_node(expression, {"held": given}) == [[2, 1], [3, 2]]


TOKENS = np.frombuffer(b"def main(x): return x", np.uint8).astype(np.int32)
ALL_SUMS = """const {tokens, layers} = given.held;
    const own = {heads: given.heads, vectors: vectorsOf(given.held)};
    const held = Object.assign(Object.create(Attention.prototype), own);
    const each = [...Array(tokens).keys()];
    return layers.map((_, layer) => [...Array(given.heads).keys()].map((head) =>
        each.map((i) => each.map((j) => held.products(layer, head, i, j).sum))));"""


def made(**fields):
    dotted = {name.replace("__", "."): value for name, value in fields.items()}
    fixed = {"data.path": "unused", "mesh.data": -1, "model.num_layers": 2}
    config = loading.load("configs/default.py", SMALL | fixed | dotted)
    return random_model(config, ByteTokenizer().token_bytes, noise=0.3)


@pytest.mark.parametrize(
    "fields",
    [
        {"model__position": "rope", "model__num_kv_heads": 2, "model__variants__qk_norm": "weighted"},
        *slow({"model__position": "alibi"}, {"model__position": "none", "model__scale_attention": False}),
    ],
    ids=str,
)
def test_the_sums_of_the_page_are_the_logits_of_the_model(fields):
    model = made(**fields)
    held = data_of(explorer.explorer(model, ByteTokenizer(), TOKENS, title="", subtitle=""))["attention"]["vectors"]
    sums_NHLS = np.array(node.evaluate(SCRIPTS, f"{{{ALL_SUMS}}}", {"held": held, "heads": 4}))
    logits_NHLS = np.stack([maps.logits_BHLS[0] for maps in attention_maps(model, TOKENS[None])])
    places = np.arange(len(TOKENS))
    if fields["model__position"] == "alibi":
        assert [layer["added"] for layer in held["layers"]] == [["alibi"]] * 2
        logits_NHLS = logits_NHLS + np.multiply.outer(alibi_slopes(4), np.abs(places[:, None] - places))
    else:
        assert [layer["added"] for layer in held["layers"]] == [[]] * 2
    assert np.abs(logits_NHLS).max() > 1
    np.testing.assert_allclose(sums_NHLS, logits_NHLS, atol=2e-3, rtol=1e-3)


def test_a_page_holds_vectors_of_as_many_tokens_as_fit():
    model = made()
    of_a_token = 2 * 2 * 4 * 8 * 2 * 4 / 3  # layers, queries and keys, heads, dimensions, bytes
    assert vectors.packed(model, TOKENS, int(2.5 * of_a_token)) is None, "the steps take as much as two tokens"
    held = vectors.packed(model, TOKENS, int(9.5 * of_a_token))
    assert held["tokens"] == 7
    assert len(base64.b64decode(held["layers"][1]["keys"]["values"])) == 7 * 4 * 8 * 2
    assert vectors.packed(model, TOKENS)["tokens"] == len(TOKENS)

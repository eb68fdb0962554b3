"""The game of the explorer: its scores, computed again with NumPy, and the heads that stand side by side."""

import numpy as np
import pytest

from mini_gpt.pages.explorer import page as explorer
from tests.pages import node
from tests.pages.test_explorer import COMMON

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

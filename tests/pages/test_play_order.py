"""The order duel of the playground: the text after a move, and how far a prediction moved."""

import numpy as np
import pytest

from mini_gpt.pages.play import page
from tests.pages import node

FOLDER = page.PAGE.parent
SCRIPTS = [FOLDER.parent / "common" / f"{name}.js" for name in ("numbers", "order")]
SCRIPTS += [FOLDER / "view" / "order_card.js"]


def test_words_move_and_white_space_stays():
    text = "first\n  the cat  sat\n"
    moved = "inOrder(wordsOf(given), movedOrder([0, 1, 2, 3], 3, 1))"
    assert node.evaluate(SCRIPTS, f"{{ return {moved}; }}", text) == "first\n  sat the  cat\n"
    many = " ".join(map(str, range(30))) + "\n"
    reverse = "inOrder(wordsOf(given), [...Array(16).keys()].reverse())"
    expected = " ".join(map(str, [*range(14), *range(29, 13, -1)])) + "\n"
    assert node.evaluate(SCRIPTS, f"{{ return {reverse}; }}", many) == expected


def test_movement_is_the_probability_that_went_to_other_tokens():
    before, after = np.random.default_rng(0).dirichlet(np.ones(5), size=2)
    results = [
        {"length": 2, "next": {"top": 5, "tokens": [0] * 5 + order, "probabilities": [0] * 5 + each[order].tolist()}}
        for order, each in (([3, 1, 0, 2, 4], before), ([4, 0, 1, 2, 3], after))
    ]
    found = node.evaluate(SCRIPTS, "{ return movement(...given.map(lastNext)); }", results)
    assert found == pytest.approx(np.maximum(after - before, 0).sum())

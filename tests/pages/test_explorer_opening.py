"""The explorer opens on a token that is typical of the head."""

import numpy as np
import pytest

from mini_gpt.data import tokenizers
from mini_gpt.insight.attention import attention_maps
from mini_gpt.pages.explorer import page as explorer
from tests.conftest import slow
from tests.pages import node
from tests.pages.test_explorer import COMMON, data_of
from tests.random_models import random_model

PARTS = ("heads", "attention")


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
    scripts = [COMMON / "arrays.js", COMMON / "tokens.js", *(explorer.PAGE.parent / f"{name}.js" for name in PARTS)]
    program = "(async () => { const held = new Attention(given, await unpack(given.logits));"
    program += " return [0, MEAN].map((head) => ['query', 'key'].map((side) => held.opening(side, 0, head))); })()"
    assert node.evaluate(scripts, program, given) == [[2, 1], [3, 2]]

"""The products of queries and keys in the explorer's page add up to the model's logits."""

import base64

import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight.attention import attention_maps
from mini_gpt.model.positions.biases import alibi_slopes
from mini_gpt.pages.explorer import page as explorer
from mini_gpt.pages.explorer import vectors
from tests.conftest import SMALL, slow
from tests.pages import node
from tests.pages.test_explorer import COMMON, data_of
from tests.random_models import random_model

TOKENS = np.frombuffer(b"def main(x): return x", np.uint8).astype(np.int32)
SCRIPTS = [COMMON / "numbers.js", COMMON / "arrays.js", explorer.PAGE.parent / "attention.js"]
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

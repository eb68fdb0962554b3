"""Attention between whole words is summed over the tokens of a key, and averaged over those of a query."""

import numpy as np
import pytest

from mini_gpt.data import spans
from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight import attention, maps, words
from mini_gpt.insight.observing import AttentionMaps
from mini_gpt.pages.explorer import page
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import SUITES
from mini_gpt.suites.base import SuiteOptions
from tests.pages.test_explorer import data_of, unpacked
from tests.random_models import random_model


@pytest.mark.parametrize(
    "texts, word_L, expected",
    [
        (["A", " su", "itcase", " was", "n", "'", "t", "."], [0, 1, 1, 2, 2, 2, 2, 3], "A suitcase wasn't."),
        (["A", " cross", "-", "exam", "ined", " x", "\n", "y", "?!", " "], [0, 1, 1, 1, 1, 2, 3, 3, 4, 5], None),
        (["a.", " b"], [0, 1], "a. b"),
        ([" ", "dog"], [0, 0], " dog"),
    ],
)
def test_tokens_belong_to_the_word_that_a_reader_sees(texts, word_L, expected):
    found_L, found = words.of_tokens(texts)
    assert found_L.tolist() == word_L and len(found) == word_L[-1] + 1
    assert expected is None or "".join(found) == expected


def test_weights_of_words_are_sums_over_keys_and_means_over_queries():
    weights_LS = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.2, 0.7, 0], [0.3, 0.3, 0.1, 0.3]])
    layer = AttentionMaps(weights_LS[None, None] * 0, weights_LS[None, None], np.tri(4, dtype=bool)[None])
    (found,) = words.grouped([layer], np.array([0, 1, 1, 2]))
    np.testing.assert_allclose(found.weights_BHLS[0, 0], [[1, 0, 0], [0.3, 0.7, 0], [0.3, 0.4, 0.3]])
    np.testing.assert_array_equal(found.visible_BLS[0], np.tri(3, dtype=bool))
    logits = np.where(found.visible_BLS[0], found.logits_BHLS[0, 0], -np.inf)
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), found.weights_BHLS[0, 0])


TEXT = "The cät didn't eat it."


@pytest.fixture
def model(small):
    return random_model(small(model__num_layers=2), ByteTokenizer().token_bytes, noise=0.3)


def test_pages_and_maps_show_words(model):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(TEXT).astype(np.int32)
    word_L, expected = words.of_tokens(spans.decode_in_turn(tokens, tokenizer))
    assert expected == ["The", " cät", " didn't", " eat", " it", "."]
    data = data_of(page.explorer(model, tokenizer, words.Words(tokens), title="", subtitle=""))["attention"]
    assert data["tokens"] == expected
    grouped = words.grouped(attention.attention_maps(model, tokens[None]), word_L)
    weights_NWW = np.concatenate([layer.weights_BHLS[0] for layer in grouped])
    np.testing.assert_allclose(unpacked(data, len(weights_NWW), len(expected))[1], weights_NWW, atol=0.01)
    figure = maps.figure([maps.Panel("mine", model, tokenizer, words.Words(tokens))])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [word.strip() for word in expected]
    np.testing.assert_allclose(figure.axes[0].get_images()[0].get_array(), grouped[0].weights_BHLS[0].mean(0))


def test_words_of_pairs_and_of_long_texts_are_refused(model, small):
    with pytest.raises(UserError, match="--words: found True; must not be given for a model with an encoder"):
        fields = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None}
        SUITES["figures"].check(small(**fields, model__encoder_layers=1), SuiteOptions(words=True))
    with pytest.raises(UserError, match="--words: found 9000; must be at most 768 tokens"):
        page.explorer(model, ByteTokenizer(), words.Words(np.zeros(9000, np.int32)), title="", subtitle="")

"""The most likely tokens of masks, against a softmax in float64 and by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from mini_gpt.data.subwords import BpeTokenizer, ImportedTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.generation import filling
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.random_models import random_model

MASKED = {"model__causal": False, "train__objective": "masked"}


@pytest.fixture
def make_model(small):
    return lambda **fields: random_model(small(**MASKED | fields), ByteTokenizer().token_bytes)


def test_each_mask_in_a_text_is_one_token():
    tokens = filling.encode(ByteTokenizer(), "[MASK]é[MASK][MASK]b")
    assert tokens.tolist() == [257, 0xC3, 0xA9, 257, 257, ord("b")] and tokens.dtype == np.int32
    assert filling.encode(CharacterTokenizer("aé"), "é[MASK]a").tolist() == [1, 3, 0]
    bpe = BpeTokenizer.train(["ab ab ab abc"] * 9, 260)
    assert filling.encode(bpe, "ab[MASK]").tolist() == [*bpe.encode("ab"), 260]
    with pytest.raises(UserError, match=r"text: found 'MASK'; must contain \[MASK\] at least once"):
        filling.encode(ByteTokenizer(), "MASK")


def test_tokens_around_a_text_are_added_once():
    model = wordpiece()
    mask, end = model.token_to_id("[MASK]"), model.token_to_id("[SEP]")
    tokenizer = ImportedTokenizer(model, end, model.get_vocab_size(), {}, mask)
    tokens = filling.encode(tokenizer, "the [MASK][MASK] cat [SEP]")
    names = [model.id_to_token(int(token)) for token in tokens]
    assert names[:5] == ["[CLS]", "the", "[MASK]", "[MASK]", "cat"] and names.count("[SEP]") == 1
    assert names[-1] == "[SEP]" and tokens.dtype == np.int32
    assert (tokens == mask).sum() == 2


@pytest.mark.parametrize(
    "fields",
    [{}, *slow({"model__tie_embeddings": False, "mesh__data": 4, "mesh__fsdp": 2}, {"model__random_positions": 64})],
)
def test_probabilities_are_the_softmax_over_tokens(make_model, fields):
    model = make_model(**fields)
    tokens_L = filling.encode(ByteTokenizer(), "the c[MASK]t s[MASK][MASK] on")
    found = filling.fill(model, tokens_L, top=257)
    rows_BL = np.repeat(tokens_L[None], 8, axis=0)
    logits_LV = np.asarray(model.logits(rows_BL), np.float64)[0]
    assert found.indices_N.tolist() == [5, 9, 10]
    for place, best_K, probabilities_K in zip(*found[1:], strict=True):
        exponentials_V = np.exp(logits_LV[place])[:257]  # without the row of the mask token, 257
        np.testing.assert_allclose(probabilities_K, exponentials_V[best_K] / exponentials_V.sum(), rtol=1e-5)
        assert sorted(best_K) == list(range(257)) and (np.diff(probabilities_K) <= 0).all()
        assert found.tokens_L[place] == best_K[0]
    others = np.setdiff1d(np.arange(len(tokens_L)), found.indices_N)
    assert (found.tokens_L[others] == tokens_L[others]).all() and found.probabilities_NK.dtype == np.float32


def test_the_mask_token_is_never_predicted(make_model):
    model, tokens_L = make_model(model__tie_embeddings=False), filling.encode(ByteTokenizer(), "a[MASK]")
    rows_BL = np.repeat(tokens_L[None], 8, axis=0)
    before = filling.fill(model, tokens_L, top=257)
    x_D, table_VD = np.asarray(model.hidden(rows_BL))[0, 1], np.array(model.parameters["unembedding"])
    table_VD[257] = 100 * x_D / np.square(x_D).sum()  # the mask token has the largest logit
    changed = dataclasses.replace(model, parameters=model.parameters | {"unembedding": table_VD})
    assert changed.logits(rows_BL).argmax(-1)[0, 1] == 257
    after = filling.fill(changed, tokens_L, top=257)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_of_equally_likely_tokens_the_lower_id_is_first(make_model):
    model = make_model(model__tie_embeddings=False)
    table = np.zeros_like(model.parameters["unembedding"])
    model = dataclasses.replace(model, parameters=model.parameters | {"unembedding": table})
    found = filling.fill(model, np.array([7, 257]), top=4)
    assert found.best_NK.tolist() == [[0, 1, 2, 3]] and found.tokens_L.tolist() == [7, 0]
    np.testing.assert_allclose(found.probabilities_NK, np.full((1, 4), 1 / 257), rtol=1e-6)


def test_what_cannot_be_filled_is_refused(make_model, small):
    masked, tokens_L = make_model(model__position="learned"), np.array([1, 257])
    causal = random_model(small(), ByteTokenizer().token_bytes)
    broken = dataclasses.replace(masked, parameters=jax.tree.map(lambda x: x * np.nan, masked.parameters))
    for model, tokens, top, message in [
        (causal, tokens_L, 5, "train.objective: found 'next_token'; must be masked, to fill in masks"),
        (masked, tokens_L, 0, r"top: found 0; must be in 1\.\.257"),
        (masked, tokens_L, 2.5, r"top: found 2\.5; must be a whole number"),
        (masked, tokens_L, 258, r"top: found 258; must be in 1\.\.257"),
        (masked, np.full(33, 257), 5, "model.max_positions: the learned table has 32 positions; found a length of 33"),
        (broken, tokens_L, 5, "logits: found non-finite numbers; use another checkpoint"),
    ]:
        with pytest.raises(UserError, match=message):
            filling.fill(model, tokens, top)


def test_positions_that_depend_on_masked_tokens_are_refused(make_model):
    task = {"data__corpus": "task:reverse", "data__tokenizer": "characters", "data__task_length": 4}
    fields = {"model__position": "learned", "model__max_positions": 64, "data__isolate_documents": True}
    model = make_model(**task, **fields, data__position_ids="abacus")
    with pytest.raises(UserError, match=r"data\.position_ids: found 'abacus'; must be sequence"):
        filling.fill(model, np.array([1, 257]))

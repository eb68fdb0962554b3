"""Rows of a model whose tokenizer adds a first token begin with it, and it is never a target."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from mini_gpt.data import corpora, splits, token_store
from mini_gpt.data.subwords import BpeTokenizer, ImportedTokenizer
from mini_gpt.data.text_batches import TextBatches, corrupted_blocks, vocab_of
from mini_gpt.evaluation import extrapolation, perplexity
from mini_gpt.insight import samples
from mini_gpt.insight.heads import inputs
from mini_gpt.suites import base, needles
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training.inputs import layout_of
from tests.hugging_face.bpe_tokenizers import foreign
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.random_models import random_model

FIRST, END = 1, 2
LIBRARY = foreign()
TOKENIZER = BpeTokenizer(LIBRARY, END, LIBRARY.get_vocab_size())
SCORE = needles.task_accuracy.TaskScore(1, 1, 1, 1, 0.0, [], {})


def streams(config, tokenizer=TOKENIZER):
    """Return {split: tokens} of the small corpus, and the documents of the training split as ids without the first."""
    corpus = corpora.open_corpus(config.data)
    store = token_store.open_store(corpus, config.data, tokenizer)
    pieces = splits.split_pieces(corpus, config.data)
    return store.tokens("train"), [tokenizer.encode(piece.text)[1:] for split, piece in pieces if split == "train"]


def loaded(config, tokenizer=TOKENIZER):
    model = random_model(config, tokenizer.token_bytes)
    return dataclasses.replace(model, layout=layout_of(config, tokenizer))


_logits = jax.jit(lambda model, tokens_BL: model.merge()(tokens_BL))


def reference(model, row, targets):
    """Return the losses of targets after a row of tokens, from the logits of the module."""
    padded = np.pad(row, (0, -len(row) % 32))  # one program for all lengths; the causal mask hides the padding
    logits_LV = np.asarray(_logits(model, padded[None].astype(np.int32))[0], np.float64)
    return [float(-jax.nn.log_softmax(logits_L)[target]) for logits_L, target in zip(logits_LV, targets, strict=False)]


def test_a_stream_begins_with_the_first_token_and_documents_do_not(small):
    tokens, documents = streams(small(context_length=16))
    joined = [FIRST, *(token for document in documents for token in (*document, END))][:-1]
    assert len(documents) > 50 and tokens.tolist() == joined


def test_each_row_of_training_and_of_insight_begins_with_the_first_token(small):
    config = small(context_length=16)
    tokens, _ = streams(config)
    batches = TextBatches(tokens, config, vocab=vocab_of(TOKENIZER))
    rows = [batches[step] for step in range(5)]
    of_text = [batch for _, batch in samples.of_text(loaded(config), tokens, 512)]
    for batch in (*rows, *of_text):
        assert (batch["inputs"][:, 0] == FIRST).all() and not (batch["targets"] == FIRST).any()
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    tokens_BL = inputs.of_text(tokens, TOKENIZER, 16).tokens_BL
    assert (tokens_BL[:, 0] == FIRST).all() and (tokens_BL[:, 1:] != FIRST).all()


def test_masked_rows_begin_with_cls_which_is_no_target(small):
    library = wordpiece()
    tokenizer = ImportedTokenizer(library, 3, library.get_vocab_size(), mask_id=4)
    config = small(context_length=16, train__objective="masked", model__causal=False, train__mask_rate=0.9)
    tokens, _ = streams(config, tokenizer)
    _, block = next(corrupted_blocks(tokens, config, vocab=vocab_of(tokenizer), batch_size=64, seed=0))
    assert (block["inputs"][:, 0] == 2).all() and (block["weights"][:, 0] == 0).all()
    assert block["weights"][:, 1:].mean() > 0.8 and not (block["targets"][:, 1:] == 2).any()


def test_every_block_and_window_is_scored_after_the_first_token(small):
    config = small(context_length=16)
    tokens = streams(config)[0][:150]
    model = loaded(config)
    expected = []
    for start in range(0, len(tokens) - 1, 16):
        targets = tokens[start + 1 : start + 17].tolist()
        expected += reference(model, [FIRST, *targets[:-1]], targets)
    score = perplexity.score_split(model, tokens, TOKENIZER.token_bytes)
    np.testing.assert_allclose(score.losses_T, expected, atol=2e-5)
    (row,), _ = extrapolation.extrapolation(
        model, tokens, TOKENIZER.token_bytes, extrapolation.plan(len(tokens), "train", (16,), (4,), 20)[1:]
    )
    first = row["first_target"]
    sliding = []
    for target in range(first, len(tokens)):
        start = first - 1 - 12 + (target - first) // 4 * 4  # windows of 16, of which each scores the last 4
        known = tokens[start + 1 : target].tolist()
        sliding.append(reference(model, [FIRST, *known], [*known, int(tokens[target])])[-1])
    assert row["nll"] == pytest.approx(np.mean(sliding), abs=2e-5)


@pytest.mark.slow
def test_an_isolated_document_is_scored_as_if_alone(small):
    config = small(context_length=32, data__isolate_documents=True)
    model, rng = loaded(config), np.random.default_rng(0)
    document = rng.integers(3, 90, 9).tolist()
    row = [FIRST, *rng.integers(3, 90, 12).tolist(), END, *document]
    nll_BL = perplexity.make_nll_fn(model)(np.array([row[:-1]]), np.array([row[1:]]))
    np.testing.assert_allclose(nll_BL[0, -9:], reference(model, [FIRST, *document[:-1]], document), atol=2e-5)


@pytest.mark.parametrize("kind", needles.KINDS)
def test_needles_have_one_first_token_and_read_as_one_text(small, kind):
    text = streams(small(context_length=16))[0]
    for index in range(5):
        prompt, answer = needles.prompt(kind, index, 1500, text[1:], TOKENIZER)
        whole = TOKENIZER.decode([*prompt, *answer])
        assert prompt[0] == FIRST and (np.concatenate([prompt[1:], answer]) != FIRST).all()
        question = "?" if kind not in ("variables",) else " ="
        assert question in whole and "  " not in whole.split("What is")[1], whole[-200:]
        assert TOKENIZER.decode(answer).startswith(" ") and not TOKENIZER.decode(answer).startswith("  ")


@pytest.mark.slow
def test_needles_in_isolated_documents_are_in_one_document(small, monkeypatch):
    config = small(context_length=16, data__isolate_documents=True)
    seen = []
    monkeypatch.setattr(needles, "_batch", lambda prompts, *_: seen.extend(prompts))
    monkeypatch.setattr(needles.task_accuracy, "score", lambda model, batch_of, *_: batch_of([0]) or SCORE)
    needles.measure(loaded(config), TOKENIZER, streams(config)[0], (1200,))
    assert len(seen) > 100 and not any((prompt == END).any() for prompt, _ in seen)


def test_the_text_that_pages_open_with_begins_with_the_first_token(small):
    config = small(context_length=16)
    tokens, documents = streams(config)
    run = types.SimpleNamespace(config=config, tokenizer=TOKENIZER, step=1, workdir=None)
    run.store = types.SimpleNamespace(tokens=lambda split: tokens)
    opening = base.opening(run, SuiteOptions(), 12).tolist()
    assert opening[0] == FIRST and opening[1:] in [document[:11].tolist() for document in documents]

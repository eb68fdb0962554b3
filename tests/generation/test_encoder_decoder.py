"""Generation by models that see both sides: encoder-decoders, and filling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data.layout import Layout
from mini_gpt.data.subwords import BpeTokenizer, ImportedTokenizer
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.generation import beam, cache, filling
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.runtime.errors import UserError
from tests.conftest import slow
from tests.generation.test_decoding import GREEDY, VOCAB
from tests.generation.test_decoding import make as make_decoder
from tests.hugging_face.foreign_tokenizers import wordpiece
from tests.random_models import random_model

# Decoding with an encoder: cached logits, sources of different lengths, and beam search against brute force.

SOURCES = ([3, 1, 2], list(range(11)), [5])
BASE = {"model.encoder_layers": 2, "data.corpus": "task:copy", "data.tokenizer": "characters", "context_length": 40}
QUICK = [{"model.position": ("rope", "t5"), "model.cross_positions": True}]
SLOW = [
    {"model.position": "rope", "model.num_kv_heads": 2, "model.num_heads": 4},
    {"model.position": "t5"},
    {"model.position": "alibi", "model.attention_window": 4},
    {"model.position": "learned", "model.scan_layers": True, "model.norm_placement": "post"},
    {"model.variants.query_scale": "ssmax", "model.variants.sink": "trained", "model.variants.qk_norm": "plain"},
    {"model.position": "kerple", "model.share_embeddings": False},
]


def make(**options):
    return make_decoder(**BASE | options)


def padded(sources, size=16):
    return np.stack([np.pad(source, (0, size - len(source)), constant_values=-1) for source in sources])


@pytest.mark.parametrize("fields", [*QUICK, *slow(*SLOW)], ids=str)
def test_cached_logits_equal_the_full_forward(fields):
    # With more noise, rounding the parameters changes the logits of some models by more than the tolerance.
    model, rng = make(noise=0.5, **fields), np.random.default_rng(0)
    tokens_BL, source_BS = rng.integers(VOCAB, size=(4, 12)), np.vstack([padded(SOURCES), np.full(16, -1)])
    full_BLV = jax.jit(model.merge())(tokens_BL, source_BS=source_BS)
    start = jax.jit(lambda model: cache.prefill(model, jnp.array(tokens_BL[:, :4]), jnp.full(4, 4), 12, source_BS))
    step = jax.jit(cache.decode)
    logits_BV, kv = start(model)
    for place in range(4, 12):
        np.testing.assert_allclose(logits_BV, full_BLV[:, place - 1], atol=1e-4, rtol=1e-4)
        logits_BV, kv = step(model, tokens_BL[:, place], kv)
    np.testing.assert_allclose(logits_BV, full_BLV[:, -1], atol=1e-4, rtol=1e-4)


def test_a_token_reads_the_source_of_its_own_segment_only():
    model = dataclasses.replace(make(), layout=Layout(0))
    tokens_BL, source_BS = np.array([[0, 3, 4, 0, 5, 6, 7]]), np.array([[0, 8, 9, 1, 0, 2, 3, -1]])
    start = jax.jit(lambda model, source_BS: cache.prefill(model, tokens_BL[:, :5], jnp.array([5]), 7, source_BS))

    def cached(source_BS):
        logits_BV, kv = start(model, source_BS)
        found = [logits_BV]
        for token_B in tokens_BL.T[5:]:
            logits_BV, kv = jax.jit(cache.decode)(model, token_B, kv)
            found.append(logits_BV)
        return np.stack(found, axis=1)

    found = cached(source_BS)
    np.testing.assert_allclose(found, model.logits(tokens_BL, None, None, source_BS)[:, 4:], atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(cached(np.where(source_BS == 9, 4, source_BS)), found)
    assert np.abs(cached(np.where(source_BS == 2, 4, source_BS)) - found).max(axis=-1).min() > 1e-3


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_other_sources():
    model = make()
    options = {"length": 9, "sampling": GREEDY}
    together = generation.generate(model, [[1]] * 3, sources=SOURCES, **options)
    assert len({tuple(row) for row in together.tolist()}) > 1, "the sources matter"
    for source, row in zip(SOURCES, together, strict=True):
        np.testing.assert_array_equal(generation.generate(model, [[1]], sources=[source], **options)[0], row)


@pytest.mark.slow
def test_rows_of_a_cache_can_be_exchanged():
    model, tokens_BL = make(), jnp.array([[1, 2], [3, 4], [5, 6]])
    _, kv = jax.jit(lambda model: cache.prefill(model, tokens_BL, jnp.full(3, 2), 8, padded(SOURCES)))(model)
    step = jax.jit(cache.decode)
    before_BV, _ = step(model, jnp.array([8, 9, 7]), kv)
    after_BV, _ = step(model, jnp.array([7, 8, 8]), kv.take(jnp.array([2, 0, 0])))
    np.testing.assert_allclose(after_BV, before_BV[jnp.array([2, 0, 0])], rtol=1e-5, atol=1e-5)
    swapped = kv.take(jnp.array([1, 1, 1]), same_sources=True)
    assert swapped.source is kv.source
    np.testing.assert_array_equal(swapped.layers[0].keys_XSK, kv.take(jnp.array([1, 1, 1])).layers[0].keys_XSK)


END, LONGEST = 0, 3


def every_text(ends):
    """Yield all texts that end with their last token, one of `ends`, and those of LONGEST tokens that do not."""

    def extended(text):
        if text and (text[-1] in ends or len(text) == LONGEST):
            yield text
            return
        for token in range(VOCAB):
            yield from extended((*text, token))

    return extended(())


@pytest.mark.parametrize("alpha, others", [(0.6, (3, 7)), *slow((0.0, ()), (2.0, ()))])
def test_a_wide_beam_finds_what_brute_force_finds(alpha, others):
    model, prompt, source = make(), [1, 2], [4, 5, 6]
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(model.merge()(tokens, source_BS=jnp.array([source]))))
    by_prefix = {}
    scores = {}
    for text in every_text((END, *others)):
        total = 0.0
        for place, token in enumerate(text):
            prefix = text[:place]
            if prefix not in by_prefix:
                tokens = np.zeros((1, 5), int)
                tokens[0, : 2 + place] = [*prompt, *prefix]
                by_prefix[prefix] = np.asarray(forward(tokens)[0, 1 + place], np.float64)
            total += by_prefix[prefix][token]
        scores[text] = total / ((5 + len(text)) / 6) ** alpha
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    beams = (VOCAB - 1) ** (LONGEST - 1)
    options = beam.Options(END, LONGEST, beams, alpha, others)
    (found,) = beam.search(model, [prompt], options, [source])
    assert [tuple(one.tokens.tolist()) for one in found[:20]] == best[:20]
    np.testing.assert_allclose([one.score for one in found[:20]], [scores[text] for text in best[:20]], rtol=1e-4)


@pytest.mark.slow
def test_one_beam_without_a_penalty_is_greedy():
    model = make()
    greedy = generation.generate(model, [[1]] * 3, length=8, sampling=GREEDY, sources=SOURCES)
    found = beam.search(model, [[1]] * 3, beam.Options(VOCAB - 1, 8, beams=1, alpha=0.0), SOURCES)
    for (one,), row in zip(found, greedy.tolist(), strict=True):
        end = row.index(VOCAB - 1) + 1 if VOCAB - 1 in row else len(row)
        if len(one.tokens) < end:  # a shorter text that ends may be more likely than the greedy one
            assert one.tokens[-1] == VOCAB - 1
        else:
            assert one.tokens.tolist() == row[:end]


@pytest.mark.parametrize(
    ("options", "sources", "message"),
    [
        ({"beams": 0}, [[1]], "beams: found 0; must be at least 1"),
        ({"alpha": -1.0}, [[1]], "length penalty: found -1.0; must be in 0..10"),
        ({"length": 0}, [[1]], "length: found 0; must be at least 1"),
        ({"beams": 2.5}, [[1]], r"beams: found 2\.5; must be a whole number"),
        ({"beams": True}, [[1]], "beams: found True; must be a whole number"),
        ({"alpha": "x"}, [[1]], "length penalty: found 'x'; must be a number"),
        ({"length": 4.0}, [[1]], r"length: found 4\.0; must be a whole number"),
        ({"end": VOCAB}, [[1]], rf"end\[0\]: found the token id {VOCAB}; must be in"),
        ({"other_ends": (-1,)}, [[1]], r"end\[1\]: found the token id -1; must be in"),
        ({}, None, "source: give one for each prompt"),
        ({}, [[1], [2]], "source: give one for each prompt"),
    ],
)
def test_wrong_options_are_refused(options, sources, message):
    with pytest.raises(UserError, match=message):
        beam.search(make(), [[1]], beam.Options(**{"end": 0, "length": 4} | options), sources)


@pytest.mark.slow
def test_prompts_of_similar_lengths_share_a_program():
    model, before = make(), beam._search._cache_size()
    for prompt, length, alpha in (([1], 4, 0.6), ([1, 2, 3], 7, 0.0)):
        beam.search(model, [prompt], beam.Options(0, length, beams=2, alpha=alpha), [[1, 2]])
    assert beam._search._cache_size() == before + 1


def test_a_decoder_takes_no_source():
    with pytest.raises(UserError, match=r"source: found .*; must not be given"):
        generation.generate(make_decoder(), [[1]], length=2, sampling=Sampling(), sources=[[1]])


# The most likely tokens of masks, against a softmax in float64 and by hand.

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

"""Attention maps: by kind of model, of variants, with a cache, of the first text, and between words."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.data import spans
from mini_gpt.data.tokenizers import ByteTokenizer, CharacterTokenizer
from mini_gpt.generation import cache
from mini_gpt.hugging_face import origin
from mini_gpt.insight import attention, cache_masks, examples, maps, samples, words
from mini_gpt.insight.diagnosis import blocks, probe
from mini_gpt.insight.heads import typical
from mini_gpt.insight.observing import AttentionMaps
from mini_gpt.model import editing
from mini_gpt.model.attention import reference
from mini_gpt.model.parameters import with_layers
from mini_gpt.pages.explorer import page
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import SUITES, base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.explorer import Explorer
from mini_gpt.suites.heads import Heads
from tests import oracle
from tests.conftest import slow
from tests.pages.test_explorer import data_of, unpacked
from tests.random_models import random_model

# Maps, curves and head masks of the three kinds of attention, against recomputations without padding.

PAIRS = {
    "model__encoder_layers": 2,
    "model__num_layers": 2,
    "model__num_heads": 4,
    "model__position": "sinusoidal",
    "data__corpus": "task:reverse",
    "data__path": None,
    "data__tokenizer": "characters",
    "data__task_length": 3,
    "context_length": 8,
    "source_length": 9,
}
BYTES = np.array([1] * 20 + [0])  # bytes of each token; the last one is the separator
LENGTHS = (9, 5, 1)  # of the sources


def make(small, **fields):
    return random_model(small(**PAIRS | fields), BYTES, noise=0.3)


def batch(seed=0):
    """Return tokens_BL and source_BS of three pairs."""
    rng = np.random.default_rng(seed)
    source_BS = rng.integers(20, size=(3, 9)).astype(np.int32)
    source_BS[np.arange(9) >= np.array(LENGTHS)[:, None]] = -1
    return rng.integers(20, size=(3, 7)).astype(np.int32), source_BS


def exact_weights(model, tokens, source):
    """Return {kind: weights_NHLS} of a pair without padding, from the softmaxes of an independent float64 forward."""
    exact = jax.tree.map(np.float64, with_layers(model.parameters, stacked=False))
    found, softmax = [], oracle.softmax
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "softmax", lambda x: found.append(softmax(x)) or found[-1])
        oracle.forward(model.config.model, exact, tokens, source=source)
    heads, config = model.config.model.num_heads, model.config.model
    layers = [np.stack(found[first : first + heads]) for first in range(0, len(found), heads)]
    blocks = layers[config.encoder_layers :]
    stacks = (layers[: config.encoder_layers], blocks[::2], blocks[1::2])
    return {kind: np.stack(stack) for kind, stack in zip(attention.KINDS, stacks, strict=True)}


FIELDS = [
    {"model__encoder_layers": 1, "model__position": "t5", "model__num_kv_heads": 2},
    *slow({"model__scan_layers": True}, {"model__position": "rope", "model__share_embeddings": False}),
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_maps_equal_an_independent_forward_without_padding(small, fields):
    model = make(small, **fields)
    tokens_BL, source_BS = batch()
    found = attention.maps_by_kind(model, tokens_BL, source_BS)
    for row, length in enumerate(LENGTHS):
        expected = exact_weights(model, tokens_BL[row], source_BS[row, :length])
        assert {kind: len(layers) for kind, layers in found.items()} == {k: len(w) for k, w in expected.items()}
        for kind, weights_NHLS in expected.items():
            rows, columns = weights_NHLS.shape[2:]
            for one, weights_HLS in zip(found[kind], weights_NHLS, strict=True):
                maps_HLS = one.weights_BHLS[row, :, :rows]
                np.testing.assert_allclose(maps_HLS[..., :columns], weights_HLS, atol=1e-5)
                assert not maps_HLS[..., columns:].any(), "no weight on padding"
                assert one.weights_BHLS.shape[0] == len(tokens_BL)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, *slow(1)])  # two devices need an even number of rows
def test_curves_of_all_kinds_use_tokens_without_padding(small, devices):
    model = make(small, mesh__data=devices)
    tokens_BL, source_BS = batch()
    lengths = (7, 4, 2)  # of the targets
    is_query_BL = np.arange(7) < np.array(lengths)[:, None]
    curves, maps = attention.statistics_by_kind(model, tokens_BL, is_query_BL, source_BS)
    of_rows = [exact_weights(model, tokens_BL[row], source_BS[row, : LENGTHS[row]]) for row in range(3)]
    sizes = {"encoder": LENGTHS, "decoder": lengths, "cross": lengths}
    prefixes = {"encoder": "attention/encoder", "decoder": "attention", "cross": "attention/cross"}
    for kind, prefix in prefixes.items():
        for layer, head in np.ndindex(2, 4):
            entropies = [
                -sum(w * np.log(w) for w in weights_L if w > 0)
                for row, size in enumerate(sizes[kind])
                for weights_L in of_rows[row][kind][layer, head, :size]
            ]
            name = f"{prefix}/entropy/layer_{layer}/head_{head}"
            assert curves.pop(name) == pytest.approx(np.mean(entropies), rel=1e-4)
        shown = of_rows[0][kind][:, :, : sizes[kind][0]]
        shown = shown[..., : maps[kind].shape[-1]]
        np.testing.assert_allclose(maps[kind], np.where(shown == 0, np.nan, shown), atol=1e-5)  # NaN: masked
        assert maps[kind].shape[2:] == {"encoder": (9, 9), "decoder": (7, 7), "cross": (7, 9)}[kind]
    left = itertools.product(prefixes.values(), ("entropy", "logit_variance"), range(2))
    assert sorted(curves) == sorted(f"{prefix}/{name}/layer_{layer}" for prefix, name, layer in left)
    assert all(map(np.isfinite, curves.values()))


def without(parameters, place, heads):
    """Return a copy of the parameters in which the output weights of a head are 0. place: (kind, layer, head)."""
    (kind, layer, head), copied = place, jax.tree.map(np.array, parameters)
    blocks = (copied["encoder"] if kind == "encoder" else copied)["blocks"]
    kernel = blocks[layer]["cross_attention" if kind == "cross" else "attention"]["out"]["kernel"]
    width = len(kernel) // heads
    kernel[head * width : (head + 1) * width] = 0
    return copied


MASKED = [{"model__encoder_layers": 1}, *slow({"model__scan_layers": True}, {"model__num_kv_heads": 2})]


@pytest.mark.parametrize("fields", MASKED, ids=str)
def test_masking_a_head_of_any_kind_equals_zeroing_its_output(small, fields):
    model = make(small, **fields)
    tokens_BL, source_BS = batch()
    layers = editing.attention_layers(model.config.model)
    logits = lambda mask_NBH: np.asarray(
        dataclasses.replace(model, edits=editing.head_mask(mask_NBH)).logits(tokens_BL, None, None, source_BS)
    )
    ones_NBH = np.ones((len(layers), 3, 4), np.float32)
    whole_BLV = np.asarray(model.logits(tokens_BL, None, None, source_BS))
    np.testing.assert_allclose(logits(ones_NBH), whole_BLV, rtol=1e-5, atol=1e-5)
    assert [kind for kind, _ in layers].count("cross") == 2 and len(layers) == model.config.model.encoder_layers + 4
    separate = with_layers(model.parameters, stacked=False)
    for place, (kind, layer) in enumerate(layers):
        head = (place + 1) % 4
        mask_NBH = ones_NBH.copy()
        mask_NBH[place, 1, head] = 0  # in the second row
        pruned = with_layers(without(separate, (kind, layer, head), 4), stacked=model.config.model.scan_layers)
        pruned_BLV = dataclasses.replace(model, parameters=pruned).logits(tokens_BL, None, None, source_BS)
        masked_BLV = logits(mask_NBH)
        np.testing.assert_allclose(masked_BLV[1], pruned_BLV[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(masked_BLV[::2], whole_BLV[::2], rtol=1e-5, atol=1e-5)
        assert np.abs(masked_BLV[1] - whole_BLV[1]).max() > 1e-3, (kind, layer)


@pytest.mark.slow
def test_a_head_mask_acts_on_decoding_with_a_cache(small):
    model = make(small)
    tokens_BL, source_BS = batch()
    mask_NBH = np.ones((6, 1, 4), np.float32)
    mask_NBH[[0, 3, 5], 0, [1, 2, 3]] = 0  # one head of each kind
    masked = dataclasses.replace(model, edits=editing.head_mask(jnp.asarray(mask_NBH)))
    full_BLV = masked.logits(tokens_BL, None, None, source_BS)
    logits_BV, kv = cache.prefill(masked, jnp.array(tokens_BL[:, :3]), jnp.full(3, 3), 7, jnp.array(source_BS))
    for place in range(3, 7):
        np.testing.assert_allclose(logits_BV, full_BLV[:, place - 1], atol=1e-4, rtol=1e-4)
        logits_BV, kv = cache.decode(masked, tokens_BL[:, place], kv)
    assert np.abs(full_BLV - model.logits(tokens_BL, None, None, source_BS)).max() > 1e-2


# The drawn mask of a KV cache is the one that attention uses, and shows each new token the keys that it should see.


@pytest.mark.slow
def test_the_drawn_masks_are_those_of_attention(monkeypatch):
    used = []
    plain = reference.observe
    keep = lambda module, name, value: used.append(np.asarray(value)) if name == "visible" else None
    monkeypatch.setattr(reference, "observe", lambda *given: (keep(*given), plain(*given)))
    with jax.disable_jit():
        layers = cache_masks.masks.__wrapped__()
    prompts, steps = used[:2], used[2:]
    assert len(steps) == 2 * cache_masks.STEPS
    for number, layer in enumerate(layers):
        np.testing.assert_array_equal(layer.prompt_BLL, np.broadcast_to(prompts[number], layer.prompt_BLL.shape))
        np.testing.assert_array_equal(layer.visible_BTS, np.concatenate(steps[number::2], axis=1))


def test_a_new_token_sees_itself_and_the_keys_before_it_within_the_window():
    full, window = cache_masks.masks()
    assert (full.window, window.window) == (None, 4) and window.visible_BTS.shape[-1] == 4
    for layer in (full, window):
        reach = layer.window or 99
        distance_LL = np.subtract.outer(np.arange(5), np.arange(5))
        np.testing.assert_array_equal(layer.prompt_BLL, [(distance_LL >= 0) & (distance_LL < reach)] * 2)
        for row, length in enumerate(cache_masks.LENGTHS):
            for step, (visible_S, indices_S) in enumerate(
                zip(layer.visible_BTS[row], layer.indices_BTS[row], strict=True)
            ):
                new = length + step
                assert sorted(indices_S[visible_S]) == list(range(max(0, new - reach + 1), new + 1))
    figure = cache_masks.figure()
    shown = [axes.get_title() for axes in figure.axes]
    new = "new tokens, window 4\n1 × 4 each, a ring"
    assert shown[:4] == ["prompt, all keys\n5 × 5", "new tokens, all keys\n1 × 9 each", "prompt, window 4\n5 × 5", new]
    texts = [text.get_text() for text in figure.axes[3].texts]
    assert texts[:8] == ["2", "3", "0", "1", "2", "3", "4", "1"]


# Statistics, diagnosis and the explorer of models whose heads hide keys or have a sink.

TOKEN_BYTES = np.array([1] * 256 + [0])
VARIANTS = [
    {"model__position": "hard_alibi"},
    {"model__variants__sink": "trained"},
    {"model__position": ("fire", "rope")},
]


@pytest.mark.parametrize("fields", [VARIANTS[2], *slow(*VARIANTS[:2])], ids=str)
def test_statistics_and_diagnosis_are_finite(small, fields):
    model = random_model(small(model__num_layers=2, **fields), TOKEN_BYTES)
    tokens_BL = np.random.default_rng(0).integers(256, size=(2, 32))
    curves, weights_NHLS = attention.attention_statistics(model, tokens_BL, np.ones((2, 32), bool))
    sum_NHL = np.nansum(weights_NHLS, axis=-1)  # NaN: masked
    assert all(map(np.isfinite, curves.values())) and ((sum_NHL > 0) & (sum_NHL < 1.0001)).all()
    layers = probe.layers(model, tokens_BL)
    assert not any(result.found for result in blocks.stream(model, layers))
    for layer in layers:
        assert (layer.entropy_B >= 0).all() and (layer.entropy_B <= 1.0001).all()


def test_the_entropy_of_a_head_does_not_depend_on_the_weight_of_its_sink():
    weights = np.full((1, 1, 1, 4), 0.25)
    for share in (1.0, 0.01):
        np.testing.assert_allclose(attention.relative_entropy(share * weights, np.array([[[4]]])), 1, rtol=1e-5)


@pytest.mark.parametrize("name, value", [("sink", "zero"), ("normaliser", "stick_breaking")])
def test_the_explorer_refuses_weights_that_are_no_softmax_of_the_logits(small, name, value):
    with pytest.raises(UserError, match=rf"found model\.variants\.{name}={value}; the page shows the softmax"):
        Explorer(Heads()).check(small(**{f"model__variants__{name}": value}), SuiteOptions())


# The text and the head that pages show first.

TOKENIZER = ByteTokenizer()


def test_a_split_opens_at_the_start_of_a_document_that_is_like_the_others():
    texts = [
        "the end of a text that is cut",
        "+----+----+----+----+----+",
        *(f"the cat {n} sat on the mat" for n in "1234"),
    ]
    tokens = TOKENIZER.encode("\0".join(texts)).astype(np.int32)
    tokens[tokens == 0] = 256  # the separator
    start = samples.typical_start(tokens, 256, 20)
    assert TOKENIZER.decode(tokens[start : start + 7]) == "the cat"
    assert samples.typical_start(tokens[:10], 256, 20) == 0  # one document
    assert samples.typical_start(tokens, 256, 1000) > 0  # none is as long


@pytest.mark.parametrize(
    "is_imported, step, corpus, tokenizer, given, expected, labelled_on",
    [
        (True, 0, "python_stdlib", TOKENIZER, None, examples.ENGLISH, "english"),
        (True, 0, "python_stdlib", TOKENIZER, "a text", "a text", "english"),
        (True, 0, "text", TOKENIZER, None, None, "text"),
        (True, 9, "python_stdlib", TOKENIZER, None, None, "python_stdlib"),  # trained on it
        (False, 0, "python_stdlib", TOKENIZER, None, None, "python_stdlib"),
        # of proteins
        (True, 0, "python_stdlib", CharacterTokenizer("ACDEFGHIKLMNPQRSTVWY"), None, None, "python_stdlib"),
    ],
)
def test_an_imported_model_without_a_corpus_opens_on_english_and_is_labelled_on_stories(
    small, tmp_path, is_imported, step, corpus, tokenizer, given, expected, labelled_on
):
    if is_imported:
        origin.record_import(tmp_path, tmp_path, {"architecture": "LlamaForCausalLM"})
    config = small(data__corpus=corpus)
    run = SimpleNamespace(step=step, config=config, workdir=tmp_path, tokenizer=tokenizer)
    assert base.own_text(run, SuiteOptions(text=given)) == expected
    labelled = base.with_stories(run)
    assert labelled.config.data.corpus == labelled_on and run.config.data.corpus == corpus


def test_the_telling_head_reads_one_token_that_is_neither_the_first_nor_its_own():
    weights_NHLS = np.zeros((2, 2, 4, 4))
    weights_NHLS[0, 0, :, 0] = 1  # the first token
    weights_NHLS[0, 1] = np.eye(4)  # itself
    weights_NHLS[1, 0] = np.tri(4) / np.arange(1, 5)[:, None]  # all alike
    weights_NHLS[1, 1] = np.eye(4, k=-1)  # the previous one
    assert typical.telling_head(typical.telling(weights_NHLS, of_itself=True)) == (1, 1)
    assert typical.telling_head(typical.telling(weights_NHLS, of_itself=False)) == (0, 1)


# Attention between whole words is summed over the tokens of a key, and averaged over those of a query.


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

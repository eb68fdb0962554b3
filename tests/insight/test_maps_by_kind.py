"""Maps, curves and head masks of the three kinds of attention, against recomputations without padding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.generation import cache
from mini_gpt.insight import attention
from mini_gpt.model import editing
from mini_gpt.model.parameters import with_layers
from tests import oracle
from tests.conftest import slow
from tests.random_models import random_model

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
            for maps, weights_HLS in zip(found[kind], weights_NHLS, strict=True):
                maps_HLS = maps.weights_BHLS[row, :, :rows]
                np.testing.assert_allclose(maps_HLS[..., :columns], weights_HLS, atol=1e-5)
                assert not maps_HLS[..., columns:].any(), "no weight on padding"
                assert maps.weights_BHLS.shape[0] == len(tokens_BL)


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

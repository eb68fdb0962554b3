"""Scores of texts and items, and the memory that a pass takes."""

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation import extrapolation, items, memory, perplexity, scoring, task_accuracy
from mini_gpt.evaluation.items import Items
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import attention, pruning
from mini_gpt.insight.diagnosis import probe
from mini_gpt.model import build
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import needles, tasks

# Scores of tokens, against the documented context of each token.


class FakeModel:
    """The loss of a target encodes its context length, the first token of its window, and the target."""

    def __init__(self):
        self.shapes = set()

    def __call__(self, inputs_BL, targets_BL):
        self.shapes.add((inputs_BL.shape, targets_BL.shape, inputs_BL.dtype, targets_BL.dtype))
        indices_BL = np.broadcast_to(np.arange(inputs_BL.shape[1]), inputs_BL.shape)
        return (1000.0 * (indices_BL + 1) + inputs_BL[:, :1] + targets_BL / 1000).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 15, 16, 17, 40, 41])
@pytest.mark.parametrize("window, stride", [(8, 8), (8, 3), (8, 1), (5, 4), (1, 1), (50, 7)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_token_has_the_documented_context(count, window, stride, batch_size):
    tokens = np.arange(100, 100 + count + 1)
    model = FakeModel()
    nll = scoring.score_tokens(model, tokens, window=window, stride=stride, batch_size=batch_size)
    assert nll.shape == (count,)
    for t in range(1, count + 1):
        k = 0 if t <= window else math.ceil((t - window) / stride)
        context, first = t - k * stride, tokens[k * stride]
        assert nll[t - 1] == np.float32(1000.0 * context + first + tokens[t] / 1000)
    assert model.shapes == {((batch_size, window), (batch_size, window), np.dtype("int32"), np.dtype("int32"))}


@pytest.mark.parametrize(
    "name, value",
    [("stride", 0), ("stride", 9), ("stride", 2.0), ("window", "8"), ("batch_size", 0), ("batch_size", 1.5)],
)
def test_windows_of_wrong_types_and_ranges_are_refused(name, value):
    sizes = {"window": 8, "stride": 8, "batch_size": 1}
    with pytest.raises(UserError, match=f"^{name}: found {value!r}; must be "):
        scoring.score_tokens(FakeModel(), np.arange(20), **sizes | {name: value})
    sizes = {size: np.int64(number) for size, number in sizes.items()}  # NumPy's numbers are whole too
    assert len(scoring.score_tokens(FakeModel(), np.arange(20), **sizes)) == 19


@pytest.mark.parametrize(
    "measure",
    [
        lambda lengths: extrapolation.plan(100, "test", lengths, ()),
        lambda lengths: needles.measure(None, None, None, lengths),
        lambda lengths: tasks.by_length(SimpleNamespace(config=None), None, "test", lengths),
    ],
)
@pytest.mark.parametrize("length", [2.5, "8", 0])
def test_lengths_of_wrong_types_and_ranges_are_refused(measure, length):
    with pytest.raises(UserError, match=f": found {length!r}; must be "):
        measure((length,))


def test_one_token_has_no_loss():
    assert len(scoring.score_tokens(FakeModel(), np.array([5]), window=8, stride=8, batch_size=2)) == 0


def test_scores_are_sums_over_counts():
    token_bytes = np.array([1, 3, 0])  # characters of one and three bytes, and the separator
    score = scoring.score(np.array([1.0, 2.0, 0.5], np.float32), np.array([0, 1, 2]), token_bytes)
    assert (score.tokens, score.bytes) == (3, 4)
    assert score.nll == pytest.approx(3.5 / 3)
    assert score.perplexity == pytest.approx(math.exp(3.5 / 3))
    assert score.bits_per_byte == pytest.approx(3.5 / math.log(2) / 4)


def test_a_sample_is_whole_windows_spread_over_the_split():
    tokens = np.arange(10_000)
    pieces = perplexity.stretches(tokens, 1_600, 50)
    assert [len(piece) - 1 for piece in pieces] == [100] * 16
    assert pieces[0][0] == 0 and pieces[-1][-1] == 9_999
    gaps = np.diff([piece[0] for piece in pieces])
    assert gaps.max() - gaps.min() <= 1
    assert [len(p) for p in perplexity.stretches(tokens[:1_000], 1_600, 50)] == [1_000]
    assert [len(p) for p in perplexity.stretches(tokens, 30, 50)] == [51]


# Results of single items: parts of a text that add up to its loss, and their form in JSON files.


@pytest.mark.parametrize("count", [1, 5, 64, 65, 1000])
def test_parts_of_a_text_add_up_to_its_score(count):
    rng = np.random.default_rng(count)
    nll, targets, token_bytes = rng.random(count).astype(np.float32), rng.integers(0, 9, count), rng.integers(1, 4, 9)
    score = scoring.score(nll, targets, token_bytes)
    for metric, expected in {"nll": score.nll, "bits_per_byte": score.bits_per_byte}.items():
        parts = score.items[metric]
        assert len(parts.sums_P) == min(count, items.PARTS) == len(parts.weights_P)
        assert parts.sums_P.sum() / parts.weights_P.sum() == pytest.approx(expected, rel=1e-12)
    lengths = score.items["nll"].weights_P
    assert lengths.max() - lengths.min() <= 1 and lengths.sum() == count


def test_items_survive_a_json_file():
    written = {"nll": Items(np.array([0.5, 3.25]), np.array([1.0, 7.0]))}
    read = items.unpacked(json.loads(json.dumps(items.packed(written)))["nll"])
    np.testing.assert_array_equal(read, written["nll"])


ONE, TWO, NAN = (
    items.packed({"x": Items(np.array(values), np.array(values))})["x"][0] for values in ([1.0], [1.0, 2.0], [np.nan])
)


@pytest.mark.parametrize(
    "texts", [None, [], [ONE], [ONE, TWO], [NAN, ONE], [ONE, NAN], ["?", ONE], [5, ONE], [ONE, ONE[:-2]]]
)
def test_damaged_items_are_refused(texts):
    with pytest.raises((ValueError, TypeError)):
        items.unpacked(texts)


# The estimate of a pass's memory covers what XLA allocates, and batches shrink with it.

GPT2 = {"model.num_layers": 12, "model.num_heads": 12, "model.d_model": 768, "model.activation": "gelu"}
GPT2 |= {"model.position": "learned", "context_length": 1024, "model.dtype": "float32", "train.batch_size": 16}


def shaped(fields, vocab_size):
    """Return a LoadedModel with the shapes of parameters in place of their values."""
    config = loading.load("configs/default.py", fields)
    definition, shapes = build.abstract(config.model, vocab_size)
    mesh = sharding.make_mesh(1, 1, 1)
    return LoadedModel(shapes, definition, config, mesh, config.batch_tokens, PLAIN)


def test_batches_of_gpt2_follow_the_budget():
    model = shaped(GPT2, 50_257)
    rows = {kept: model.rows_at_a_time(1024, kept) for kept in ("losses", "logits", "maps", "gradients")}
    assert (
        8 <= rows["losses"] <= 16
        and 1 <= rows["gradients"] <= 2
        and rows["losses"] > rows["logits"] > rows["maps"] >= 2
    )
    assert 1024 * 50_257 * 4 * rows["logits"] < memory.BUDGET, "the logits alone"
    assert model.rows_at_a_time(128, "logits") > model.rows_at_a_time(1024, "logits")


def test_small_models_keep_their_batches():
    model = shaped({"train.batch_size": 16, "context_length": 128}, 5_000)
    assert {model.rows_at_a_time(128, kept) for kept in ("losses", "logits", "maps", "gradients")} == {16}


def test_a_batch_has_no_more_rows_than_there_are():
    model = shaped({"train.batch_size": 16, "context_length": 128}, 5_000)
    assert [model.rows_at_a_time(128, count=count) for count in (1, 3, 16, 17)] == [1, 3, 16, 16]
    sharded = dataclasses.replace(model, mesh=sharding.make_mesh(4, 1, 1))
    assert [sharded.rows_at_a_time(128, count=count) for count in (1, 3, 5, 100)] == [4, 4, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize("attention_of", ["blockwise", "reference"])
@pytest.mark.parametrize("kept", ["losses", "logits", "maps", "gradients"])
def test_the_estimate_covers_what_xla_allocates(kept, attention_of):
    fields = GPT2 | {"model.num_layers": 3, "model.num_heads": 4, "model.d_model": 256, "context_length": 512}
    model = shaped(fields | {"model.attention": attention_of}, 20_000)

    def allocated(rows):
        tokens_BL = jax.ShapeDtypeStruct((rows, 512), jnp.int32)
        rows_B = jax.ShapeDtypeStruct((rows,), jnp.int32)
        weights_BL = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
        batch = {"inputs": tokens_BL, "targets": tokens_BL, "weights": weights_BL, "rows": rows_B}
        mask_NBH = jax.ShapeDtypeStruct((3, rows, 4), jnp.float32)
        rows_of_task = {"inputs": tokens_BL, "targets": tokens_BL, "numbers": rows_B}
        lowered = {
            "losses": lambda: LoadedModel.nll.lower(model, tokens_BL, tokens_BL),
            "logits": lambda: task_accuracy._predict.lower(model, rows_of_task),
            "maps": lambda: attention._each_layer.lower(
                model, (tokens_BL, tokens_BL, rows_B), (), reduce=probe.statistics
            ),
            "gradients": lambda: pruning._mask_gradient.lower(model, batch, mask_NBH),
        }[kept]()
        return lowered.compile().memory_analysis().temp_size_in_bytes

    estimate = memory.of_row(model.config.model, 20_000, 512, kept)
    assert 0.05 * estimate < (allocated(16) - allocated(8)) / 8 < 1.3 * estimate

"""Scores of tokens, against the documented context of each token."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mini_gpt.evaluation import extrapolation, perplexity, scoring
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import needles, tasks


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

"""The loss of each token under a stated windowing, and what is said of a text from it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

NllFn = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Score:
    """Sums over the scored tokens; every figure is taken from them at the end."""

    nll_sum: float
    tokens: int
    bytes: int

    @property
    def nll(self) -> float:
        """Nats a token."""
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> float | None:
        return math.exp(self.nll) if self.nll < 700 else None  # past a float's range

    @property
    def bits_per_byte(self) -> float:
        """All of the loss, separators included, over the UTF-8 bytes of the scored text."""
        return self.nll_sum / math.log(2) / self.bytes


def score_tokens(nll_fn: NllFn, tokens: np.ndarray, *, window: int, stride: int, batch_size: int) -> np.ndarray:
    """Gives nll[len(tokens) - 1] in nats, float32: the loss of every token but the first.

    Windows start at 0, stride, 2·stride, …; token t is scored in the first window that holds it as a target, so its
    context is its last t - k·stride tokens, with k = 0 for t ≤ window and ⌈(t - window)/stride⌉ beyond. The last window
    is padded on the right, the last batch filled up: `nll_fn(inputs_BL, targets_BL) -> nll_BL` sees one shape.
    With stride = window these are blocks; with a smaller stride every token past the first window has at least
    window - stride tokens of context.

    Raises ValueError unless 1 ≤ stride ≤ window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride: found {stride}; must be in 1..window ({window})")
    tokens = np.asarray(tokens)
    count = len(tokens) - 1
    nll = np.empty(max(count, 0), np.float32)
    for starts in _window_starts(count, window, stride, batch_size):
        rows = [_window(tokens, start, window) for start in starts]
        rows += [np.zeros_like(rows[0])] * (batch_size - len(rows))
        inputs_BL, targets_BL = (np.stack(rows)[:, cut].astype(np.int32) for cut in (slice(None, -1), slice(1, None)))
        nll_BL = np.asarray(nll_fn(inputs_BL, targets_BL))
        for start, nll_L in zip(starts, nll_BL, strict=False):
            first = 0 if start == 0 else window - stride
            last = min(window, count - start)
            nll[start + first : start + last] = nll_L[first:last]
    return nll


def num_windows(count: int, window: int, stride: int) -> int:
    """Gives how many windows score `count` targets: what a windowing costs, in runs of the model on one window."""
    return 1 + max(0, math.ceil((count - window) / stride)) if count > 0 else 0


def _window_starts(count: int, window: int, stride: int, batch_size: int) -> Iterator[list[int]]:
    windows = num_windows(count, window, stride)
    for first in range(0, windows, batch_size):
        yield [k * stride for k in range(first, min(first + batch_size, windows))]


def _window(tokens: np.ndarray, start: int, window: int) -> np.ndarray:
    row = tokens[start : start + window + 1]
    return np.pad(row, (0, window + 1 - len(row)))


def score(nll: np.ndarray, targets: np.ndarray, token_bytes: np.ndarray) -> Score:
    """Sums the losses of the targets, in float64; `token_bytes[V]` gives the bytes that each token stands for."""
    return Score(float(np.sum(nll, dtype=np.float64)), len(targets), int(token_bytes[targets].sum()))

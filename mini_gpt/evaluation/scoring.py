"""The loss of each token of a text, in windows of a given length and stride, and sums of these losses."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from mini_gpt.config.fields import Count, Range, convert
from mini_gpt.data.batches import in_full_batches
from mini_gpt.evaluation import items
from mini_gpt.evaluation.items import Items
from mini_gpt.runtime import progress
from mini_gpt.runtime.threads import in_order

NllFn = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Score:
    """Sums over the scored tokens.

    nll_sum: in nats.
    bytes: in UTF-8.
    losses_T: the loss of each scored token, in nats, float32.
    items: {metric: results of parts of the text}.
    """

    nll_sum: float
    tokens: int
    bytes: int
    losses_T: np.ndarray = field(repr=False)
    items: Mapping[str, Items] = field(default_factory=dict)

    @property
    def nll(self) -> float:
        """Mean loss in nats per token."""
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> float | None:
        """exp(nll), or None if it overflows a float."""
        return math.exp(self.nll) if self.nll < 700 else None

    @property
    def bits_per_byte(self) -> float:
        """Total loss in bits, including separators, divided by the UTF-8 bytes of the scored text."""
        return self.nll_sum / math.log(2) / self.bytes


# {name: a function of the score of a text}, besides the loss. Each evaluation during training writes them to
# metrics.jsonl as validation/NAME, and eval.py writes them to its results. None: the metric has no value for this text.
METRICS: dict[str, Callable[[Score], float | None]] = {
    "bits_per_byte": lambda score: score.bits_per_byte if score.bytes else None,
}


def metrics(score: Score | None) -> dict[str, float | None]:
    """Return the METRICS of a score; all are None without a score."""
    values = {name: metric(score) if score else None for name, metric in METRICS.items()}
    return {name: None if value is None else float(value) for name, value in values.items()}  # also from NumPy


def score_tokens(nll_fn: NllFn, tokens: np.ndarray, *, window: int, stride: int, batch_size: int) -> np.ndarray:
    """Return the loss of every token but the first, in nats, float32; its shape is [len(tokens) - 1].

    Windows start at 0, stride, 2·stride, …; each token is scored in the first window that has it as a target. With
    stride = window these are blocks. With a smaller stride, every token past the first window has at least
    window - stride + 1 tokens of context.

    nll_fn: called as nll_fn(inputs_BL, targets_BL) -> nll_BL, always with B = batch_size and L = window. Copies of the
    last token pad the last window; copies of a row pad the last batch. If nll_fn has an attribute `threads`, up to as
    many threads call it at the same time. Raises UserError unless 1 ≤ stride ≤ window and 1 ≤ batch_size, all whole
    numbers.
    """
    window, batch_size = convert("window", window, Count), convert("batch_size", batch_size, Count)
    stride = convert("stride", stride, Annotated[int, Range(f"in 1..window ({window})", lambda n: 1 <= n <= window)])
    tokens = np.asarray(tokens)
    targets = len(tokens) - 1
    nll = np.empty(max(targets, 0), np.float32)

    def score_batch(batch: tuple[int, Sequence[int]]) -> tuple[int, Sequence[int], np.ndarray]:
        rows_BM = tokens.take(np.add.outer(batch[1], np.arange(window + 1)), mode="clip").astype(np.int32)
        return *batch, np.asarray(nll_fn(rows_BM[:, :-1], rows_BM[:, 1:]))

    all_starts = range(0, stride * num_windows(targets, window, stride), stride)
    scored = in_order(score_batch, in_full_batches(all_starts, batch_size), getattr(nll_fn, "threads", 1))
    for count, starts, nll_BL in scored:
        for start, nll_L in zip(starts[:count], nll_BL[:count], strict=True):
            first = 0 if start == 0 else window - stride
            last = min(window, targets - start)
            nll[start + first : start + last] = nll_L[first:last]
        progress.advance(count * window)
    return nll


def num_windows(targets: int, window: int, stride: int) -> int:
    """Return the number of windows that score this many targets."""
    return 1 + max(0, math.ceil((targets - window) / stride)) if targets > 0 else 0


def score(nll: np.ndarray, targets: np.ndarray, token_bytes: np.ndarray) -> Score:
    """Return the score of the targets; losses are summed in float64. token_bytes: [V], UTF-8 bytes of each token."""
    bytes_of_targets = token_bytes[targets]
    parts = {"nll": items.parts_of(nll, np.ones(len(nll)))}
    if bytes_of_targets.any():
        parts["bits_per_byte"] = items.parts_of(nll, math.log(2) * bytes_of_targets)
    return Score(float(np.sum(nll, dtype=np.float64)), len(targets), int(bytes_of_targets.sum()), nll, parts)

"""The loss of the same target tokens at many context lengths, the trained one and beyond, under stated windowings."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.evaluation import perplexity, progress, scoring
from mini_gpt.model.gpt import check_length
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime.errors import UserError

LENGTHS = "1x,2x,4x,8x,16x"  # of the trained context
SLIDING_TARGETS = 16_384  # a sliding window runs the model many times over each token: a sample is enough


@dataclass(frozen=True)
class Windowing:
    """How the targets first_target..last_target of a split are scored (token t is a target from its window's start on).

    Blocks (stride = length) take the whole split. Sliding windows take one contiguous sample, the end of the split, the
    same at every length and stride; each of its targets has between length - stride + 1 and length tokens of context.
    """

    length: int
    stride: int
    first_target: int
    last_target: int

    @property
    def protocol(self) -> str:
        return "blocks" if self.stride == self.length else "sliding"

    @property
    def start(self) -> int:
        """Gives the split's token at which the first window starts."""
        return self.first_target - 1 - (self.length - self.stride)

    @property
    def cost(self) -> int:
        """Gives how many tokens go through the model."""
        return self.length * scoring.num_windows(self.last_target - self.start, self.length, self.stride)


def parse_lengths(flag: str, text: str, trained: int, least: int) -> tuple[int, ...]:
    """Reads '64,2x,0.5x': tokens, or multiples of the trained context. Raises UserError; sorts, drops doubles."""
    lengths = set()
    for part in text.split(","):
        try:
            length = Fraction(part.removesuffix("x")) * (trained if part.endswith("x") else 1)
        except (ValueError, ZeroDivisionError):
            length = Fraction(1, 2)
        if length.denominator != 1:
            raise UserError(
                f"{flag}: found {part!r}; must be whole tokens or multiples of the trained context of {trained}, "
                "such as 128 or 2x"
            )
        if length < least:
            raise UserError(f"{flag}: found {part!r}, {length} tokens; must be at least {least}")
        lengths.add(int(length))
    return tuple(sorted(lengths))


def check_strides(lengths: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raises UserError where a stride is longer than a window."""
    if strides[-1] > lengths[0]:
        raise UserError(f"--strides: found {strides[-1]}, longer than the window of {lengths[0]}; must be at most that")


def plan(num_tokens: int, split: str, lengths: tuple[int, ...], strides: tuple[int, ...]) -> list[Windowing]:
    """Gives the windowings of a split: for each length its blocks, then its sliding windows.

    Raises UserError where a window is longer than the split.
    """
    last = num_tokens - 1
    if lengths[-1] > last:
        fit = ", ".join(str(length) for length in lengths if length <= last) or "none of those given"
        raise UserError(
            f"--lengths: found {lengths[-1]}; the {split} split has {num_tokens} tokens and a window needs one more "
            f"than its length; lengths that can be scored: {fit}"
        )
    windowings = []
    room = max((lengths[-1] - stride for stride in strides), default=0)
    sample = max(room + 1, last - SLIDING_TARGETS + 1)
    for length in lengths:
        windowings.append(Windowing(length, length, 1, last))
        for stride in strides:
            if stride < length:
                windowings.append(Windowing(length, stride, sample, last))
    return windowings


def extrapolation(
    model: LoadedModel, tokens: np.ndarray, token_bytes: np.ndarray, windowings: list[Windowing]
) -> tuple[list[dict], dict[str, list[float]]]:
    """Scores each windowing; gives its rows, and by length the blocks' mean loss at each position of the window.

    A row holds the windowing, nll in nats a token, perplexity, bits_per_byte and tokens_scored; or, where the model has
    no such positions or gives no finite loss, the status undefined and its reason in their place. `sample_nll` is the
    mean over the sliding windows' sample alone, in blocks too: there the two protocols have the same targets. Entry i
    of a position list is the mean over the blocks' targets that are predicted from i + 1 tokens, in nats.
    """
    reasons = {w.length: _undefined(model.config.model, w.length) for w in windowings}
    defined = [w for w in windowings if reasons[w.length] is None]
    sample = max(w.first_target for w in windowings)  # blocks begin at the first token, the sample later
    what = f"{len(defined)} windowings of {len(tokens) - 1:,} targets"
    if sample > 1:
        what += f", sliding windows of the last {len(tokens) - sample:,}"
    rows, by_position = [], {}
    with progress.shown(what, sum(w.cost for w in defined)) as advance:
        nll_fn = perplexity.make_nll_fn(model, advance=advance)
        for windowing in windowings:
            reason = reasons[windowing.length]
            nll = None
            if reason is None:
                batch_size = perplexity.rows_at_a_time(model, windowing.length)
                nll = _score(nll_fn, tokens, windowing, batch_size)
                if not np.isfinite(nll).all():
                    reason = "the model's loss is not finite"
            if reason is None and windowing.protocol == "blocks":
                by_position[str(windowing.length)] = _by_position(nll, windowing.length)
            row = {"length": windowing.length, "protocol": windowing.protocol, "stride": windowing.stride}
            figures = dict.fromkeys(("nll", "perplexity", "bits_per_byte"), None) | {"tokens_scored": 0}
            sample_nll = None
            if reason is None:
                targets = tokens[windowing.first_target : windowing.last_target + 1]
                figures = _figures(scoring.score(nll, targets, token_bytes))
                sample_nll = float(np.mean(nll[sample - windowing.first_target :], dtype=np.float64))
            state = {"status": "undefined" if reason else "ok", "reason": reason}
            rows.append(row | figures | state | {"first_target": windowing.first_target, "sample_nll": sample_nll})
    return rows, by_position


def _undefined(model: ModelConfig, length: int) -> str | None:
    try:
        check_length(model, length)
    except UserError as error:
        return str(error)
    return None


def _score(nll_fn: scoring.NllFn, tokens: np.ndarray, w: Windowing, batch_size: int) -> np.ndarray:
    part = tokens[w.start : w.last_target + 1]
    nll = scoring.score_tokens(nll_fn, part, window=w.length, stride=w.stride, batch_size=batch_size)
    return nll[w.first_target - 1 - w.start :]


def _figures(score: scoring.Score) -> dict:
    return {
        "nll": score.nll,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte if score.bytes else None,
        "tokens_scored": score.tokens,
    }


def _by_position(nll: np.ndarray, length: int) -> list[float]:
    sums = np.bincount(np.arange(len(nll)) % length, weights=nll, minlength=length)
    counts = np.bincount(np.arange(len(nll)) % length, minlength=length)
    return (sums / counts).tolist()

"""The loss of the same target tokens at different context lengths, such as multiples of the trained one."""

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mini_gpt.config.fields import Count, convert
from mini_gpt.evaluation import items, perplexity, scoring
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError, require

LENGTHS = "1x,2x,4x,8x,16x"  # x: times the length in the config
LENGTH = re.compile(r"[-+\d_./]{1,20}(e[-+]?\d)?x?")  # exponent of one digit, because 1e999999999 would take all memory
SLIDING_TARGETS = 16_384  # at most, because overlapping windows process each token many times


@dataclass(frozen=True)
class Windowing:
    """Windows of one length and stride, and the targets that they score: first_target..last_target of a split.

    Blocks (stride = length) score the whole split. Sliding windows score only the end of the split, the same targets
    for every length and stride. Each of these targets has between length - stride + 1 and length tokens of context.
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
        """Index of the first token of the first window."""
        return self.first_target - 1 - (self.length - self.stride)

    @property
    def cost(self) -> int:
        """Number of tokens that the model processes."""
        return self.length * scoring.num_windows(self.last_target - self.start, self.length, self.stride)


def parse_lengths(flag: str, text: str, trained: int, least: int) -> tuple[int, ...]:
    """Return the sorted unique lengths in a text such as '64,2x,0.5x'; x: times `trained`, the length in the config.

    Raises UserError that names the flag if a length is below `least` or not a whole number.
    """
    lengths = set()
    for part in text.split(","):
        try:
            number = Fraction(part.removesuffix("x") if LENGTH.fullmatch(part) else "")
            length = number * (trained if part.endswith("x") else 1)
        except (ValueError, ZeroDivisionError):
            length = Fraction(1, 2)  # not whole, so that the next check fails
        expected = f"a whole number, such as 128 or 2x (1x is {trained})"
        require(length.denominator == 1, flag, part, f"must be {expected}")
        require(length >= least, flag, part, f"must be at least {least}")
        lengths.add(int(length))
    return tuple(sorted(lengths))


def check_strides(lengths: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raise UserError if a stride is longer than a window. Both tuples are sorted."""
    if strides[-1] > lengths[0]:
        raise UserError(f"--strides: found {strides[-1]}, longer than the window of {lengths[0]}; must not be longer")


def plan(
    num_tokens: int, split: str, lengths: tuple[int, ...], strides: tuple[int, ...], targets: int | None = None
) -> list[Windowing]:
    """Return the windowings of a split, for each length the blocks and then the sliding windows.

    targets: the most that sliding windows score, at the end of the split; None: SLIDING_TARGETS.
    Raises UserError if a window is longer than the split.
    """
    lengths, strides = (tuple(convert("window", size, Count) for size in sizes) for sizes in (lengths, strides))
    last = num_tokens - 1
    if lengths[-1] > last:
        possible = ", ".join(str(length) for length in lengths if length <= last) or "none of those given"
        raise UserError(
            f"--lengths: found {lengths[-1]}; the {split} split has {num_tokens} tokens, and a window needs one more "
            f"than its length; lengths that can be scored: {possible}"
        )
    longest_overlap = max((lengths[-1] - stride for stride in strides), default=0)
    sample_start = max(longest_overlap + 1, last - (targets or SLIDING_TARGETS) + 1)
    windowings = []
    for length in lengths:
        windowings.append(Windowing(length, length, 1, last))
        windowings += [Windowing(length, stride, sample_start, last) for stride in strides if stride < length]
    return windowings


def extrapolation(
    model: LoadedModel, tokens: np.ndarray, token_bytes: np.ndarray, windowings: list[Windowing]
) -> tuple[list[dict], dict[str, list[float]]]:
    """Return a row for each windowing of a split, and {length: the mean loss at each position of a block}.

    `nll` is in nats per token. It is None, and `reason` is given, if the model has no positions for the length or its
    loss is not finite. `sample_nll` is the mean over the targets of the sliding windows, for blocks too, to compare
    both protocols. Entry i of the losses by position is the mean in nats over targets with i + 1 tokens of context. The
    context starts at the block's first token, or at a later separator if documents are isolated. A list can then be
    shorter than a block.
    """
    reasons = {w.length: perplexity.why_undefined(model.config.model, w.length) for w in windowings}
    defined = [w for w in windowings if reasons[w.length] is None]
    sample_start = max(w.first_target for w in windowings)  # sliding windows have a later first target than blocks
    title = f"{len(defined)} windowings of {len(tokens) - min(w.first_target for w in windowings):,} targets"
    if sample_start > 1:
        title += f", sliding windows of the last {len(tokens) - sample_start:,}"
    rows, by_position = [], {}
    with progress.shown(title, sum(w.cost for w in defined)):
        nll_fn = perplexity.make_nll_fn(model)
        for w in windowings:
            reason, score, sample_nll = reasons[w.length], None, None
            if reason is None:
                part = tokens[w.start : w.last_target + 1]
                windows = scoring.num_windows(len(part) - 1, w.length, w.stride)
                batch_size = model.rows_at_a_time(w.length, count=windows)
                nll = scoring.score_tokens(nll_fn, part, window=w.length, stride=w.stride, batch_size=batch_size)
                nll = nll[w.first_target - 1 - w.start :]
                reason = None if np.isfinite(nll).all() else perplexity.NOT_FINITE
            if reason is None:
                score = scoring.score(nll, tokens[w.first_target : w.last_target + 1], token_bytes)
                sample_nll = float(np.mean(nll[sample_start - w.first_target :], dtype=np.float64))
                if w.protocol == "blocks":
                    positions = _positions(part[:-1], w.length, model.layout.separator_id)
                    by_position[str(w.length)] = (np.bincount(positions, nll) / np.bincount(positions)).tolist()
            row = {
                "length": w.length,
                "protocol": w.protocol,
                "stride": w.stride,
                "nll": score.nll if score else None,
                "perplexity": score.perplexity if score else None,
                **scoring.metrics(score),
                "tokens_scored": score.tokens if score else 0,
                "status": "undefined" if reason else "ok",
                "reason": reason,
                "first_target": w.first_target,
                "sample_nll": sample_nll,
                "items": items.packed(score.items) if score else {},
            }
            rows.append(row)
    return rows, by_position


def _positions(inputs: np.ndarray, length: int, separator_id: int | None) -> np.ndarray:
    """Return each input's position in its block, or in its document. separator_id: as in `Layout`."""
    places = np.arange(len(inputs))
    is_first = places % length == 0
    if separator_id is not None:
        is_first |= inputs == separator_id
    return places - np.maximum.accumulate(np.where(is_first, places, 0))

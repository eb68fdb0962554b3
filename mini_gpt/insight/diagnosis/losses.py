"""The losses of a model, compared with its own records, its training text, simpler models, and another temperature."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_gpt.evaluation import perplexity
from mini_gpt.insight.diagnosis.result import REGAINED, SAME, CheckResult
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime.progress import Advance, silent

History = Sequence[Mapping[str, float]]  # rows of metrics.jsonl

NEAR = 0.3  # most nats above the loss recorded at the nearest step, or above the recorded training losses
UNIGRAM = 0.99  # loss / the unigram model's loss
FLAT = 0.05  # variation of predictions / unigram entropy
LEARNED = 0.95  # loss at the fitted temperature / the unigram model's loss
RISE = 0.3  # nats: last training loss - lowest training loss
NOISE = 4.0  # standard errors of the mean loss; a rise must also exceed these
OVERFIT = 0.1  # nats: rise of the recorded validation loss
GAP = 0.5  # training loss / validation loss
TEMPERATURE = 1.5  # temperature that fits best, or its inverse
GAIN = 0.05  # nats that this temperature must gain
RANKS = 0.3  # correlation of tokens' frequencies and predictions
MIN_COUNT = 10  # occurrences of a token in the training text, to compare its frequency


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token. A value is None if it is unknown.

    loss, train: the model's own, on a sample of the split and of the training text. recorded: the validation loss that
    training recorded at the nearest step. rise: from the lowest recorded one to the last, both up to the model's step.
    same_step: whether `recorded` is of this step. recorded_train: mean of the last training losses. windows, unigram,
    bigram: the losses of the model and of two simpler ones, on the same windows.
    """

    loss: float
    train: float
    windows: float
    recorded: float | None
    rise: float
    same_step: bool
    recorded_train: float | None
    unigram: float
    bigram: float | None

    @property
    def excess(self) -> float | None:
        """The loss minus the recorded one; None if none was recorded."""
        return None if self.recorded is None else self.loss - self.recorded

    @property
    def agrees(self) -> bool | None:
        """Whether `loss` agrees with `recorded`, or else `train` with `recorded_train`; None if both are unknown."""
        if self.recorded is not None and self.excess is not None:
            return self.excess < NEAR if not self.same_step else abs(self.excess) < SAME * max(1, self.recorded)
        return None if self.recorded_train is None else self.train < self.recorded_train + NEAR

    @property
    def simpler(self) -> float:
        """The limit of the loss: a unigram model's, and a bigram model's if none was recorded."""
        unigram = UNIGRAM * self.unigram
        return unigram if self.agrees is not None or self.bigram is None else min(unigram, self.bigram)

    @property
    def suspicious(self) -> bool:
        """Whether the loss is finite, but not as recorded, or too high if none was recorded."""
        sound = self.windows < self.simpler if self.agrees is None else self.agrees
        return math.isfinite(self.loss) and not sound


def recorded(history: History, step: int) -> dict[str, Any]:
    """Return the fields of `Losses` that training recorded, for the model at a step."""
    evaluated = [row for row in history if "validation/loss" in row]
    nearest = min(evaluated, key=lambda row: abs(row["step"] - step), default=None)
    earlier = [row["validation/loss"] for row in evaluated if row["step"] <= step]
    trained = [row["train/loss"] for row in history if "train/loss" in row and row["step"] <= step]
    return {
        "recorded": None if nearest is None else nearest["validation/loss"],
        "rise": earlier[-1] - min(earlier) if earlier else 0.0,
        "same_step": nearest is not None and nearest["step"] == step,
        "recorded_train": float(np.mean(trained[-max(5, len(trained) // 20) :])) if trained else None,
    }


def sample_loss(model: LoadedModel, tokens: np.ndarray, *, advance: Advance = silent) -> float:
    """Return the loss in nats per token, on the sample of an evaluation during training."""
    one_byte_V = np.ones(model.vocab_size, int)  # bits per byte are not needed
    most = model.config.eval.tokens
    return perplexity.score_split(model, tokens, one_byte_V, most_tokens=most, advance=advance).nll


def bigram(train_tokens: np.ndarray, windows_BM: np.ndarray, unigram_V: np.ndarray) -> float:
    """Return the windows' loss under a bigram model, interpolated with the unigram model (Witten and Bell 1991)."""
    vocab = len(unigram_V)
    pair = lambda tokens_L: tokens_L[..., :-1].astype(np.int64) * vocab + tokens_L[..., 1:]
    pieces = perplexity.stretches(train_tokens, perplexity.MAX_COUNTED_TOKENS, window=1)
    pairs, counts = np.unique(np.concatenate([pair(piece) for piece in pieces]), return_counts=True)
    asked_BL = pair(windows_BM)
    at_BL = np.minimum(np.searchsorted(pairs, asked_BL), len(pairs) - 1)
    count_BL = np.where(pairs[at_BL] == asked_BL, counts[at_BL], 0)
    total_V = np.bincount(pairs // vocab, counts, minlength=vocab)
    kinds_V = np.maximum(np.bincount(pairs // vocab, minlength=vocab), 1)
    first_BL, second_BL = windows_BM[:, :-1], windows_BM[:, 1:]
    share_BL = count_BL + kinds_V[first_BL] * np.exp(unigram_V[second_BL])
    return -float(np.log(share_BL / (total_V + kinds_V)[first_BL]).mean())


def check(losses: Losses) -> list[CheckResult]:
    """Compare the losses with the recorded ones, with the training text's, and with those of simpler models."""
    shown = lambda value: "unknown" if value is None else f"{value:.2f}"
    says = f"The loss is {losses.windows:.2f} nats per token, that of a unigram model {losses.unigram:.2f}"
    says += "." if losses.bigram is None else f", that of a bigram model {losses.bigram:.2f}."
    limit = f"below {losses.simpler:.2f}"
    results = [CheckResult("loss", losses.windows, limit, not losses.windows < losses.simpler, says)]

    gap = losses.loss - losses.train
    far = losses.train < GAP * losses.loss and gap > RISE
    says = (
        f"The loss on training text is {losses.train:.2f}, on this split {losses.loss:.2f}. The recorded validation "
        f"loss is {shown(losses.recorded)}. Up to this step it has risen by {losses.rise:.2f} from its lowest value."
    )
    limit = f"a rise of at most {OVERFIT}, and a training loss at least {GAP} times the split's"
    results.append(CheckResult("overfitting", gap, limit, far or OVERFIT < losses.rise < gap, says))

    value, limit = losses.excess, f"at most {NEAR} nats above the recorded loss"
    if losses.agrees is None:
        return results
    if value is None:
        value = losses.train - (losses.recorded_train or 0)
        says = f"On training text the loss is {losses.train:.2f}; training recorded {shown(losses.recorded_train)}."
    elif losses.same_step:
        limit = f"a difference of {SAME * max(1, losses.recorded or 0):.2g} nats"
        says = f"The loss is {losses.loss:.4f} nats per token; training recorded {losses.recorded:.4f} at this step."
    else:
        says = f"The loss is {losses.loss:.2f} nats per token; the nearest evaluation had {shown(losses.recorded)}."
    return [*results, CheckResult("recorded loss", value, limit, not losses.agrees, says)]


def temperature(log_SV: np.ndarray, targets_S: np.ndarray, losses: Losses, label_smoothing: float) -> list[CheckResult]:
    """Check whether another temperature makes a model much better, and better than a unigram model.

    It is no fault that a model is less certain than it is right, if its loss is the recorded one, or if no loss was
    recorded and there was label smoothing. A loss that is not the recorded one must be explained by the temperature.
    """
    fitted, gain = fit_temperature(log_SV, targets_S)
    best = -float(np.take_along_axis(log_SV, targets_S[:, None], axis=1).mean()) - gain
    low, high = 1 / TEMPERATURE, TEMPERATURE
    says = f"The temperature that fits best is {fitted:.2f}; with it the loss is {gain:.2f} nats lower."
    # Early in training, logits are small, although their order is right; label smoothing keeps them small.
    small_by_training = label_smoothing > 0 if losses.agrees is None else losses.agrees
    explains = losses.agrees or losses.excess is None or gain > REGAINED * losses.excess
    beyond = fitted > high or (fitted < low and not small_by_training)
    found = gain > GAIN and best < LEARNED * losses.unigram and explains and beyond
    return [CheckResult("temperature", fitted, f"from {low:.2f} to {high}", found, says)]


def variation(log_BV: np.ndarray, unigram_V: np.ndarray) -> CheckResult:
    """Check how much log-probabilities depend on the text. unigram_V: those of a unigram model."""
    mean_V = np.log(np.maximum(np.exp(log_BV.astype(np.float64)).mean(axis=0), 1e-300))
    varies = float(np.mean(np.sum(np.exp(log_BV) * (log_BV - mean_V), axis=-1)))
    entropy = -float(np.sum(np.exp(unigram_V) * unigram_V))
    share = varies / entropy
    says = (
        f"The mean KL divergence of predictions from their average is {varies:.2f} nats, {share:.2f} of the unigram "
        f"entropy ({entropy:.2f}). For a unigram model it is 0."
    )
    return CheckResult("predictions", share, f"at least {FLAT}", not share >= FLAT, says)


def vocabulary(log_SV: np.ndarray, counts_V: np.ndarray) -> list[CheckResult]:
    """Compare how often tokens are predicted with how often they occur. Returns nothing for few different tokens."""
    frequent_V = counts_V >= MIN_COUNT
    if frequent_V.sum() < 2 * MIN_COUNT:
        return []
    mean_V = np.exp(log_SV.astype(np.float64)).mean(axis=0)
    rank = lambda values_V: np.argsort(np.argsort(values_V[frequent_V]))
    ranks = float(np.corrcoef(rank(mean_V), rank(counts_V))[0, 1])
    says = f"The rank correlation of tokens' mean predictions and their frequencies is {ranks:.2f}."
    return [CheckResult("vocabulary", ranks, f"at least {RANKS}", not ranks >= RANKS, says)]


def fit_temperature(log_SV: np.ndarray, targets_S: np.ndarray) -> tuple[float, float]:
    """Return the temperature between 1/20 and 20 with the least loss, and the nats that it gains."""
    log_SV = log_SV - log_SV.max(axis=-1, keepdims=True)  # so that no row underflows
    target_S = np.take_along_axis(log_SV, targets_S[:, None], axis=1)[:, 0]
    low, high = -3.0, 3.0  # log of the inverse temperature; the loss is convex in the inverse
    for _ in range(16):
        middle = (low + high) / 2
        exp_SV = np.exp(math.exp(middle) * log_SV)
        mean_S = (exp_SV * log_SV).sum(axis=-1) / exp_SV.sum(axis=-1)
        low, high = (middle, high) if mean_S.mean() < target_S.mean() else (low, middle)
    inverse = math.exp((low + high) / 2)
    loss = lambda inverse: float((np.log(np.exp(inverse * log_SV).sum(axis=-1)) - inverse * target_S).mean())
    return 1 / inverse, loss(1.0) - loss(inverse)


def training(history: History) -> list[CheckResult]:
    """Check whether the training loss ended above its lowest value; both are moving averages."""
    losses = np.array([row["train/loss"] for row in history if "train/loss" in row])
    if len(losses) < 20:
        return []
    width = max(5, len(losses) // 20)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    rise, lowest = float(smooth[-1] - smooth.min()), float(smooth.min())
    noise = NOISE * float(np.std(np.diff(losses))) / math.sqrt(2 * width)  # assume that neighbours differ only by noise
    norms = [row["train/gradient_norm"] for row in history if "train/gradient_norm" in row] or [math.nan]
    limit = f"at most {RISE} nats, or the noise ({noise:.2g}) if it is larger"
    says = (
        f"The training loss ended {rise:.2f} nats above its lowest value ({lowest:.2f}), averaged over {width} rows. "
        f"The largest gradient norm was {max(norms):.3g}, the median {np.median(norms):.3g}."
    )
    return [CheckResult("training", rise, limit, not rise <= max(RISE, noise), says)]

"""The losses of a model, compared with its own records, its training text, and simpler models."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_gpt.evaluation import perplexity
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.scoring import Score
from mini_gpt.insight import samples
from mini_gpt.insight.diagnosis.result import CheckResult

History = Sequence[Mapping[str, float]]  # rows of metrics.jsonl

SAME = 0.005  # largest difference from the loss recorded at this step: share of it, or nats if that is more
NEAR = 0.3  # most nats above the loss recorded at the nearest step, or above the recorded training losses
UNIGRAM = 0.99  # loss / the unigram model's loss
FLAT = 0.05  # variation of predictions / unigram entropy
RISE = 0.3  # nats: last training loss - lowest training loss
NOISE = 4.0  # standard errors of the mean loss; a rise must also exceed these
GAP = 0.5  # training loss / validation loss


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token. A value is None if it is unknown.

    loss, train: the model's own, on a sample of the split and of the training text.
    recorded: the validation loss that training recorded at the nearest step.
    rise: from the lowest recorded one to the last, both up to the model's step.
    same_step: whether `recorded` is of this step.
    recorded_train: mean of the last training losses.
    unigram, bigram: the losses of two simpler models on the sample of the split.
    """

    loss: float
    train: float
    recorded: float | None
    rise: float
    same_step: bool
    recorded_train: float | None
    unigram: float
    bigram: float | None

    @property
    def tolerance(self) -> float:
        """The most that the loss may differ from the recorded one, in nats."""
        return SAME * max(1.0, self.recorded or 0.0) if self.same_step else NEAR


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


def sample(model: LoadedModel, tokens: np.ndarray, most: int) -> list[np.ndarray]:
    """Return the stretches of a text that `sample_score` scores."""
    return perplexity.stretches(tokens, most, model.config.context_length)


def sample_score(model: LoadedModel, tokens: np.ndarray, most: int) -> Score:
    """Return the score of about `most` tokens of a text: with eval.tokens, those of an evaluation during training."""
    one_byte_V = np.ones(model.vocab_size, int)  # bits per byte are not needed
    return perplexity.score_split(model, tokens, one_byte_V, most_tokens=most)


def bigram(train_tokens: np.ndarray, texts: list[np.ndarray], unigram_V: np.ndarray) -> float:
    """Return the texts' loss under a bigram model, interpolated with the unigram model (Witten and Bell 1991)."""
    vocab = len(unigram_V)

    def pairs(some: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([text[:-1].astype(np.int64) * vocab + text[1:] for text in some])

    pieces = perplexity.stretches(train_tokens, samples.MAX_COUNTED_TOKENS, window=1)
    known, counts = np.unique(pairs(pieces), return_counts=True)
    asked_X = pairs(texts)
    at_X = np.minimum(np.searchsorted(known, asked_X), len(known) - 1)
    count_X = np.where(known[at_X] == asked_X, counts[at_X], 0)
    total_V = np.bincount(known // vocab, counts, minlength=vocab)
    kinds_V = np.maximum(np.bincount(known // vocab, minlength=vocab), 1)
    first_X, second_X = np.divmod(asked_X, vocab)
    share_X = count_X + kinds_V[first_X] * np.exp(unigram_V[second_X])
    return -float(np.log(share_X / (total_V + kinds_V)[first_X]).mean())


def check(losses: Losses, error: float | None = None) -> list[CheckResult]:
    """Compare the losses with those of simpler models, with the training text's, and with the recorded ones.

    error: the standard error of the loss.
    """
    return [dataclasses.replace(_simpler_models(losses), error=error), _overfitting(losses), *_recorded_loss(losses)]


def _simpler_models(losses: Losses) -> CheckResult:
    """Check that the loss is below a unigram model's, and below a bigram model's if none was recorded."""
    most, says = UNIGRAM * losses.unigram, f"The loss is {losses.loss:.2f} nats per token, "
    says += f"that of a unigram model {losses.unigram:.2f}"
    if losses.bigram is not None:
        says += f", that of a bigram model {losses.bigram:.2f}"
        if losses.recorded is losses.recorded_train is None:
            most = min(most, losses.bigram)
    return CheckResult("loss", losses.loss, f"below {most:.2f}", not losses.loss < most, f"{says}.")


def _overfitting(losses: Losses) -> CheckResult:
    gap = losses.loss - losses.train
    far = losses.train < GAP * losses.loss and gap > RISE
    says = f"The loss on training text is {losses.train:.2f}, on this split {losses.loss:.2f}."
    if losses.recorded is not None:
        says += f" The recorded loss has risen by {losses.rise:.2f} from its lowest value up to this step."
    limit = f"a rise of at most {perplexity.MOST_RISE}, and a training loss at least {GAP} times the split's"
    return CheckResult("overfitting", gap, limit, far or perplexity.MOST_RISE < losses.rise < gap, says)


def _recorded_loss(losses: Losses) -> list[CheckResult]:
    """Check that the loss is the recorded one, or else that of training text. Returns nothing without a record."""
    limit = f"at most {NEAR} nats above the recorded loss"
    if losses.recorded is None:
        if losses.recorded_train is None:
            return []
        excess = losses.train - losses.recorded_train
        says = f"On training text the loss is {losses.train:.2f}; training recorded {losses.recorded_train:.2f}."
    else:
        excess = losses.loss - losses.recorded
        says = f"The loss is {losses.loss:.2f} nats per token; the nearest evaluation had {losses.recorded:.2f}."
    found = not excess < NEAR
    if losses.recorded is not None and losses.same_step:
        limit, found = f"a difference of {losses.tolerance:.2g} nats", not abs(excess) < losses.tolerance
        says = f"The loss is {losses.loss:.4f} nats per token; training recorded {losses.recorded:.4f} at this step."
    return [CheckResult("recorded loss", excess, limit, found, says)]


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


def training(history: History, step: int) -> list[CheckResult]:
    """Check whether the training loss, up to a step, ended above its lowest value; both are moving averages."""
    history = [row for row in history if row["step"] <= step]
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

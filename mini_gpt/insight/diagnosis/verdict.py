"""What is wrong with a model, if anything: all checks, and the cause that explains most of the findings.

The limits of the checks were set on models that were broken on purpose (docs/inside.md).
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mini_gpt.evaluation import perplexity
from mini_gpt.insight import pruning
from mini_gpt.insight.diagnosis import layer_checks, prediction_checks, probe
from mini_gpt.insight.diagnosis.finding import Finding
from mini_gpt.model.loaded import LoadedModel

RISE = 0.3  # nats that the training loss may end above its lowest
NOISE = 4.0  # standard errors of a mean of losses, which a rise must exceed too

EXPLAINS = ("finite", "causality", "scale of logits", "residual", "activations", "saturated attention", "order")


def diagnose(
    model: LoadedModel, tokens: np.ndarray, train_tokens: np.ndarray, history: Sequence[Mapping[str, float]]
) -> list[Finding]:
    """Return the results of all checks that apply to the model.

    They use windows of `tokens`, and frequencies and heads' importance on `train_tokens`. history: rows of
    metrics.jsonl; may be empty.
    """
    config, length = model.config.model, model.config.context_length
    windows_BM = probe.windows(tokens, length + 1)
    text_BL, targets_B, at = windows_BM[:, :-1], probe.targets(model, windows_BM), probe.place(model)
    counts_V = 1 + perplexity.token_counts(train_tokens, probe.vocab_size(model))
    layers = probe.layers(model, windows_BM)
    predict = functools.partial(probe.predictions, model)
    few_tokens = train_tokens[: probe.WINDOWS * length + 1]
    return [
        *layer_checks.stream(config, layers, probe.count_non_finite(model)),
        *prediction_checks.order(predict, text_BL, targets_B, at, model.separator_id),
        *(() if model.masked else prediction_checks.causality(predict, text_BL)),
        *predictions(model, windows_BM, np.log(counts_V / counts_V.sum())),
        *layer_checks.attention(config, layers),
        *layer_checks.dead(layers, pruning.importance(model, pruning.text_batches(model, few_tokens))),
        *training(history),
    ]


def predictions(model: LoadedModel, windows_BM: np.ndarray, unigram_V: np.ndarray) -> list[Finding]:
    """Check the predictions and the losses on windows. unigram_V: log-probabilities of a unigram model."""
    log_BV = probe.predictions(model, windows_BM[:, :-1], probe.place(model))
    flat = prediction_checks.predictions(log_BV, unigram_V)
    if model.masked:
        targets_B = probe.targets(model, windows_BM)
        loss = -float(np.mean(np.take_along_axis(log_BV, targets_B[:, None], axis=1)))
        return [flat, prediction_checks.loss(loss, -float(unigram_V[targets_B].mean()))]
    nll_BL = probe.nll(model, windows_BM)
    findings = [flat, prediction_checks.loss(float(nll_BL.mean()), -float(unigram_V[windows_BM[:, 1:]].mean()))]
    return findings + ([prediction_checks.first_positions(nll_BL)] if nll_BL.shape[1] > 1 else [])


def most_likely(findings: list[Finding]) -> str | None:
    """Return the first cause of the finding that explains the others, or None if nothing was found."""
    found = {finding.check: finding for finding in findings if finding.found}
    return next((found[check].causes[0] for check in (*EXPLAINS, *found) if check in found), None)


def training(history: list[Mapping[str, float]]) -> list[Finding]:
    """Check whether the training loss ended above its lowest; both are moving averages."""
    losses = np.array([row["train/loss"] for row in history if "train/loss" in row])
    if len(losses) < 20:
        return []
    width = max(5, len(losses) // 20)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    rise, lowest = float(smooth[-1] - smooth.min()), float(smooth.min())
    noise = NOISE * float(np.std(np.diff(losses))) / math.sqrt(2 * width)  # neighbours differ only by noise
    norms = [row["train/gradient_norm"] for row in history if "train/gradient_norm" in row]
    return [
        Finding(
            "training",
            rise,
            f"at most {RISE} nats, or {noise:.2g} where losses are noisier",
            not rise <= max(RISE, noise),
            f"In training the loss ended {rise:.2f} nats above its lowest ({lowest:.2f}, means of {width} rows); the "
            f"largest gradient norm was {max(norms):.3g}, the median {np.median(norms):.3g}.",
            ("optimizer.learning_rate far too high", "too short a warm-up", "a spike of the loss without recovery"),
        )
    ]

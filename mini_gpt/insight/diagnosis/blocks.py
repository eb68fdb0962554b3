"""Checks of the blocks: activations, attention and feed-forward units."""

import math
from typing import NamedTuple

import numpy as np

from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight.diagnosis.result import CheckResult

# Limits. A check finds a problem if its value is past the limit, or NaN.
LARGE = 1e3  # root mean square of the residual stream
KEPT = 0.1  # cosine between a block's input and output
SATURATED, EVEN = 0.02, 0.98  # a layer's mean attention entropy / entropy of uniform attention
DEAD_UNITS = 0.1  # share of a layer's units

DEAD_DEVIATION = 1e-3  # largest standard deviation of a dead unit / median of its layer


class Layer(NamedTuple):
    """Statistics of one block, one entry per row of the batch; float32."""

    entropy_B: np.ndarray  # of attention / log(number of visible keys); mean over heads and queries
    logits_B: np.ndarray  # standard deviation of the attention logits over visible pairs
    after_B: np.ndarray  # root mean square of the residual stream after the block
    kept_B: np.ndarray  # cosine between the stream before and after the block; mean over tokens
    units_BF: np.ndarray  # mean of each feed-forward unit
    squares_BF: np.ndarray  # mean square of each feed-forward unit


def check(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Return the results of all checks of the blocks."""
    return [*stream(model, layers), *attention(model, layers), dead_units(layers)]


def stream(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Check the size of activations, and how the blocks change the residual stream."""
    largest = float(np.max([layer.after_B.max() for layer in layers]))
    scale = f"The residual stream's root mean square is at most {largest:.3g}."
    kept = float(np.mean([layer.kept_B.mean() for layer in layers]))
    cosine = f"The mean cosine between a block's input and output is {kept:.2f}."
    replaced = not kept >= KEPT and not model.config.model.residual  # a sound model of few layers may have a low cosine
    return [
        CheckResult("activations", largest, f"below {LARGE:g}", not largest < LARGE, scale),
        CheckResult("residual", kept, f"at least {KEPT} if model.residual=False", replaced, cosine),
    ]


def attention(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Check the scale of the attention logits and the entropy of the weights."""
    config = model.config.model
    root = math.sqrt(config.scale_width)
    factor = 1.0 if config.scale_attention else root
    says = (
        f"The attention logits are {factor:.2f} times QKᵀ/√d_k, with d_k = {config.scale_width:g}. Without the scale "
        f"1/√d_k, this factor is √d_k = {root:.2f}. Standard deviation of the logits by layer: "
        f"{_listed([float(layer.logits_B.mean()) for layer in layers])}."
    )
    scale = CheckResult("scale of logits", factor, "1", not config.scale_attention, says)
    defined = [layer.entropy_B[np.isfinite(layer.entropy_B)] for layer in layers]
    if not all(map(len, defined)):
        return [scale]  # no query sees two keys, or weights are non-finite
    entropies = [float(entropy_B.mean()) for entropy_B in defined]
    lowest, even = min(entropies), sum(entropy > EVEN for entropy in entropies)
    by_layer = f"Attention entropy by layer, divided by that of uniform attention: {_listed(entropies)}."
    evenly = f"{even} of {len(entropies)} layers have nearly uniform attention over the visible tokens."
    return [
        CheckResult("saturated attention", lowest, f"at least {SATURATED}", not lowest >= SATURATED, by_layer),
        CheckResult("even attention", lowest, f"at most {EVEN} in at least one layer", even == len(entropies), evenly),
        scale,
    ]


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def dead_units(layers: list[Layer]) -> CheckResult:
    """Check for feed-forward units that do not vary with the input."""
    shares = [float(np.mean(_is_dead_F(layer))) for layer in layers]
    worst = int(np.argmax(shares))
    says = f"Feed-forward units that do not vary with the input: at most {shares[worst]:.1%}, in layer {worst}."
    return CheckResult("dead units", shares[worst], f"at most {DEAD_UNITS}", not shares[worst] <= DEAD_UNITS, says)


def _is_dead_F(layer: Layer) -> np.ndarray:
    mean_F, square_F = (values_BF.mean(axis=0, dtype=np.float64) for values_BF in (layer.units_BF, layer.squares_BF))
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 0))
    return deviation_F <= DEAD_DEVIATION * np.median(deviation_F)

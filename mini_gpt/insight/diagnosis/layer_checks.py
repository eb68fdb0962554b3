"""Checks of a model's layers: non-finite values, the residual stream, attention, heads and feed-forward units."""

import math
from typing import NamedTuple

import numpy as np

from mini_gpt.config.schema import ModelConfig
from mini_gpt.insight.diagnosis.finding import Finding

# Limits. A value past its limit is a finding.
LARGE = 1e3  # root mean square of the residual stream
KEPT = 0.1  # cosine of a block's input and output
SATURATED, EVEN = 0.02, 0.98  # entropy over that of even attention, mean of a layer
DEAD_HEAD = 0.01  # importance over the mean importance
DEAD_UNITS = 0.1  # share of a layer's units

STILL = 1e-3  # a unit with this share of the median deviation in its layer, or less, is dead


class Layer(NamedTuple):
    """Statistics of one block, one entry per row of the batch; float32."""

    entropy_B: np.ndarray  # of attention over the log of the visible keys; mean over heads and queries
    logits_B: np.ndarray  # standard deviation over the visible pairs
    before_B: np.ndarray  # root mean square of the residual stream
    after_B: np.ndarray
    kept_B: np.ndarray  # cosine of a token's stream before and after the block; mean over tokens
    units_BF: np.ndarray  # mean of each feed-forward unit
    squares_BF: np.ndarray  # mean square of each feed-forward unit


def stream(config: ModelConfig, layers: list[Layer], bad: int) -> list[Finding]:
    """Check for non-finite values, and how the blocks change the residual stream. bad: non-finite parameters."""
    # The entropy is left out: it is NaN where no query sees two keys.
    finite = bad == 0 and all(np.isfinite(value).all() for layer in layers for value in layer[1:])
    largest = max(float(layer.after_B.max()) for layer in layers)
    kept = float(np.mean([layer.kept_B.mean() for layer in layers]))
    grown = [float(layer.after_B.mean() / layer.before_B.mean()) for layer in layers]
    return [
        Finding(
            "finite",
            float(bad),
            "0 non-finite parameters, and finite activations",
            not finite,
            f"{bad} parameters are non-finite" + ("." if finite else ", or activations are."),
            (
                "a training step with non-finite gradients",
                "optimizer.learning_rate far too high",
                "weights from another source",
            ),
        ),
        Finding(
            "activations",
            largest,
            f"below {LARGE:g}",
            not largest < LARGE,
            f"The residual stream's root mean square is at most {largest:.3g}; a block changes it by factors of "
            f"{min(grown):.2f} to {max(grown):.2f}.",
            ("optimizer.learning_rate far too high", "no warm-up", "no gradient clipping"),
        ),
        Finding(
            "residual",
            kept,
            f"at least {KEPT}",
            not kept >= KEPT and not config.residual,  # with few layers, blocks may outweigh the stream
            f"The output of a block has a cosine of {kept:.2f} with its input.",
            ("model.residual=False: blocks replace the residual stream instead of adding to it",),
        ),
    ]


def attention(config: ModelConfig, layers: list[Layer]) -> list[Finding]:
    """Check the scale of the attention logits and the entropy of the weights."""
    root = math.sqrt(config.head_width)
    factor = 1.0 if config.scale_attention else root
    deviations = ", ".join(f"{float(layer.logits_B.mean()):.2f}" for layer in layers)
    scale = Finding(
        "scale of logits",
        factor,
        "1",
        not config.scale_attention,
        f"Attention logits are {factor:.2f} times those with the scale 1/√d_k, d_k = {config.head_width} (without it "
        f"{root:.2f}, and more for wider heads); their standard deviation by layer: {deviations}.",
        ("model.scale_attention=False",),
    )
    defined = [layer.entropy_B[np.isfinite(layer.entropy_B)] for layer in layers]
    if not all(map(len, defined)):
        return [scale]  # no query sees two keys, or weights are non-finite
    entropies = [float(entropy_B.mean()) for entropy_B in defined]
    even = sum(entropy > EVEN for entropy in entropies)
    listed = ", ".join(f"{entropy:.2f}" for entropy in entropies)
    return [
        Finding(
            "saturated attention",
            min(entropies),
            f"at least {SATURATED}",
            not min(entropies) >= SATURATED,
            f"Entropy of the attention by layer, over that of even attention: {listed}.",
            ("optimizer.learning_rate far too high", "weights of queries and keys too large", "no scale of 1/√d_k"),
        ),
        Finding(
            "even attention",
            min(entropies),
            f"not above {EVEN} in all layers",
            even == len(entropies),
            f"{even} of {len(entropies)} layers attend evenly to all visible tokens.",
            ("hardly trained", "optimizer.learning_rate far too low", "gradients that do not reach queries and keys"),
        ),
        scale,
    ]


def dead(layers: list[Layer], importance_NH: np.ndarray) -> list[Finding]:
    """Check for heads without effect on the loss, and for feed-forward units that never vary."""
    relative_NH = importance_NH / max(importance_NH.mean(), 1e-30)
    dead_heads = [f"{layer}.{head}" for layer, head in np.argwhere(~(relative_NH >= DEAD_HEAD))]
    dead_units = max(_dead_units(layer) for layer in layers)
    return [
        Finding(
            "dead heads",
            float(relative_NH.min()),
            f"at least {DEAD_HEAD} of the mean",
            bool(dead_heads),
            f"The least important head has {relative_NH.min():.2f} of the mean importance"
            + (f"; without effect: {', '.join(dead_heads)}." if dead_heads else "."),
            ("heads that the model does not need: see --suite=pruning", "optimizer.learning_rate far too high"),
        ),
        Finding(
            "dead units",
            dead_units,
            f"at most {DEAD_UNITS}",
            not dead_units <= DEAD_UNITS,
            f"At most {dead_units:.1%} of a layer's feed-forward units do not vary with the input.",
            ("optimizer.learning_rate far too high with ReLU", "a layer that gets no gradient"),
        ),
    ]


def _dead_units(layer: Layer) -> float:
    """Return the share of a layer's units that do not vary."""
    mean_F, square_F = (values_BF.mean(axis=0, dtype=np.float64) for values_BF in (layer.units_BF, layer.squares_BF))
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 0))
    return float(np.mean(deviation_F <= STILL * np.median(deviation_F)))

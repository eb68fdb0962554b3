"""Checks of the blocks: activations, attention and feed-forward units."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.diagnosis.result import CheckResult
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.model.parameters import Parameters

# Limits. A check finds a problem if its value is past the limit. For NaN, the check "finite" names the cause.
LARGE = 1e3  # root mean square of the residual stream
KEPT = 0.1  # cosine between a block's input and output
SATURATED, EVEN = 0.02, 0.98  # a layer's mean attention entropy / entropy of uniform attention
DEAD_UNITS = 0.1  # share of a layer's units

DEAD_DEVIATION = 1e-3  # largest standard deviation of a dead unit / median of its layer


class Layer(NamedTuple):
    """Statistics of one block, one entry per row of the batch; float32."""

    entropy_B: np.ndarray  # of attention / log(number of visible keys); mean over heads and queries
    logits_B: np.ndarray  # standard deviation of the attention logits over visible pairs
    before_B: np.ndarray  # root mean square of the residual stream before the block
    after_B: np.ndarray  # the same after the block
    kept_B: np.ndarray  # cosine between the stream before and after the block; mean over tokens
    units_BF: np.ndarray  # mean of each feed-forward unit
    squares_BF: np.ndarray  # mean square of each feed-forward unit


def stream(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Check for non-finite values, and how the blocks change the residual stream."""
    bad = int(count_non_finite(model.parameters))
    # layer[1:] omits the entropy, which is NaN if no query sees two keys.
    finite = bad == 0 and all(np.isfinite(value).all() for layer in layers for value in layer[1:])
    non_finite = f"Non-finite parameters: {bad}" + ("." if finite or bad else "; an activation is non-finite.")
    largest = max(float(layer.after_B.max()) for layer in layers)
    grown = [float(layer.after_B.mean() / layer.before_B.mean()) for layer in layers]
    scale = (
        f"The residual stream's root mean square is at most {largest:.3g}; a block changes it by factors from "
        f"{min(grown):.2f} to {max(grown):.2f}."
    )
    kept = float(np.mean([layer.kept_B.mean() for layer in layers]))
    cosine = f"The mean cosine between a block's input and output is {kept:.2f}."
    replaced = not kept >= KEPT and not model.config.model.residual  # a sound model of few layers may have a low cosine
    return [
        CheckResult("finite", float(bad), "0 non-finite parameters, and finite activations", not finite, non_finite),
        CheckResult("activations", largest, f"below {LARGE:g}", not largest < LARGE, scale),
        CheckResult("residual", kept, f"at least {KEPT}", replaced, cosine),
    ]


def attention(model: LoadedModel, layers: list[Layer]) -> list[CheckResult]:
    """Check the scale of the attention logits and the entropy of the weights."""
    config, listed = model.config.model, lambda values: ", ".join(f"{value:.2f}" for value in values)
    root = math.sqrt(config.scale_width)
    factor = 1.0 if config.scale_attention else root
    says = (
        f"The attention logits are {factor:.2f} times QKᵀ/√d_k, with d_k = {config.scale_width:g}. Without the scale "
        f"1/√d_k, this factor is √d_k = {root:.2f}. Standard deviation of the logits by layer: "
        f"{listed(float(layer.logits_B.mean()) for layer in layers)}."
    )
    scale = CheckResult("scale of logits", factor, "1", not config.scale_attention, says)
    defined = [layer.entropy_B[np.isfinite(layer.entropy_B)] for layer in layers]
    if not all(map(len, defined)):
        return [scale]  # no query sees two keys, or weights are non-finite
    entropies = [float(entropy_B.mean()) for entropy_B in defined]
    lowest, even = min(entropies), sum(entropy > EVEN for entropy in entropies)
    by_layer = f"Attention entropy by layer, divided by that of uniform attention: {listed(entropies)}."
    evenly = f"{even} of {len(entropies)} layers have nearly uniform attention over the visible tokens."
    return [
        CheckResult("saturated attention", lowest, f"at least {SATURATED}", not lowest >= SATURATED, by_layer),
        CheckResult("even attention", lowest, f"at most {EVEN} in at least one layer", even == len(entropies), evenly),
        scale,
    ]


def dead_units(layers: list[Layer]) -> CheckResult:
    """Check for feed-forward units that do not vary with the input."""
    units = max(map(_dead_units, layers))
    still = f"Feed-forward units that do not vary with the input: at most {units:.1%} of a layer's units."
    return CheckResult("dead units", units, f"at most {DEAD_UNITS}", not units <= DEAD_UNITS, still)


def _dead_units(layer: Layer) -> float:
    """Return the share of a layer's units that do not vary."""
    mean_F, square_F = (values_BF.mean(axis=0, dtype=np.float64) for values_BF in (layer.units_BF, layer.squares_BF))
    deviation_F = np.sqrt(np.maximum(square_F - mean_F**2, 0))
    return float(np.mean(deviation_F <= DEAD_DEVIATION * np.median(deviation_F)))


@jax.jit
def count_non_finite(parameters: Parameters) -> jax.Array:
    """Return the number of parameters that are NaN or infinite."""
    return jnp.stack([jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(parameters)]).sum()

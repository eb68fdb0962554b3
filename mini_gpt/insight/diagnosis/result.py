"""The result of a check, and the likely causes of what the checks find."""

from collections.abc import Sequence
from dataclasses import dataclass

# Limits for losses
SAME = 0.02  # largest difference from the loss recorded at this step: share of it, or nats if that is more
REGAINED = 0.6  # share of the difference from the recorded loss that a cause of it must explain

HIGH_RATE = "optimizer.learning_rate far too high"

# Possible causes of each finding, the most likely first. A finding explains the findings listed after it.
CAUSES = {
    "finite": ("a training step with non-finite gradients", HIGH_RATE, "imported weights that were non-finite"),
    "causality": ("no causal mask, so that the model reads the token it must predict",),
    "cross-attention": ("a causal mask or a window in cross-attention, which must see the whole source",),
    "source padding": ("padding of the source that is visible, in the encoder or in cross-attention",),
    "encoder direction": ("a causal mask in the encoder, which must read in both directions",),
    "definition": ("an override, an edited config.json, or an import that arranged the weights wrongly",),
    "zero weights": ("pruned units or heads, or an import that left out weights",),
    "untrained weights": ("weights that were not loaded, or a layer without gradients",),
    "scale of logits": ("model.scale_attention=False; only T5 is trained without the scale on purpose",),
    "residual": ("model.residual=False: blocks replace the residual stream instead of adding to it",),
    "activations": (HIGH_RATE, "no warm-up", "no gradient clipping"),
    "saturated attention": (HIGH_RATE, "weights of queries and keys too large", "no scale of 1/√d_k"),
    "vocabulary": ("embeddings in another order than the tokens: permuted rows, or another tokenizer",),
    "overfitting": ("overfitting: more steps than the training text supports; take --checkpoint=best",),
    "temperature": (
        "logits at a wrong scale: the final norm or the output embedding",
        "a model that is overfit",
        "hardly trained: logits are small early in training",
    ),
    "dead units": (f"{HIGH_RATE} with ReLU", "a layer without gradients"),
    "order": (
        "model.position=none in a bidirectional model, or in a causal one of a single layer",
        "positions that do not reach the logits",
        "a model that learned only token frequencies: see predictions",
    ),
    "predictions": (
        f"hardly trained, or {HIGH_RATE} or too low",
        "model.residual=False, or gradients that do not reach all layers",
        "a bidirectional model without positions",
    ),
    "recorded loss": (
        "weights or fields that changed after training: another run's checkpoint, an override, an edited config.json",
        "eval.tokens or the text changed after this step",
    ),
    "loss": (
        f"{HIGH_RATE}, or hardly trained",
        "model.residual=False",
        "data that differ from the training data",
        "targets that are not shifted by one, or a label that leaked in training",
        "weights that were imported wrongly",
    ),
    "first positions": ("text that repeats itself", "a label that leaks into later positions: see causality"),
    "even attention": (
        "hardly trained",
        "optimizer.learning_rate far too low",
        "gradients that do not reach queries and keys",
    ),
    "dead heads": ("heads that the model does not need: see --suite=pruning", HIGH_RATE),
    "training": (HIGH_RATE, "a warm-up that is too short", "a spike of the loss without recovery"),
}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    found: whether the value is past its limit. says: the value in a sentence. cause: the likeliest cause, if known.
    """

    check: str
    value: float
    limit: str
    found: bool
    says: str
    cause: str | None = None

    @property
    def causes(self) -> tuple[str, ...]:
        return (() if self.cause is None else (self.cause,)) + CAUSES[self.check]


def most_likely(results: Sequence[CheckResult]) -> str | None:
    """Return the first cause of the finding that explains the others, or None if nothing was found."""
    found = {result.check: result for result in results if result.found}
    return next((found[check].causes[0] for check in CAUSES if check in found), None)

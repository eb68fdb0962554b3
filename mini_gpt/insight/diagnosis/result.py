"""The result of a check, and possible causes of what the checks find."""

from collections.abc import Iterable
from dataclasses import dataclass

HIGH_RATE = "optimizer.learning_rate far too high"
HARDLY_TRAINED = "hardly trained"

# Possible causes of each finding. A finding may explain the findings that are listed after it.
CAUSES = {
    "finite": ("a training step with non-finite gradients", "imported weights that were non-finite"),
    "causality": ("no causal mask, so that the model reads the token it must predict",),
    "documents": ("no mask between documents",),
    "cross-attention": ("a causal mask or a window in cross-attention, which must see the whole source",),
    "source padding": ("padding of the source that is visible, in the encoder or in cross-attention",),
    "encoder direction": ("a causal mask in the encoder, which must read in both directions",),
    "zero weights": ("pruned units or heads", "an import that left out weights"),
    "untrained weights": ("weights that were not loaded",),
    "scale of logits": ("model.scale_attention=False; only T5 is trained without the scale on purpose",),
    "residual": ("model.residual=False: blocks replace the residual stream instead of adding to it",),
    "activations": (HIGH_RATE, "weights that are far too large"),
    "saturated attention": (HIGH_RATE, "weights of queries and keys that are far too large"),
    "trained scale": ("no scale 1/√d_k in training, or 1/√d_model, or 1/d_k",),
    "trained mask": ("no causal mask in training, or a mask after the softmax",),
    "trained order": ("positions that training ignored, or counted from the end",),
    "trained targets": ("training on the token itself, or on the one after the next: targets shifted twice",),
    "trained base": ("another model.rope.base in training",),
    "trained norm": ("a norm that the code of training left out",),
    "recorded loss": (
        "fields that changed after training: an override, an edited config.json",
        "weights that changed after training, or weights of another run",
        "a text or eval.tokens that changed after this step",
    ),
    "overfitting": ("more steps than the training text supports; take --checkpoint=best",),
    "order": ("model.position=none in a bidirectional model, or in a causal one of a single layer",),
    "positions": ("positions that training shuffled", "a text that needs no positions"),
    "predictions": (HARDLY_TRAINED, HIGH_RATE, "a bidirectional model without positions"),
    "loss": (HARDLY_TRAINED, HIGH_RATE, "text unlike the training text", "an import that arranged the weights wrongly"),
    "even attention": (HARDLY_TRAINED, "queries or keys that are nearly 0"),
    "dead units": ("weights or biases that keep ReLU units at 0", "pruned units"),
    "dead heads": ("pruned heads", "heads that the model does not need: see --suite=pruning"),
    "training": (HIGH_RATE, "a warm-up that is too short"),
}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    found: whether the value is past its limit.
    says: what was measured, in sentences.
    error: the standard error of the value over texts, if it is known.
    """

    check: str
    value: float
    limit: str
    found: bool
    says: str
    error: float | None = None

    @property
    def causes(self) -> tuple[str, ...]:
        return CAUSES[self.check] if self.found else ()


def in_order(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the results in the order of CAUSES."""
    return sorted(results, key=lambda result: [*CAUSES].index(result.check))


def listed(names: list[str], most: int = 4) -> str:
    """Return the first names in a line, and how many more there are; "none" without names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"

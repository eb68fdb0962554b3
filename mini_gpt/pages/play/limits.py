"""The limits of a model's edits. The page checks edits by them, and its controls offer what they allow."""

import math
from typing import Any

from mini_gpt.config.attention import beta_fast
from mini_gpt.config.model import ModelConfig

SCALINGS = {  # {a scaling of RoPE: the fields that an edit to it sets}
    name: {"beta_slow": 1.0, "beta_fast": beta_fast({"model.rope.scaling": name}), "attention_factor": None}
    for name in ("none", "linear", "ntk", "dynamic", "yarn", "yarn_by_index", "yarn_unrounded", "llama3")
}
MOST_START = 2**24 - 1
BOUNDS = {  # the smallest and the largest value of an edit
    "temperature": (1e-3, 1e6),
    "start": (0, MOST_START),
    "base": (math.nextafter(1, 2), 1e12),
    "factor": (1, 1e6),
    "slope": (-1e12, 1e12),
}


def refused(config: ModelConfig) -> dict[str, dict[str, str]]:
    """Return the masks and the scalings of RoPE that a model can't have: {"mask" or "scaling": {value: sentence}}."""
    ordered: list[str] = [name for name, encoding in config.encodings.items() if encoding.causal_only]
    ordered += ["selective attention"] if config.variants.selective else []
    ordered += ["stick-breaking"] if config.variants.normaliser == "stick_breaking" else []
    masks, scalings = {}, {}
    if config.variants.query_scale == "ssmax":
        masks["shifted"] = "The mask can't be shifted: ssmax counts the keys that a query sees."
    if ordered:
        reason = f"The mask can't be changed: {ordered[0]} is only defined with a causal mask."
        masks = {"shifted": reason, "none": reason}
    if config.rotated_width <= 2:
        reason = "needs more than one pair of rotated dimensions."
        scalings = {name: f"RoPE's scaling {name} {reason}" for name in ("ntk", "dynamic")}
    return {"mask": masks, "scaling": scalings}


def described(config: ModelConfig) -> dict[str, Any]:
    """Return the limits of a model's edits as JSON values."""
    return {"bounds": BOUNDS, "scalings": SCALINGS, "refused": refused(config)}

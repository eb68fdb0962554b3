"""How much memory a pass through a model takes, and so how many rows of tokens a batch may have.

The estimates are for XLA on CPUs, and rather too high. A test compares them with the compiler's own numbers.
"""

from typing import Literal

from mini_gpt.config.model import ModelConfig

BUDGET = 2**31  # bytes for one batch on one device, besides the parameters
FLOAT = 4  # bytes
# Arrays of a layer that are in memory together, of widths d_model and d_ff. A backward pass keeps all of them.
OF_LAYER, KEPT_BY_LAYER = (16, 8), (14, 5)
MAPS = 12, 40  # arrays of length² entries for each head, and for all heads, while maps are measured (suite heads)
REFERENCE_MAPS = 3  # the same for attention that has all logits in memory

# What a pass returns or keeps: the loss of each token, all logits, the logits of several depths (the logit lens), each
# layer's attention maps, or gradients.
Kept = Literal["losses", "logits", "depths", "maps", "gradients"]
LOGITS = {"logits": 1, "depths": 5}  # arrays with an entry for each token and word of the vocabulary


def of_row(config: ModelConfig, vocab_size: int, length: int, kept: Kept) -> int:
    """Return about how many bytes a pass takes for each row of `length` tokens."""
    wide, ff = max(config.d_model, config.attention_width), config.d_ff * (2 if config.gated else 1)
    of_layer, kept_by_layer = (FLOAT * length * (a * wide + b * ff) for a, b in (OF_LAYER, KEPT_BY_LAYER))
    maps = FLOAT * config.num_heads * length**2
    reference = REFERENCE_MAPS * maps if _needs_reference(config) else 0
    if kept == "gradients":
        return (config.num_layers + config.encoder_layers) * (kept_by_layer + reference)
    if kept == "maps":
        return of_layer + FLOAT * length**2 * (MAPS[0] * config.num_heads + MAPS[1])
    return of_layer + reference + LOGITS.get(kept, 0) * FLOAT * length * vocab_size


def rows_in_budget(config: ModelConfig, vocab_size: int, length: int, kept: Kept) -> int:
    """Return the number of rows that fit in BUDGET, at least 1."""
    return max(1, BUDGET // of_row(config, vocab_size, length, kept))


def _needs_reference(config: ModelConfig) -> bool:
    """Return whether attention has all logits of a layer in memory at any length."""
    by_variant = config.variants.selective or config.variants.normaliser == "stick_breaking"
    by_encoding = any(encoding.needs_all_keys for encoding in config.encodings.values())
    return config.attention == "reference" or by_encoding or by_variant

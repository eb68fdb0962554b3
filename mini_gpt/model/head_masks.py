"""Masks of attention heads: which layers they have, and their parts for the three kinds of attention."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mini_gpt.config.model import ModelConfig


def layers(config: ModelConfig) -> list[tuple[str, int]]:
    """Return (kind, layer) of each entry of axis N of a head mask.

    Kinds: encoder, decoder and cross (attention of the decoder to the encoder); without an encoder, only decoder.
    """
    kinds = [("encoder", config.encoder_layers), ("decoder", config.num_layers)]
    kinds += [("cross", config.num_layers)] if config.encoder_layers else []
    return [(kind, layer) for kind, count in kinds for layer in range(count)]


def by_kind(config: ModelConfig, head_mask_NBH: jax.Array | None) -> Sequence[jax.Array | None]:
    """Return the parts of a head mask for encoder, decoder and cross-attention; None for a part that does not exist."""
    if head_mask_NBH is None or not config.encoder_layers:
        return [None, head_mask_NBH, None]
    return jnp.split(head_mask_NBH, [config.encoder_layers, config.encoder_layers + config.num_layers])

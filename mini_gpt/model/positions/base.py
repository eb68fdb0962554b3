"""The hooks of a positional encoding. By default, a hook changes nothing."""

import jax
from flax import nnx

from mini_gpt.config.model import ModelConfig


class Position(nnx.Module):
    """No encoding: the causal mask is the only source of order (Haviv et al. 2022)."""

    name = "none"  # the value of model.position
    per_layer = False  # whether each layer has parameters of its own; else, layers share one module

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del config, rngs

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return the input x_BLD with positions added; called once, before the first block."""
        return x_BLD

    def rotate(self, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return queries or keys rotated by their positions, in their dtype."""
        return x_BLHK

    def rotate_keys(self, k_BLGK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return keys rotated by their positions; by default as queries."""
        return self.rotate(k_BLGK, positions_BL)

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array | None:
        """Return the bias_BHLS of the attention logits in float32, or None."""
        return None

    def log_gates(self, x_BLD: jax.Array) -> jax.Array | None:
        """Return log_BLH, float32, or None. A logit gets the sum over the tokens after the key, up to the query."""
        return None

    def contextual_table(self) -> jax.Array | None:
        """Return CoPE's table_PK or None."""
        return None

"""The kinds of positional encodings, by the place where they act. Each encoding is a class of one kind."""

from typing import Any

import jax
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import HeadChange, ScoreMod


class Encoding(nnx.Module):
    """No encoding: the causal mask is the only source of order (Haviv et al. 2022).

    name: the value of `model.position`.
    shared: whether all layers share one module, because it has parameters that are those of all layers.
    """

    name = "none"
    shared = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del config, rngs


class InputEncoding(Encoding):
    """Acts once, on the embeddings of the tokens."""

    shared = True

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return the embeddings x_BLD with positions added."""
        raise NotImplementedError


class Rotation(Encoding, HeadChange):
    """Changes queries and keys by their positions, in each layer."""

    def rotate(self, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return queries or keys rotated by their positions, in their dtype."""
        raise NotImplementedError

    def rotate_keys(self, k_BSGK: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """Return keys rotated by their positions; by default as queries."""
        return self.rotate(k_BSGK, positions_BS)

    def __call__(self, q_BLHK: jax.Array, k_BSGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        rotated_BLHK = self.rotate(q_BLHK, context.queries.positions_BL)
        return rotated_BLHK, self.rotate_keys(k_BSGK, context.keys.positions_BL)


class Bias(Encoding, ScoreMod):
    """Adds to the logits of attention a bias that depends on the positions of query and key, in each layer."""

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        """Return the bias_BHLS of the logits, float32."""
        raise NotImplementedError

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        return logits_BHLS + self.bias(context.queries.positions_BL, context.keys.positions_BL)


class Shared(nnx.Module):
    """Stands in a layer for an encoding that the model holds and all layers share. key: in `Context.shared`."""

    whole_rows = None

    def __init__(self, key: str, stage: str):
        self.key, self.stage = key, stage

    def __call__(self, *arguments: Any) -> Any:
        *_, context = arguments
        return context.shared[self.key](*arguments)

"""Rotary positions."""

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.positions.base import Position
from mini_gpt.model.positions.waves import angles, rope_frequencies, yarn_scale


class Rope(Position):
    """Queries and keys rotated by position, so that <R(m)q, R(n)k> = qᵀR(n-m)k (Su et al. 2021, 3.2).

    The layout is half-split (GPT-NeoX, Llama): dimension i is paired with i + width/2. Checkpoints with interleaved
    pairs (RoFormer) need a permutation. `model.rope.scaling` and `model.rope.turning` change the frequencies; yarn also
    scales the logits.
    """

    name = "rope"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.width = config.rotated_width
        self.frequencies = tuple(map(float, rope_frequencies(config.rope, self.width)))
        self.temperature = yarn_scale(config.rope.factor) if config.rope.scaling == "yarn" else 1.0

    def rotate(self, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        dtype = x_BLHK.dtype
        if self.temperature != 1.0:
            x_BLHK = self.temperature * x_BLHK.astype(jnp.float32)
        angles_BL1P = angles(positions_BL, self.frequencies)[:, :, None, :]
        cos, sin = jnp.cos(angles_BL1P), jnp.sin(angles_BL1P)
        first, second, rest = jnp.split(x_BLHK, [self.width // 2, self.width], axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin, rest]
        return jnp.concatenate([part.astype(dtype) for part in parts], axis=-1)

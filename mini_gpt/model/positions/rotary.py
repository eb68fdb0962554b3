"""Rotary positions."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.attention import pattern
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import HeadChange
from mini_gpt.model.positions.base import Encoding
from mini_gpt.model.positions.waves import (
    angles,
    dynamic_frequencies,
    geometric_frequencies,
    rope_frequencies,
    yarn_scale,
)
from mini_gpt.model.xla_workarounds import unfused


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


class Rope(Rotation):
    """Queries and keys rotated by position, so that <R(m)q, R(n)k> = qᵀR(n-m)k (Su et al. 2021, 3.2).

    The layout is half-split (GPT-NeoX, Llama): dimension i is paired with i + width/2. Checkpoints with interleaved
    pairs (RoFormer) need a permutation. `model.rope.scaling` and `model.rope.turning` change the frequencies; all
    forms of yarn also scale the logits.
    """

    name = "rope"
    uses_rope = True
    in_cross = True

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        rope, width = config.rope, config.rotated_width
        if rope.scaling == "dynamic" and isinstance(rope.factor, tuple):
            config.refuse("rope.factor", "must be one number with model.rope.scaling=dynamic")
        if rope.scaling not in ("none", "dynamic") and max(pattern(rope.factor)) == 1:
            config.refuse("rope.factor", f"model.rope.scaling={rope.scaling} changes nothing with it; raise it")
        if rope.scaling in ("ntk", "dynamic") and width <= 2:
            config.refuse("rope.scaling", f"needs more than one pair of dimensions, but {width} dimensions are rotated")
        if width == 0 or width % 2:
            fields = f"model.num_heads={config.num_heads} and model.rope.fraction={rope.fraction}"
            count = f"{fields} give {width} of {config.head_width} per head"
            name = "d_model" if config.attention_width == config.d_model else "head_width"
            config.refuse(name, f"rope needs an even number of rotated dimensions, at least 2; {count}")
        if int(rope.turning * width / 2) == 0:
            config.refuse("rope.turning", f"none of the {width // 2} pairs of dimensions would turn; raise it")

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.width, self.config = config.rotated_width, config.rope
        self.frequencies = tuple(map(float, rope_frequencies(config.rope, self.width)))
        assert isinstance(config.rope.factor, float)
        self.factor = config.rope.factor
        scale = config.rope.attention_factor or yarn_scale(self.factor)
        self.temperature = scale if config.rope.scaling.startswith("yarn") else 1.0

    def rotate(self, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        dtype = x_BLHK.dtype
        if self.config.scaling.startswith("yarn"):
            x_BLHK = self.temperature * x_BLHK.astype(jnp.float32)
        frequencies: Sequence[float] | jax.Array = self.frequencies
        if self.config.scaling == "dynamic":
            lengths_B = positions_BL.max(axis=1) - positions_BL.min(axis=1) + 1
            assert self.config.original_context is not None
            turned = frequencies, self.factor, self.config.original_context
            frequencies = dynamic_frequencies(*turned, lengths_B)[:, None]
        angles_BL1P = angles(positions_BL, frequencies)[:, :, None, :]
        return rotated(x_BLHK, unfused(jnp.cos, angles_BL1P), unfused(jnp.sin, angles_BL1P), self.width).astype(dtype)


def rotated(x_BLHK: jax.Array, cos: jax.Array, sin: jax.Array, width: int) -> jax.Array:
    """Return queries or keys with dimensions i and i + width/2 rotated, in their dtype. cos, sin: [B, L, H or 1, P]."""
    first, second, rest = jnp.split(x_BLHK, [width // 2, width], axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate([part.astype(x_BLHK.dtype) for part in parts], axis=-1)


class Pope(Rotation):
    """Polar positions: logits are Σ_c softplus(q_c) softplus(k_c) cos((j - i) θ_c + δ_c) (Gopalakrishnan et al. 2025).

    Each of the K dimensions has a frequency, so queries and keys become 2K wide. δ is trained for each key-value head
    and dimension. The code of x-transformers clamps it to [-2π, 0]. The cosine is periodic, so no bound is needed here.
    """

    name = "pope"
    uses_rope = True
    shared = True

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        config.check_needs("position", {"heads": None})
        if isinstance(config.rope.base, tuple):
            config.refuse("rope.base", "must be one number with pope, whose layers share one module")
        if "rope" not in config.position_pattern:  # the other fields of rope are not for pope
            config.check_needs("position", {"rope.fraction": 1, "rope.turning": 1, "rope.scaling": "none"})

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del rngs
        assert isinstance(config.rope.base, float)
        self.frequencies = tuple(map(float, geometric_frequencies(config.rope.base, 2 * config.head_width)))
        self.phases = nnx.Param(jnp.zeros((config.num_kv_heads, config.head_width), jnp.float32))

    def rotate(self, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        return _polar(x_BLHK, angles(positions_BL, self.frequencies)[:, :, None])

    def rotate_keys(self, k_BLGK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        return _polar(k_BLGK, angles(positions_BL, self.frequencies)[:, :, None] + self.phases[...])


def _polar(x_BLHK: jax.Array, angles_BLHK: jax.Array) -> jax.Array:
    """Return complex numbers with moduli softplus(x), as real parts and then imaginary parts."""
    moduli_BLHK = jax.nn.softplus(x_BLHK.astype(jnp.float32))
    parts = [moduli_BLHK * jnp.cos(angles_BLHK), moduli_BLHK * jnp.sin(angles_BLHK)]
    return jnp.concatenate(parts, axis=-1).astype(x_BLHK.dtype)

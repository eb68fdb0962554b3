"""Positional encodings; each overrides some of the base class's three hooks. By default, a hook changes nothing.

Hooks accept any positions, so that packing, offsets and the KV cache share code. Angles and biases are in float32.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.schema import ModelConfig, RopeConfig
from mini_gpt.model.layers import INIT_STD


class Position(nnx.Module):
    """No encoding: the causal mask is the only source of order (Haviv et al. 2022)."""

    name: str  # the value of model.position

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del config, rngs

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return the input x_BLD with positions added; called once, before the first block."""
        return x_BLD

    def rotate(self, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Return queries or keys rotated by their positions, in their dtype."""
        return x_BLHK

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array | None:
        """Return the bias_BHLS of the attention logits in float32, or None."""
        return None


class Learned(Position):
    """A trained vector for each position (Gehring et al. 2017), initialized like token embeddings."""

    name = "learned"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        shape = (config.max_positions, config.d_model)
        self.embedding = nnx.Param(nnx.initializers.normal(embedding_std(config))(rngs.params(), shape, jnp.float32))

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        return x_BLD + self.embedding[positions_BL]


class Sinusoidal(Position):
    """Sines and cosines; wavelengths grow geometrically from 2π to nearly 2π·base (Vaswani et al. 2017, 3.5).

    Dimension 2i is sin(p / base^(2i/D)), dimension 2i+1 the cosine. `model.sinusoidal.amplitude` is
    relative to the initial standard deviation of token embeddings; 1 is the scale of the paper.
    """

    name = "sinusoidal"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.base = config.sinusoidal.base
        self.amplitude = config.sinusoidal.amplitude * embedding_std(config)

    def embed(self, x_BLD: jax.Array, positions_BL: jax.Array) -> jax.Array:
        angles_BLP = _angles(positions_BL, geometric_frequencies(self.base, x_BLD.shape[-1]))
        waves_BLP2 = jnp.stack([jnp.sin(angles_BLP), jnp.cos(angles_BLP)], axis=-1)
        waves_BLD = (self.amplitude * waves_BLP2).reshape(*positions_BL.shape, -1)[..., : x_BLD.shape[-1]]
        return x_BLD + waves_BLD.astype(x_BLD.dtype)


class Rope(Position):
    """Queries and keys rotated by position, so that <R(m)q, R(n)k> = qᵀR(n-m)k (Su et al. 2021, 3.2).

    The layout is half-split (GPT-NeoX, Llama): dimension i is paired with i + width/2. Checkpoints with interleaved
    pairs (RoFormer) need a permutation. `model.rope.scaling` changes the frequencies; yarn also scales the logits.
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
        angles_BL1P = _angles(positions_BL, self.frequencies)[:, :, None, :]
        cos, sin = jnp.cos(angles_BL1P), jnp.sin(angles_BL1P)
        first, second, rest = jnp.split(x_BLHK, [self.width // 2, self.width], axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin, rest]
        return jnp.concatenate([part.astype(dtype) for part in parts], axis=-1)


class Alibi(Position):
    """A penalty linear in distance, with a slope for each head (Press et al. 2022, 3); symmetric if not causal."""

    name = "alibi"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.slopes = alibi_slopes(config.num_heads)

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        distance_B1LS = jnp.abs(query_positions_BL[:, None, :, None] - key_positions_BS[:, None, None, :])
        return -jnp.array(self.slopes, jnp.float32)[:, None, None] * distance_B1LS


class T5(Position):
    """A trained bias for each head and bucket of distances, shared by all layers (Raffel et al. 2020, 2.1).

    By default, unlike in T5, logits are scaled by 1/sqrt(K).
    """

    name = "t5"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.causal = config.causal
        self.num_buckets = config.t5.num_buckets
        self.max_distance = config.t5.max_distance
        self.bias_table = nnx.Param(jnp.zeros((config.t5.num_buckets, config.num_heads), jnp.float32))

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        offset_BLS = key_positions_BS[:, None, :] - query_positions_BL[:, :, None]
        sizes = {"num_buckets": self.num_buckets, "max_distance": self.max_distance}
        return jnp.moveaxis(self.bias_table[t5_bucket(offset_BLS, causal=self.causal, **sizes)], -1, 1)


ENCODINGS = {"none": Position} | {encoding.name: encoding for encoding in Position.__subclasses__()}


def make(config: ModelConfig, *, rngs: nnx.Rngs) -> tuple[Position, ...]:
    """Make the encoding of each layer. Layers with the same encoding share one module."""
    pattern = config.position_pattern
    made = {name: ENCODINGS[name](config, rngs=rngs) for name in dict.fromkeys(pattern)}
    return tuple(made[pattern[layer % len(pattern)]] for layer in range(config.num_layers))


def embedding_std(config: ModelConfig) -> float:
    """Return the initial standard deviation of a token embedding's entries, after scaling."""
    return 1.0 if config.scale_embeddings else INIT_STD


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return 2^(-8i/H), i = 1..H. If H is between powers P and 2P of two: all slopes for P, then every other for 2P."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    above = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power + 1, 2)]
    return tuple(slopes + above[: num_heads - power])


def t5_bucket(offset: jax.Array, *, causal: bool, num_buckets: int, max_distance: int) -> jax.Array:
    """Return the bucket (int32) of each offset, key minus query position (Raffel et al. 2020, released code).

    Half of the buckets hold one distance each; the others are spaced logarithmically up to `max_distance`. If not
    causal, half of all buckets are for keys to the right.
    """
    right = jnp.zeros_like(offset)
    if not causal:
        num_buckets //= 2
        right = jnp.where(offset > 0, num_buckets, 0)
        distance = jnp.abs(offset)
    else:
        distance = jnp.maximum(-offset, 0)
    exact = num_buckets // 2
    # Use a table from float64, because devices round float32 logarithms differently, which would move bucket edges.
    distances = np.arange(max_distance + 1)
    growth = np.log(np.maximum(distances, 1) / exact) / np.log(max_distance / exact)
    wide = exact + np.floor(growth * (num_buckets - exact) + 1e-9).astype(np.int32)
    table = np.where(distances < exact, distances, np.minimum(wide, num_buckets - 1)).astype(np.int32)
    return right + jnp.asarray(table)[jnp.minimum(distance, max_distance)]


def geometric_frequencies(base: float, width: int) -> np.ndarray:
    """Return base^(-2i/width), the radians per token of pair i, in float64."""
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def rope_frequencies(rope: RopeConfig, width: int) -> np.ndarray:
    """Return each pair's radians per token, float64. width: rotated dimensions. In these formulas s is `rope.factor`.

    linear: all are divided by s (position interpolation, Chen et al. 2023). ntk: the base becomes
    base · s^(width/(width-2)), so that the slowest pair is divided by s and the fastest is unchanged (NTK-aware; Peng
    et al. 2023, 3.1). yarn: pairs with more than `beta_fast` turns in the original context are unchanged. Pairs with
    fewer than `beta_slow` turns are divided by s. In between, the two frequencies are averaged with weights linear in
    the turns (Peng et al. 2023, 3.2, with bounds β and α; the released code is linear in the pair's index).
    """
    plain_P, s = geometric_frequencies(rope.base, width), rope.factor
    if rope.scaling == "linear":
        return plain_P / s
    if rope.scaling == "ntk":
        return geometric_frequencies(rope.base * s ** (width / (width - 2)), width)
    if rope.scaling == "yarn":
        turns_P = rope.original_context * plain_P / (2 * np.pi)
        unscaled_P = np.clip((turns_P - rope.beta_slow) / (rope.beta_fast - rope.beta_slow), 0, 1)
        return (1 - unscaled_P) * plain_P / s + unscaled_P * plain_P
    return plain_P


def yarn_scale(factor: float) -> float:
    """Return sqrt(1/t) = 0.1 ln s + 1, the factor for both queries and keys (Peng et al. 2023, 3.4)."""
    return 0.1 * math.log(factor) + 1


def _angles(positions_BL: jax.Array, frequencies_P: Sequence[float] | np.ndarray) -> jax.Array:
    """Return position · frequency as angles_BLP in radians, float32."""
    return positions_BL[..., None].astype(jnp.float32) * jnp.asarray(frequencies_P, jnp.float32)

"""Biases of the attention logits that depend on positions only."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import MASKING_BIAS, Context
from mini_gpt.model.attention.parts import ScoreMod
from mini_gpt.model.positions.base import Encoding


class Bias(Encoding, ScoreMod):
    """Adds to the logits of attention a bias that depends on the positions of query and key, in each layer."""

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        """Return the bias_BHLS of the logits, float32."""
        raise NotImplementedError

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        return logits_BHLS + self.bias(context.queries.positions_BL, context.keys.positions_BL)


class Alibi(Bias):
    """A penalty linear in distance, with a slope for each head (Press et al. 2022, 3); symmetric if not causal."""

    name = "alibi"
    in_cross = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        slopes = alibi_slopes(len(config.kept), config.alibi_exponent)
        self.slopes = tuple(itertools.compress(slopes, config.kept))

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        return -jnp.array(self.slopes, jnp.float32)[:, None, None] * _distances(query_positions_BL, key_positions_BS)


class HardAlibi(Bias):
    """The first heads see 1, 2, 3, … tokens, their own included; the others have no encoding (Jelassi et al. 2024)."""

    name = "hard_alibi"

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        # It counts tokens by their positions, and its first head sees one token.
        config.check_needs("position", {"random_positions": None, "variants.selective": False})
        if config.hard_alibi.heads > config.num_heads:
            config.refuse("hard_alibi.heads", f"must be at most model.num_heads ({config.num_heads})")
        if config.variants.query_scale == "ssmax":
            config.refuse("variants.query_scale", "hard_alibi has heads that see different numbers of keys")

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del rngs
        windows = config.hard_alibi.heads
        reach = *range(windows), *(len(config.kept) - windows) * [math.inf]  # the largest visible distance
        self.reach = tuple(itertools.compress(reach, config.kept))

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        reach_H11 = jnp.array(self.reach, jnp.float32)[:, None, None]
        return jnp.where(_distances(query_positions_BL, key_positions_BS) <= reach_H11, 0.0, MASKING_BIAS)


class T5(Bias):
    """A trained bias for each head and bucket of distances, shared by all layers (Raffel et al. 2020, 2.1).

    By default, unlike in T5, logits are scaled by 1/sqrt(K).
    """

    name = "t5"
    shared = True
    in_cross = True

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        config.check_needs("position", {"heads": None})

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.causal = config.causal
        self.num_buckets = config.t5.num_buckets
        self.max_distance = config.t5.max_distance
        self.bias_table = nnx.Param(jnp.zeros((config.t5.num_buckets, config.num_heads), jnp.float32))

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        offset_BLS = key_positions_BS[:, None, :] - query_positions_BL[:, :, None]
        sizes = {"num_buckets": self.num_buckets, "max_distance": self.max_distance}
        return jnp.moveaxis(self.bias_table[t5_bucket(offset_BLS, causal=self.causal, **sizes)], -1, 1)


class Kerple(Bias):
    """A trained penalty p · ln(1 + a · distance) for each head and layer (Chi et al. 2022, logarithmic variant)."""

    name = "kerple"
    own_parameters = True
    in_cross = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        # Stored before a softplus, which keeps both positive without the released code's clamp after each step.
        draw = lambda most: jax.random.uniform(rngs.params(), (config.num_heads,), jnp.float32, 0.01, most)
        inverse_softplus = lambda x_H: jnp.log(jnp.expm1(x_H))
        self.p = nnx.Param(inverse_softplus(draw(2.0)))
        self.a = nnx.Param(inverse_softplus(draw(1.0)))

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        p_H11, a_H11 = (jax.nn.softplus(x_H[...])[:, None, None] for x_H in (self.p, self.a))
        return -p_H11 * jnp.log1p(a_H11 * _distances(query_positions_BL, key_positions_BS))


class Fire(Bias):
    """A trained function, in each layer, of the distance relative to the query's position (Li et al. 2024).

    The bias is MLP(ψ(i - j) / ψ(max(L, i))) with ψ(x) = ln(|c·x| + 1), for query i and key j. c and L are trained. The
    MLP has one hidden layer with ReLU, and is initialized uniformly within 1/sqrt(inputs), as in the code of Zheng et
    al. 2024, which also adds 1e-6 to the denominator.
    """

    name = "fire"
    own_parameters = True
    in_circuits = False  # the bias depends on the position of the query too

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, heads = config.fire.width, config.num_heads

        def draw(shape: tuple[int, ...], inputs: int) -> nnx.Param:
            most = 1 / math.sqrt(inputs)
            return nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -most, most))

        self.up, self.up_bias = draw((width,), 1), draw((width,), 1)
        self.down, self.down_bias = draw((width, heads), width), draw((heads,), width)
        self.c = nnx.Param(jnp.float32(0.1))
        self.threshold = config.fire.threshold
        self.factor = nnx.Param(jnp.float32(1))  # L = threshold · factor; a step of the optimizer is too small for L

    def bias(self, query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
        psi = lambda x: jnp.log1p(jnp.abs(self.c[...] * x))
        longest_BL1 = jnp.maximum(jnp.abs(self.threshold * self.factor[...]), query_positions_BL[:, :, None])
        share_BLS = psi(_distances(query_positions_BL, key_positions_BS)[:, 0]) / (psi(longest_BL1) + 1e-6)
        units_BLSW = jax.nn.relu(share_BLS[..., None] * self.up[...] + self.up_bias[...])
        return jnp.moveaxis(jnp.matmul(units_BLSW, self.down[...], precision="highest") + self.down_bias[...], -1, 1)


def _distances(query_positions_BL: jax.Array, key_positions_BS: jax.Array) -> jax.Array:
    """Return |query - key| as distance_B1LS, int32."""
    return jnp.abs(query_positions_BL[:, None, :, None] - key_positions_BS[:, None, None, :])


def alibi_slopes(num_heads: int, exponent: float = 8.0) -> tuple[float, ...]:
    """Return 2^(-exponent·i/H), i = 1..H. For H between powers P and 2P of two: all of P, then every other of 2P."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-exponent * i / power) for i in range(1, power + 1)]
    above = [2 ** (-exponent * i / (2 * power)) for i in range(1, 2 * power + 1, 2)]
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

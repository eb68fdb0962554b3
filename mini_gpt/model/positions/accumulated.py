"""Accumulated positions: a token's position is a sum of steps, which the tokens up to it choose."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import HeadChange, InputChange
from mini_gpt.model.layers import INIT_STD, observe
from mini_gpt.model.positions.base import Encoding
from mini_gpt.model.positions.rotary import Rope, rotated
from mini_gpt.model.positions.waves import angles, rope_frequencies


class Accumulated(Encoding):
    """RoPE at the positions Σ_{t<=i} (e^b + w · x_t / |x_t|), with own w and b for each key-value head and layer.

    x_t is the input of attention. Queries have the positions of the head whose keys they read. With w = 0 and b = 0, it
    is RoPE. The sum of steps is that of Selective RoPE (Movahedi et al. 2025, with the bias of its code), which sums an
    angle for each pair of dimensions. One position for each head is as in RePo (Li et al. 2025), which does not sum.
    """

    name = "accumulated"
    stage = "input"
    own_parameters = True
    causal_only = True
    in_circuits = False
    reads_positions = False
    uses_rope = True

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        Rope.check(config)
        config.check_needs("position", {"heads": None, "rope.scaling": "none"})

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.steps, self.turn = Steps(config, rngs=rngs), Turn(config)

    def modules(self) -> list[Any]:
        return [self.steps, self.turn]


class Steps(InputChange):
    """Gives each token the sum of the steps up to it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        options: Any = {"use_bias": False, "kernel_init": nnx.initializers.normal(INIT_STD), "dtype": jnp.float32}
        self.project = nnx.Linear(config.d_model, config.num_kv_heads, **options, rngs=rngs)
        self.log_step = nnx.Param(jnp.zeros(config.num_kv_heads, jnp.float32))

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        x32_BLD = x_BLD.astype(jnp.float32)
        unit_BLD = x32_BLD * jax.lax.rsqrt(jnp.sum(x32_BLD**2, axis=-1, keepdims=True) + 1e-6)
        sums_BLG = jnp.cumsum(jnp.exp(self.log_step[...]) + self.project(unit_BLD), axis=1)
        if context.cache is not None:
            sums_BLG += context.cache.last_sums
        observe(self, "places", sums_BLG)
        tokens = context.queries._replace(sums_BLH=sums_BLG)
        return x_BLD, context._replace(queries=tokens, keys=tokens)


class Turn(HeadChange):
    """Rotates queries and keys by the sums of steps."""

    def __init__(self, config: ModelConfig):
        self.width, self.shared = config.rotated_width, config.num_heads // config.num_kv_heads
        self.frequencies = tuple(map(float, rope_frequencies(config.rope, self.width)))

    def __call__(self, q_BLHK: jax.Array, k_BSGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        assert context.queries.sums_BLH is not None
        angles_BLGP = angles(context.queries.sums_BLH, self.frequencies)
        cos_BLGP, sin_BLGP = jnp.cos(angles_BLGP), jnp.sin(angles_BLGP)
        cos_BLHP, sin_BLHP = (jnp.repeat(x_BLGP, self.shared, axis=2) for x_BLGP in (cos_BLGP, sin_BLGP))
        return rotated(q_BLHK, cos_BLHP, sin_BLHP, self.width), rotated(k_BSGK, cos_BLGP, sin_BLGP, self.width)

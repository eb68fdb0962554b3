"""Relative logits: a bias of each distance that depends on the query's token."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import InputChange, ScoreMod
from mini_gpt.model.layers import INIT_STD
from mini_gpt.model.positions.base import Encoding

PROFILES = 16  # of a layer, as in Inkling


class RelativeLogits(Encoding):
    """Adds (W x_i)_h · P[:, i - j] for 0 <= i - j < extent, else 0 (code of Inkling in Transformers, 2026).

    x_i is the input of attention at the query. P has 16 profiles of biases by distance, which all heads of a layer
    share; W gives each head its weights of the profiles. In the ancestor, Shaw et al. 2018 (eq. 4), the query itself
    takes the place of W x, and each distance has a vector as wide as a head.
    """

    name = "relative_logits"
    stage = "input"
    own_parameters = True
    causal_only = True
    in_circuits = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.weights, self.profiles = Weights(config, rngs=rngs), Profiles(config, rngs=rngs)

    def modules(self) -> list[Any]:
        return [self.weights, self.profiles]


class Weights(InputChange):
    """Gives each query its weights of the profiles, W x."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.heads, init = config.num_heads, nnx.initializers.normal(INIT_STD)
        options: Any = {"use_bias": False, "kernel_init": init, "dtype": jnp.float32}
        self.project = nnx.Linear(config.d_model, self.heads * PROFILES, **options, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        weights_BLHR = self.project(x_BLD.astype(jnp.float32)).reshape(*x_BLD.shape[:2], self.heads, PROFILES)
        return x_BLD, context._replace(of_queries_BLHR=weights_BLHR)


class Profiles(ScoreMod):
    """Adds the weighted profiles to the logits."""

    name = RelativeLogits.name

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(INIT_STD)
        self.table = nnx.Param(init(rngs.params(), (PROFILES, config.relative_logits.extent), jnp.float32))

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        queries, keys, table_RE = context.queries.positions_BL, context.keys.positions_BL, self.table[...]
        assert context.of_queries_BLHR is not None
        by_distance_BHLE = jnp.einsum("blhr,re->bhle", context.of_queries_BLHR, table_RE, precision="highest")
        distance_B1LS = queries[:, None, :, None] - keys[:, None, None, :]
        is_near_B1LS = (distance_B1LS >= 0) & (distance_B1LS < table_RE.shape[1])
        found_BHLS = jnp.take_along_axis(by_distance_BHLE, jnp.where(is_near_B1LS, distance_B1LS, 0), axis=-1)
        return logits_BHLS + jnp.where(is_near_B1LS, found_BHLS, 0)

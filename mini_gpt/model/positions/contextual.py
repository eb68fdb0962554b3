"""Positions that depend on the content of the tokens."""

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.positions.base import Position


class Fox(Position):
    """Forgetting attention: the bias is the sum of ln σ(w·x + b) over the tokens after the key (Lin et al. 2025).

    x is the input of attention at each token. Each head and layer has its own w and b. ALiBi has constant gates.
    """

    name = "fox"
    per_layer = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.gate = nnx.Linear(config.d_model, config.num_heads, kernel_init=init, dtype=jnp.float32, rngs=rngs)

    def log_gates(self, x_BLD: jax.Array) -> jax.Array:
        return jax.nn.log_sigmoid(self.gate(x_BLD.astype(jnp.float32)))


class Cope(Position):
    """Contextual positions: a key's position is the number of open gates from it to the query (Golovneva et al. 2024).

    The gates are σ(logit). A trained vector for each position, for all heads of a layer, is multiplied with the query.
    """

    name = "cope"
    per_layer = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del rngs
        self.table = nnx.Param(jnp.zeros((config.cope.positions, config.head_width), jnp.float32))

    def contextual_table(self) -> jax.Array:
        return self.table[...]

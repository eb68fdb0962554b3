"""Positions that depend on the content of the tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention import rows
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import InputChange, ScoreMod
from mini_gpt.model.positions.base import Encoding


class Fox(Encoding, InputChange):
    """Forgetting attention: the bias is the sum of ln σ(w·x + b) over the tokens after the key (Lin et al. 2025).

    x is the input of attention at each token. Each head and layer has its own w and b. ALiBi has constant gates. This
    module gives each token the sum of the gates up to it; `DecayBias` subtracts that of the key from that of the query.
    """

    name = "fox"
    own_parameters = True
    causal_only = True
    in_circuits = False
    reads_positions = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.gate = nnx.Linear(config.d_model, config.num_heads, kernel_init=init, dtype=jnp.float32, rngs=rngs)

    def log_gates(self, x_BLD: jax.Array) -> jax.Array:
        """Return log_BLH, float32."""
        return jax.nn.log_sigmoid(self.gate(x_BLD.astype(jnp.float32)))

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        sums_BLH = jnp.cumsum(self.log_gates(x_BLD), axis=1)
        if context.cache is not None:
            sums_BLH += context.cache.last_sums
        tokens = context.queries._replace(sums_BLH=sums_BLH)
        return x_BLD, context._replace(queries=tokens, keys=tokens)

    def modules(self) -> list[Any]:
        return [self, DecayBias()]


class DecayBias(ScoreMod):
    """The bias of forgetting attention."""

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        query_BLH, key_BSH = context.queries.sums_BLH, context.keys.sums_BLH
        assert query_BLH is not None and key_BSH is not None
        return logits_BHLS + query_BLH.swapaxes(1, 2)[..., None] - key_BSH.swapaxes(1, 2)[:, :, None]


class Cope(Encoding, ScoreMod):
    """Contextual positions: a key's position is the number of open gates from it to the query (Golovneva et al. 2024).

    The gates are σ(logit). A trained vector for each position, for all heads of a layer, is multiplied with the query.
    """

    name = "cope"
    needs_all_keys = "the positions of cope"
    own_parameters = True
    causal_only = True
    in_circuits = False
    reads_positions = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        del rngs
        self.table = nnx.Param(jnp.zeros((config.cope.positions, config.head_width), jnp.float32))

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        assert context.q_BLHK is not None
        bias_BHLS = rows.contextual_bias(context.q_BLHK, logits_BHLS, context.visible(), self.table[...])
        return logits_BHLS + bias_BHLS

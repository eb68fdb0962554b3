"""The logits, and the modules before the output table: a bias of the logits, and the head of a masked encoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.layers import ACTIVATIONS, Linear, make_norm


class OutputBias(nnx.Module):
    """A bias of the logits.

    It is one more column of the output table, for which the hidden states have a column of ones. So the logits stay the
    product of hidden states and table; in bfloat16, the bias is rounded like the table.
    """

    def __init__(self, vocab_size: int):
        self.bias = nnx.Param(jnp.zeros((vocab_size,), jnp.float32))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Return x_BLE with E = D + 1, float32."""
        return jnp.concatenate([x_BLD, jnp.ones_like(x_BLD[..., :1])], axis=-1)

    def table(self, table_VD: jax.Array) -> jax.Array:
        """Return table_VE, the output table with the bias."""
        return jnp.concatenate([table_VD, self.bias[...][:, None]], axis=-1)


class PredictionHead(OutputBias):
    """A linear layer, an activation and a norm before the output table, and its bias (Devlin et al. 2019)."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        super().__init__(vocab_size)
        self.activate = ACTIVATIONS[config.activation]
        self.dense = Linear(config, config.d_model, config.d_model, rngs=rngs)
        self.norm = make_norm(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Return x_BLE with E = D + 1, float32."""
        return super().__call__(self.norm(self.activate(self.dense(x_BLD))))


def make(config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs) -> OutputBias | None:
    """Return the module between the last norm and the output table, or None."""
    if config.prediction_head:
        return PredictionHead(config, vocab_size, rngs=rngs)
    return OutputBias(vocab_size) if config.output_bias else None


def logits(x_TD: jax.Array, table_VD: jax.Array, soft_cap: float | None = None) -> jax.Array:
    """Return x Wᵀ as logits_TV in float32; both operands have the same dtype.

    soft_cap: c; the logits become c · tanh(logits / c) (Gemma Team 2024).
    """
    logits_TV = product(x_TD, table_VD, (1, 1))
    return logits_TV if soft_cap is None else soft_cap * jnp.tanh(logits_TV / soft_cap)


def product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    axes = ((contracted[0],), (contracted[1],))
    return jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)

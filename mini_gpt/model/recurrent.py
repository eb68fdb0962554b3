"""A recurrent baseline: the decoder with gated recurrent units in the place of attention."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.gpt import MiniGPT
from mini_gpt.model.layers import Linear, Mlp, dropout_keys, residual_std
from mini_gpt.model.other_blocks import OtherBlock, norm_of_branch
from mini_gpt.runtime import devices


def state_width(config: ModelConfig) -> int:
    """Return H, the smallest width whose 3DH + 3H² + HD weights are at least those of the attention that it replaces.

    With attention's 4D², H is 2D/3, and the weights are equal if 3 divides D.
    """
    width, attention = config.d_model, config.attention_width + config.num_kv_heads * config.head_width
    return math.ceil((math.sqrt(4 * width**2 + 6 * width * attention) - 2 * width) / 3)


class Recurrence(nnx.Module):
    """Gated recurrent units (Cho et al. 2014, 2.3; the reset gate after the product, as in Flax), and a projection.

    The products with the inputs are computed for all tokens at once, those with the state token by token.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, dtype = state_width(config), devices.compute_dtype(config.dtype)
        self.cell = nnx.GRUCell(config.d_model, width, dtype=dtype, rngs=rngs)
        self.out = Linear(config, width, config.d_model, std=residual_std(config), rngs=rngs)

    def __call__(self, x_BLD: jax.Array, segments_BL: jax.Array | None) -> jax.Array:
        """Return what is added to the stream, [B, L, D]. The float32 state is zero at the start of each segment."""
        segments_BL = jnp.zeros(x_BLD.shape[:2], int) if segments_BL is None else segments_BL
        starts_BL = jnp.pad(jnp.diff(segments_BL) != 0, ((0, 0), (1, 0)))

        def step(h_BH: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            h_BH = jnp.where(token[1][:, None], 0, h_BH)
            products = (token[0], self.cell.dense_h(h_BH))
            (xr, xz, xn), (hr, hz, hn) = (jnp.split(each.astype(jnp.float32), 3, axis=-1) for each in products)
            reset_BH, keep_BH = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
            h_BH = (1 - keep_BH) * jnp.tanh(xn + reset_BH * hn) + keep_BH * h_BH
            return h_BH, h_BH

        tokens = self.cell.dense_i(x_BLD).swapaxes(0, 1), starts_BL.T
        h_BH = jnp.zeros((len(x_BLD), self.cell.hidden_features), jnp.float32)
        return self.out(jax.lax.scan(step, h_BH, tokens)[1].swapaxes(0, 1))


class RecurrentBlock(OtherBlock):
    """A block with a recurrence in the place of attention."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        del kind
        self.dropout_rate, self.residual = config.sublayer_dropout, config.residual
        self.placement = config.norm_placement
        self.recurrence_norm = norm_of_branch(config, rngs=rngs)
        self.recurrence = Recurrence(config, rngs=rngs)
        self.mlp_norm = norm_of_branch(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, dropout_key: jax.Array | None = None) -> jax.Array:
        keys: Any = dropout_keys(dropout_key, 2)
        recur = lambda x_BLD: self.recurrence(x_BLD, context.queries.segments_BL)
        x_BLD = self.branch(x_BLD, self.recurrence_norm, recur, keys[0])
        return self.branch(x_BLD, self.mlp_norm, self.mlp, keys[1])


class RecurrentGPT(MiniGPT):
    """MiniGPT with recurrent blocks."""

    block_class = RecurrentBlock

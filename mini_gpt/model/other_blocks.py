"""Blocks with other residual branches than Pre-LN."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.multi_head import MultiHeadAttention
from mini_gpt.model.layers import Mlp, dropout, dropout_keys, make_norm, observe

Change = Callable[[jax.Array], jax.Array]


class OtherBlock(nnx.Module):
    """A block with the norms of `model.norm_placement`, or without residual connections (for ablation)."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.dropout_rate, self.residual = config.sublayer_dropout, config.residual
        self.placement = config.norm_placement
        self.attention_norm = norm_of_branch(config, rngs=rngs)
        self.attention = (config.own_attention or MultiHeadAttention)(config, kind, rngs=rngs)
        self.mlp_norm = norm_of_branch(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, dropout_key: jax.Array | None = None) -> jax.Array:
        observe(self, "stream", x_BLD)
        keys = dropout_keys(dropout_key, 3)
        attend = lambda x_BLD: self.attention(x_BLD, context, keys[0])
        x_BLD = self.branch(x_BLD, self.attention_norm, attend, keys[1])
        observe(self, "middle", x_BLD)
        return self.branch(x_BLD, self.mlp_norm, self.mlp, keys[2])

    def branch(self, x_BLD: jax.Array, norm: Any, sublayer: Change, key: jax.Array | None) -> jax.Array:
        """Return x + f(norm(x)) (pre), norm(x + f(x)) (post) or x + f(x) (none); without residual f alone."""
        added_BLD = sublayer(norm(x_BLD) if self.placement == "pre" else x_BLD)
        added_BLD = dropout(added_BLD, self.dropout_rate, key)
        x_BLD = x_BLD + added_BLD if self.residual else added_BLD.astype(x_BLD.dtype)
        return norm(x_BLD) if self.placement == "post" else x_BLD


def norm_of_branch(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module | None:
    """Return the norm of a residual branch, or None if branches have none."""
    return None if config.norm_placement == "none" else make_norm(config, rngs=rngs)


class ParallelBlock(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with two norms or one for both (Wang and Komatsuzaki 2021)."""

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.dropout_rate = config.sublayer_dropout
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = (config.own_attention or MultiHeadAttention)(config, kind, rngs=rngs)
        self.mlp_norm = None if config.parallel_residual == "one_norm" else make_norm(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, dropout_key: jax.Array | None = None) -> jax.Array:
        observe(self, "stream", x_BLD)
        keys = dropout_keys(dropout_key, 3)
        attention_BLD = self.attention(self.attention_norm(x_BLD), context, keys[0])
        mlp_norm = self.attention_norm if self.mlp_norm is None else self.mlp_norm
        mlp_BLD = self.mlp(mlp_norm(x_BLD))
        x_BLD = x_BLD + dropout(attention_BLD, self.dropout_rate, keys[1])
        return x_BLD + dropout(mlp_BLD, self.dropout_rate, keys[2])

"""Differential attention: the difference of two softmaxes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.attention import LayerKind
from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.multi_head import MultiHeadAttention


class DifferentialAttention(MultiHeadAttention):
    """Attention of pairs of heads, see `Difference`."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raise UserError for fields of the model that do not fit."""
        if config.num_kv_heads % 2:
            config.refuse("num_kv_heads", "must be even with model.variants.differential")
        needs = {"scan_layers": False, "heads": None, "encoder_layers": 0}  # since layers differ
        config.check_needs("variants.differential", needs)

    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        super().__init__(config, kind, rngs=rngs)
        self.difference = Difference(config, kind.depth, rngs=rngs)

    def project(self, x_BLD: jax.Array, kv_input_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_BLHK, k_BSGK, v_BSGK = super().project(x_BLD, kv_input_BSD)
        return q_BLHK, k_BSGK, self.difference.values(v_BSGK)

    def outputs(self, out_BLHK: jax.Array) -> jax.Array:
        return self.difference(out_BLHK)


class Difference(nnx.Module):
    """Heads 2i and 2i + 1 are a pair, whose values are those of both (Ye et al. 2025).

    The output of a pair is norm((softmax₁ - λ softmax₂) v) (1 - λ₀), with λ = exp(q₁·k₁) - exp(q₂·k₂) + λ₀ of trained
    vectors, and λ₀ = 0.8 - 0.6 exp(-0.3 depth). depth: the number of the layer, from 0. RMSNorm has weights, which all
    pairs share (2.1; released code).
    """

    def __init__(self, config: ModelConfig, depth: int, *, rngs: nnx.Rngs):
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        draw = lambda: nnx.Param(0.1 * jax.random.normal(rngs.params(), (config.head_width,), jnp.float32))
        self.q1, self.k1, self.q2, self.k2 = draw(), draw(), draw(), draw()
        exact: Any = {"dtype": jnp.float32, "use_fast_variance": False}
        self.norm = nnx.RMSNorm(2 * config.head_width, epsilon=1e-5, **exact, rngs=rngs)

    def values(self, v_BSGK: jax.Array) -> jax.Array:
        """Return the values of each key-value head, [B, S, G, 2K]: those of its pair."""
        B, S, G, K = v_BSGK.shape
        return jnp.repeat(v_BSGK.reshape(B, S, G // 2, 2 * K), 2, axis=2)

    def __call__(self, out_BLHV: jax.Array) -> jax.Array:
        """Return out_BLHK; a pair has the places of its two heads. out_BLHV: with V = 2K entries of each head."""
        B, L, H, V = out_BLHV.shape
        first, second = jnp.moveaxis(out_BLHV.astype(jnp.float32).reshape(B, L, H // 2, 2, V), 3, 0)
        share = jnp.exp(self.q1[...] @ self.k1[...]) - jnp.exp(self.q2[...] @ self.k2[...]) + self.start
        normed = (1 - self.start) * self.norm(first - share * second)
        return normed.astype(out_BLHV.dtype).reshape(B, L, H, V // 2)

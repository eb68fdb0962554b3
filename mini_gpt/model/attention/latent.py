"""Multi-head latent attention: keys and values of all heads come from one small vector of each token."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention import variants
from mini_gpt.model.attention.multi_head import MultiHeadAttention, split_heads
from mini_gpt.model.layers import INIT_STD, Linear


class LatentAttention(MultiHeadAttention):
    """Attention with the keys and values of `Latent`."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raise UserError for fields of the model that do not fit."""
        needs = {"encoder_layers": 0, "heads": None, "rope.fraction": 1, "variants.qk_norm": "none"}
        needs |= {"variants.clip_qkv": None, "variants.differential": False, "num_kv_heads": config.num_heads}
        config.check_needs("variants.latent", needs)
        if not {*config.position_pattern} <= {"rope", "none"}:
            config.refuse("variants.latent", "needs model.position=rope or none")

    def add_projections(self, layer: ModelConfig, rngs: nnx.Rngs) -> None:
        self.latent = Latent(layer, rngs=rngs)
        width = layer.attention_width + layer.num_heads * layer.rotated_width
        self.query = variants.projection(layer, layer.d_model, width, rngs=rngs)

    def project(self, x_BLD: jax.Array, kv_input_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.latent(x_BLD, split_heads(self.query(x_BLD), self.num_heads))

    def outputs(self, out_BLHK: jax.Array) -> jax.Array:
        return self.latent.output(out_BLHK)


class Latent(nnx.Module):
    """Keys W_uk c and values W_uv c of each head, with a latent vector c of width C (DeepSeek-AI 2024, 2.1).

    c = RMSNorm(W_dkv x). A further part of queries and keys is for RoPE; all heads share that of the key. The products
    are in another order: q · (W_uk c) = (W_ukᵀ q) · c, and Σ w (W_uv c) = W_uv Σ w c. So attention has one key-value
    head, whose key is [rotated part, c] and whose value is c, and the KV cache keeps this key only.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.variants.latent is not None
        self.heads, self.rotated, self.width = config.num_heads, config.rotated_width, config.variants.latent
        self.down = Linear(config, config.d_model, self.rotated + self.width, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(self.width, epsilon=1e-6, dtype=jnp.float32, use_fast_variance=False, rngs=rngs)
        # They hold matrices; they are not called.
        options: Any = {"use_bias": False, "kernel_init": nnx.initializers.normal(INIT_STD), "rngs": rngs}
        self.key, self.value = (nnx.Linear(self.width, config.attention_width, **options) for _ in range(2))

    def __call__(self, x_BLD: jax.Array, q_BLHK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, L, H, R + C], keys [B, L, 1, R + C] and values [B, L, 1, C]; R: the width for RoPE.

        q_BLHK: with R + K entries for each head.
        """
        shared_BLR, c_BLC = jnp.split(self.down(x_BLD), [self.rotated], axis=-1)
        c_BLC = self.norm(c_BLC).astype(shared_BLR.dtype)
        for_rope_BLHR, q_BLHK = jnp.split(q_BLHK, [self.rotated], axis=-1)
        q_BLHC = self._product("blhk,chk->blhc", q_BLHK, self.key)
        q_BLHX = jnp.concatenate([for_rope_BLHR, q_BLHC], axis=-1)
        return q_BLHX, jnp.concatenate([shared_BLR, c_BLC], axis=-1)[:, :, None], c_BLC[:, :, None]

    def output(self, out_BLHC: jax.Array) -> jax.Array:
        """Return the heads' outputs out_BLHK, from the weighted sums of c."""
        return self._product("blhc,chk->blhk", out_BLHC, self.value)

    def _product(self, subscripts: str, x: jax.Array, linear: nnx.Linear) -> jax.Array:
        kernel_CHK = linear.kernel[...].reshape(self.width, self.heads, -1).astype(x.dtype)
        return jnp.einsum(subscripts, x, kernel_CHK, preferred_element_type=jnp.float32).astype(x.dtype)

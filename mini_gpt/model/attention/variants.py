"""Variants of attention that act on queries, keys, weights and outputs, with their parameters in one layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention.cached import Past
from mini_gpt.model.attention.inputs import Context, Scoring, scaled
from mini_gpt.model.layers import Linear

LLAMA4_SPAN, LLAMA4_FACTOR = 8192, 0.1  # of the released code
CANON_TAPS = 4  # tokens that a canon layer sees, the newest included


class Variants(nnx.Module):
    """The variants of `model.variants`. By default, all methods return their input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config, variants, heads = config, config.variants, config.num_heads
        if variants.qk_norm != "none":
            epsilon, weighted = variants.qk_norm_epsilon, variants.qk_norm != "plain"
            together = variants.qk_norm == "all_heads"
            self.query_norm, self.key_norm = (
                nnx.RMSNorm(
                    count * config.head_width if together else config.head_width,
                    epsilon=epsilon,
                    use_scale=weighted,
                    dtype=jnp.float32,
                    rngs=rngs,
                )
                for count in (heads, config.num_kv_heads)
            )
        if variants.query_scale == "ssmax":
            self.query_factor = nnx.Param(jnp.full(heads, variants.ssmax_start, jnp.float32))
        if variants.sink == "trained":
            self.sink = nnx.Param(jnp.zeros(heads, jnp.float32))
        if variants.canon:
            most = CANON_TAPS**-0.5  # PyTorch's default of a depthwise convolution
            draw = jax.random.uniform(rngs.params(), (CANON_TAPS, config.d_model), jnp.float32, -most, most)
            self.canon = nnx.Param(draw)
        if variants.gate != "none":
            width = heads if variants.gate == "head" else config.attention_width
            self.gate = Linear(config, config.d_model, width, rngs=rngs)

    def convolved(self, x_BLD: jax.Array, segments_BL: jax.Array | None, past: Past | None) -> jax.Array:
        """Return x plus a causal depthwise convolution of x with 4 taps, within a segment (canon-A, Allen-Zhu 2025)."""
        taps_TD = self.canon[...]
        if past is not None:
            assert past.cache.recent_BTD is not None and past.recent_visible_BT is not None
            ages_T = (past.steps - jnp.arange(CANON_TAPS)) % CANON_TAPS  # of the slots; 0 is the new token's
            weighted_BTD = past.recent_visible_BT[..., None] * taps_TD[ages_T] * past.cache.recent_BTD
            return x_BLD + weighted_BTD.sum(axis=1, keepdims=True).astype(x_BLD.dtype)
        length, mixed_BLD = x_BLD.shape[1], x_BLD
        for age in range(min(CANON_TAPS, length)):
            moved_BLD = jnp.pad(x_BLD, ((0, 0), (age, 0), (0, 0)))[:, :length]
            if segments_BL is not None:
                same_BL = jnp.pad(segments_BL, ((0, 0), (age, 0)), mode="edge")[:, :length] == segments_BL
                moved_BLD = jnp.where(same_BL[..., None], moved_BLD, 0)
            mixed_BLD = mixed_BLD + taps_TD[age] * moved_BLD
        return mixed_BLD.astype(x_BLD.dtype)

    def clipped(self, x_BLD: jax.Array) -> jax.Array:
        """Limit the entries of projected queries, keys or values, as in MPT and OLMo."""
        most = self.config.variants.clip_qkv
        return x_BLD if most is None else jnp.clip(x_BLD, -most, most)

    def normalised(self, q_BLHK: jax.Array, k_BLGK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Divide queries and keys by their root mean squares, before the rotation.

        Each head apart (Qwen3), or all heads of a token together (OLMo 2).
        """
        kind = self.config.variants.qk_norm
        if kind == "none":
            return q_BLHK, k_BLGK

        def normed(norm, x_BLHK):
            parts = x_BLHK.reshape(*x_BLHK.shape[:2], -1) if kind == "all_heads" else x_BLHK
            return norm(parts).reshape(x_BLHK.shape).astype(x_BLHK.dtype)

        return normed(self.query_norm, q_BLHK), normed(self.key_norm, k_BLGK)

    def scaled_by_length(self, q_BLHK: jax.Array, context: Context, visible_BS: jax.Array | None) -> jax.Array:
        """Scale each query by a factor that grows with its visible keys or its position. visible_BS: of a KV cache.

        ssmax: s · ln(visible keys), with a trained s for each head (Nakanishi 2025). llama4: 1 + 0.1 ln(1 + ⌊(i + 1) /
        8192⌋) at position i (released code of Llama 4).
        """
        if self.config.variants.query_scale == "ssmax":
            length = q_BLHK.shape[1]
            visible_BL = context.mask.visible_keys(length) if visible_BS is None else visible_BS.sum(axis=1)[:, None]
            logs_BL11 = jnp.log(jnp.maximum(visible_BL, 1))[..., None, None]  # padding may see no key
            return scaled(self.query_factor[...][:, None] * logs_BL11, q_BLHK)
        if self.config.variants.query_scale == "llama4":
            spans_BL = (context.positions_BL + 1) // LLAMA4_SPAN
            return scaled((1 + LLAMA4_FACTOR * jnp.log1p(spans_BL))[..., None, None], q_BLHK)
        return q_BLHK

    def scoring(self, scale: float) -> Scoring:
        """Return the scale and the variants of the softmax."""
        variants, sink_H = self.config.variants, None
        if variants.sink != "none":
            is_trained = variants.sink == "trained"
            sink_H = self.sink[...] if is_trained else jnp.zeros(self.config.num_heads)
        selective, stick_breaking = variants.selective, variants.normaliser == "stick_breaking"
        return Scoring(scale, variants.soft_cap, sink_H, selective=selective, stick_breaking=stick_breaking)

    def gated(self, out_BLHK: jax.Array, x_BLD: jax.Array) -> jax.Array:
        """Multiply the heads' outputs by σ(W x), one factor for each head or entry (Qiu et al. 2025)."""
        if self.config.variants.gate == "none":
            return out_BLHK
        gate_BLHX = self.gate(x_BLD).reshape(*out_BLHK.shape[:3], -1)
        return (jax.nn.sigmoid(gate_BLHX.astype(jnp.float32)) * out_BLHK).astype(out_BLHK.dtype)

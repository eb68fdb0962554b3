"""The variants of attention in `model.variants`, as modules with the parameters of one layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mini_gpt.config.model import ModelConfig
from mini_gpt.model.attention import rows
from mini_gpt.model.attention.context import Context
from mini_gpt.model.attention.parts import HeadChange, InputChange, ScoreMod
from mini_gpt.model.layers import Linear, scaled

LLAMA4_SPAN, LLAMA4_FACTOR = 8192, 0.1  # of the released code
CANON_TAPS = 4  # tokens that a canon layer sees, the newest included


def modules(config: ModelConfig, *, rngs: nnx.Rngs) -> tuple[list[Any], list[Any]]:
    """Return the modules that act before the positional encoding, and those that act after it."""
    variants = config.variants
    before: list[Any] = []
    after: list[Any] = []
    if variants.qk_norm != "none":
        before.append(QKNorm(config, rngs=rngs))
    if variants.canon:
        before.append(Canon(config, rngs=rngs))
    if variants.soft_cap is not None:
        before.append(SoftCap(variants.soft_cap))
    if variants.query_scale == "ssmax":
        after.append(LengthScale(config))
    if variants.query_scale == "llama4":
        after.append(PositionScale())
    if variants.selective:
        after.append(Selective())
    return before, after


def projection(config: ModelConfig, d_in: int, d_out: int, *, rngs: nnx.Rngs) -> Linear:
    """Return the projection to queries, keys or values; with `variants.clip_qkv` its output is clipped."""
    made = Linear if config.variants.clip_qkv is None else ClippedLinear
    return made(config, d_in, d_out, use_bias=config.qkv_bias, rngs=rngs)


def gate(config: ModelConfig, *, rngs: nnx.Rngs) -> "Gate | None":
    """Return the gate of the heads' outputs, or None."""
    if config.variants.gate == "none":
        return None
    width = config.num_heads if config.variants.gate == "head" else config.attention_width
    return Gate(config, config.d_model, width, rngs=rngs)


class ClippedLinear(Linear):
    """A linear layer whose output entries are limited to ±clip_qkv, as in MPT and OLMo."""

    def __init__(self, config: ModelConfig, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        self.most: Any = config.variants.clip_qkv

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return jnp.clip(super().__call__(x), -self.most, self.most)


class Gate(Linear):
    """Multiplies the heads' outputs by σ(W x), one factor for each head or entry (Qiu et al. 2025)."""

    def __call__(self, out_BLHK: jax.Array, x_BLD: jax.Array) -> jax.Array:  # type: ignore[override]
        gate_BLHX = super().__call__(x_BLD).reshape(*out_BLHK.shape[:3], -1)
        return (jax.nn.sigmoid(gate_BLHX.astype(jnp.float32)) * out_BLHK).astype(out_BLHK.dtype)


class QKNorm(HeadChange):
    """Divides queries and keys by their root mean squares, before the rotation; with qk_norm=layernorm, LayerNorm.

    Each head apart (Qwen3), or with qk_norm=all_heads all heads of a token together (OLMo 2).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        variants, exact = config.variants, {"dtype": jnp.float32, "use_fast_variance": False}
        self.together = variants.qk_norm == "all_heads"
        made: Any = nnx.LayerNorm if variants.qk_norm == "layernorm" else nnx.RMSNorm

        def norm(heads: int) -> nnx.LayerNorm | nnx.RMSNorm:
            width = heads * config.head_width if self.together else config.head_width
            weighted, epsilon = variants.qk_norm != "plain", variants.qk_norm_epsilon
            return made(width, epsilon=epsilon, use_scale=weighted, **exact, rngs=rngs)

        self.query_norm, self.key_norm = norm(config.num_heads), norm(config.num_kv_heads)

    def __call__(self, q_BLHK: jax.Array, k_BSGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        return self._normed(self.query_norm, q_BLHK), self._normed(self.key_norm, k_BSGK)

    def _normed(self, norm: Callable[[jax.Array], jax.Array], x_BLHK: jax.Array) -> jax.Array:
        rows = x_BLHK.reshape(*x_BLHK.shape[:2], -1) if self.together else x_BLHK
        return norm(rows).reshape(x_BLHK.shape).astype(x_BLHK.dtype)


class Canon(InputChange):
    """Adds to x a causal depthwise convolution of x with 4 taps, within a segment (canon-A, Allen-Zhu 2025)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        most = CANON_TAPS**-0.5  # PyTorch's default of a depthwise convolution
        shape = (CANON_TAPS, config.d_model)
        self.taps = nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -most, most))

    def __call__(self, x_BLD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
        new, segments_BL = x_BLD.shape[1], context.queries.segments_BL
        if context.cache is not None:
            x_BLD, segments_BL = context.cache.with_earlier(x_BLD, segments_BL, CANON_TAPS - 1)
        length, mixed_BLD = x_BLD.shape[1], x_BLD
        for age in range(min(CANON_TAPS, length)):
            moved_BLD = jnp.pad(x_BLD, ((0, 0), (age, 0), (0, 0)))[:, :length]
            if segments_BL is not None:
                same_BL = jnp.pad(segments_BL, ((0, 0), (age, 0)), mode="edge")[:, :length] == segments_BL
                moved_BLD = jnp.where(same_BL[..., None], moved_BLD, 0)
            mixed_BLD = mixed_BLD + self.taps[age] * moved_BLD
        return mixed_BLD[:, length - new :].astype(x_BLD.dtype), context


class LengthScale(HeadChange):
    """SSMax: multiplies each query by s · ln(visible keys), with a trained s for each head (Nakanishi 2025)."""

    def __init__(self, config: ModelConfig):
        self.factor = nnx.Param(jnp.full(config.num_heads, config.variants.ssmax_start, jnp.float32))

    def __call__(self, q_BLHK: jax.Array, k_BSGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        logs_BL11 = jnp.log(jnp.maximum(context.visible_counts(), 1))[..., None, None]  # padding may see no key
        return scaled(self.factor[...][:, None] * logs_BL11, q_BLHK), k_BSGK


class PositionScale(HeadChange):
    """Multiplies the query at position i by 1 + 0.1 ln(1 + ⌊(i + 1) / 8192⌋) (released code of Llama 4)."""

    def __call__(self, q_BLHK: jax.Array, k_BSGK: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        spans_BL = (context.queries.positions_BL + 1) // LLAMA4_SPAN
        return scaled((1 + LLAMA4_FACTOR * jnp.log1p(spans_BL))[..., None, None], q_BLHK), k_BSGK


class SoftCap(ScoreMod):
    """c · tanh(logits / c) takes the place of the logits (Gemma Team 2024)."""

    def __init__(self, most: float):
        self.most = most

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        return self.most * jnp.tanh(logits_BHLS / self.most)


class Selective(ScoreMod):
    """Selective attention: each head ignores what the first head of earlier queries has selected (see `rows`)."""

    needs_all_keys = "selective attention"

    def __call__(self, logits_BHLS: jax.Array, context: Context) -> jax.Array:
        return logits_BHLS - rows.selective_penalty(logits_BHLS, context.visible())[:, None]

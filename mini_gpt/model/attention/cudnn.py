"""Attention by cuDNN's fused kernels on NVIDIA GPUs, which never hold the logits of a whole text."""

import jax

from mini_gpt.model.attention.masks import Mask


def attend(q_BLHK: jax.Array, k_BLGK: jax.Array, v_BLGK: jax.Array, *, mask: Mask, scale: float) -> jax.Array:
    """Gives out_BLHK in q's dtype, bfloat16 or float16; a window needs a causal mask, and there are no segments."""
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BLHK,
        k_BLGK,
        v_BLGK,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )

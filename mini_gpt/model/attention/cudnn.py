"""Attention by cuDNN's fused kernels on NVIDIA GPUs, which never hold the logits of a whole sequence."""

import jax

from mini_gpt.model.attention.masks import Context, Heads


def attend(heads: Heads, context: Context, scale: float) -> jax.Array:
    """Return out_BLHK in q's dtype, bfloat16 or float16. Needs a causal mask for a window, and no segments."""
    mask = context.mask
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        *heads, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
    )

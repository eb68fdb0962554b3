"""Four words, four dimensions, two heads: attention small enough to follow by hand."""

import math

import jax.numpy as jnp
import numpy as np

from mini_gpt.model.attention.masks import Heads, Mask
from mini_gpt.model.attention.reference import attend

WORDS = ("The", "cat", "sat", "down")
HEADS = 2

# In the first two dimensions "cat" is near "sat", in the last two "sat" is near "down"; "The" is near no other word.
X_LD = np.array(
    [[0.5, -1.0, 1.0, 0.5], [2.0, 0.5, -0.5, 1.0], [1.5, 1.0, 1.0, -2.0], [-1.0, 1.5, 0.5, -1.5]], np.float32
)

_EYE = np.eye(4, dtype=np.float32)
_RANDOM = np.random.default_rng(7)

# (W_Q, W_K). Head 1 has the first two columns, head 2 the others.
PRESETS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "identity": (_EYE, _EYE),
    "swapped blocks": (_EYE, _EYE[:, [2, 3, 0, 1]]),
    "head 2 negated": (_EYE, _EYE * np.array([1, 1, -1, -1], np.float32)),
    "random": tuple(_RANDOM.normal(size=(2, 4, 4)).round(1).astype(np.float32)),
}


def maps(
    preset: str, *, heads: int = HEADS, temperature: float = 1.0, order: tuple[int, ...] = (0, 1, 2, 3)
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits_HLS and weights_HLS, float32, of the words in a given order; every word sees every other.

    temperature: a divisor of the logits. Raises KeyError for an unknown preset.
    """
    w_q, w_k = PRESETS[preset]
    x_LD = X_LD[list(order)]
    q_BLHK, k_BLHK = ((x_LD @ w).reshape(1, 4, heads, -1) for w in (w_q, w_k))
    scale = 1 / math.sqrt(q_BLHK.shape[-1]) / temperature
    seen = Mask(causal=False).visible(4)
    _, found = attend(Heads(*map(jnp.asarray, (q_BLHK, k_BLHK, k_BLHK))), seen, scale=scale)
    return np.asarray(found.logits_BHLS[0]), np.asarray(found.weights_BHLS[0])

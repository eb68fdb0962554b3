"""Cross-attention: the kinds of source tokens, and how attention moves over the source."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.insight.examples import Example, cells
from mini_gpt.insight.heads.templates import Templates, Vocabulary


def templates(
    pairs: Sequence[Example], tokens_BL: np.ndarray, source_BS: np.ndarray, vocabulary: Vocabulary
) -> Templates:
    """Return {kind: mask_BLS}.

    tokens_BL, source_BS: the inputs and sources of the pairs, padded.

    source separator: the token before the source, which span corruption lacks.

    diagonal: the source token at the same share of its text as the query, and its two neighbours. token read, token to
      write: source tokens equal to the query's input, or to the token that follows it in the target.
    aligned: the source tokens that the alignment gives to the token to write; a pair without alignment has none.
    """
    shape, indices_S = (len(pairs), tokens_BL.shape[1], source_BS.shape[1]), np.arange(source_BS.shape[1])
    # The places of the first and of the last token of each source; an Example's inputs start with a separator.
    first_B = np.array([[int(pair.source[0] == pair.inputs[0])] for pair in pairs])
    last_B = np.array([[len(pair.source) - 1] for pair in pairs])
    written_BL = np.full(tokens_BL.shape, -2)  # no source token
    diagonal_BLS, aligned_BLS = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, pair in enumerate(pairs):
        length = len(pair.written)
        written_BL[row, :length] = pair.written
        at_L = first_B[row] + np.arange(length) / max(length - 1, 1) * (last_B[row] - first_B[row])
        diagonal_BLS[row, :length] = np.abs(indices_S - at_L[:, None]) <= 1
        aligned_BLS[row] = cells(pair.alignment, shape[1:])
    found = {
        "source separator": (indices_S < first_B)[:, None],
        "last source token": (indices_S == last_B)[:, None],
        "source delimiter": (vocabulary.is_delimiter_V[np.maximum(source_BS, 0)] & (indices_S >= first_B))[:, None],
        "diagonal": diagonal_BLS,
        "token read": tokens_BL[:, :, None] == source_BS[:, None],
        "token to write": written_BL[:, :, None] == source_BS[:, None],
        "aligned": aligned_BLS,
    }
    return {kind: np.broadcast_to(mask, shape) for kind, mask in found.items()}


def slopes(weights_BHLS: jax.Array, visible_BLS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return slope_BH, and whether a row has one: two queries or more. The weights are divided by their sums first.

    1: attention moves over the source at the pace of the target; -1: backwards; 0: it does not move with the target.
    """
    is_query_BL = visible_BLS.any(-1)
    count_B1 = is_query_BL.sum(-1, keepdims=True)
    target_BL = jnp.arange(is_query_BL.shape[1]) / jnp.maximum(count_B1 - 1, 1)
    source_BS = jnp.arange(visible_BLS.shape[-1]) / jnp.maximum(visible_BLS.any(1).sum(-1, keepdims=True) - 1, 1)
    share_BHLS = weights_BHLS / jnp.maximum(weights_BHLS.sum(-1, keepdims=True), 1e-30)
    mean_BHL = jnp.einsum("bhls,bs->bhl", share_BHLS, source_BS)
    centred_BL = jnp.where(is_query_BL, target_BL - 0.5, 0)  # the mean of 0..1 in equal steps is 1/2
    variance_B = (centred_BL**2).sum(-1)
    slope_BH = jnp.einsum("bhl,bl->bh", mean_BHL, centred_BL) / jnp.maximum(variance_B, 1e-30)[:, None]
    return slope_BH, count_B1[:, 0] > 1

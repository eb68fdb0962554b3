"""Full passes over the text for each new token, where a KV cache would be wrong.

A new token changes what earlier tokens compute in two kinds of models: with selective attention, and with RoPE's
dynamic scaling once the text is longer than the original context, because all angles change with the length. It would
not be enough to keep keys before their rotation, as Peng et al. 2023 (3.3) do: the keys and values of the second layer
depend on the rotation in the first. Transformers keeps rotated keys, and so writes another text; with use_cache=False
it writes this one. Recurrent models have no keys and values to keep.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.evaluation.loaded import LoadedModel


class Text(NamedTuple):
    """The text so far, in the place of a KV cache.

    tokens_BT: rows padded on the right up to the capacity.
    lengths_B: the length of each row.
    """

    tokens_BT: jax.Array
    lengths_B: jax.Array

    def extended(self, tokens_B: jax.Array) -> "Text":
        """Return the text with one more token in each row."""
        tokens_BT = self.tokens_BT.at[jnp.arange(len(tokens_B)), self.lengths_B].set(tokens_B)
        return Text(tokens_BT, self.lengths_B + 1)

    def take(self, rows_B: jax.Array, *, same_sources: bool = False) -> "Text":
        """Return the text with other rows in the place of each row, by index."""
        del same_sources  # no such model has an encoder
        return Text(self.tokens_BT[rows_B], self.lengths_B[rows_B])


def next_logits(model: LoadedModel, text: Text) -> jax.Array:
    """Return the logits_BV after the last token of each row, float32."""
    tokens_BT, last_B1 = text.tokens_BT, text.lengths_B[:, None] - 1
    indices_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    positions_BT, segments_BT = model.layout.positions_and_segments(model.config.model, tokens_BT)
    positions_BT = indices_BT if positions_BT is None else positions_BT
    # Padding, which no token sees, must not lengthen the row: it has the position of the last token.
    positions_BT = jnp.take_along_axis(positions_BT, jnp.minimum(indices_BT, last_B1), axis=1)
    module = model.edited()
    x_BTD = module.hidden(model.layout.decoder_tokens(tokens_BT), positions_BT, segments_BT)
    return module.logits(jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1))[:, 0]

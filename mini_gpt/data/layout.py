"""The positions and segments of tokens, computed from the token ids."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mini_gpt.config.model import ModelConfig


class Layout(NamedTuple):
    """The tokens at which segments start, and those at which positions restart.

    separator_id: the token before each document; a segment starts at it, and positions restart. None: a row is one
      segment.
    operator_ids: further tokens at which positions restart (`data.position_ids`).
    start_id: the token of an imported model that is read in place of the separator. For models like T5, the encoder
      reads the separator after each source, not before it. In the data, the separator is always before a text.
    first_id: the token of an imported model that each row begins with, `Tokenizer.first`.
    mask_id: the mask token of an imported model with the masked objective. None: another model.
    """

    separator_id: int | None = None
    operator_ids: tuple[int, ...] = ()
    start_id: int | None = None
    first_id: int | None = None
    mask_id: int | None = None

    def arguments(
        self,
        config: ModelConfig,
        tokens_BL: jax.Array,
        text_BL: jax.Array,
        keys_B: jax.Array | None = None,
        source_BS: jax.Array | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """Return the arguments of the model's `hidden`: tokens, positions and segments, then those of the source.

        text_BL: the tokens before masking.
        keys_B: see `positions_and_segments`.
        source_BS: the tokens of the encoder, if there is one; -1 is padding.
        """
        inputs = self.decoder_tokens(tokens_BL), *self.positions_and_segments(config, text_BL, keys_B)
        if source_BS is None:
            return inputs
        return *inputs, self.encoder_tokens(source_BS), *self.source_positions_and_segments(source_BS)

    def decoder_tokens(self, tokens: jax.Array) -> jax.Array:
        """Return the tokens that the decoder reads, of the same shape."""
        return tokens if self.start_id is None else jnp.where(tokens == self.separator_id, self.start_id, tokens)

    def encoder_tokens(self, source_BS: jax.Array) -> jax.Array:
        """Return the tokens that the encoder reads. With `start_id`, the separator moves from the start to the end."""
        if self.start_id is None or self.separator_id is None:
            return source_BS
        following_BS = jnp.pad(source_BS[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return jnp.where((source_BS >= 0) & (following_BS < 0), self.separator_id, following_BS)

    def positions_and_segments(
        self, config: ModelConfig, tokens_BL: jax.Array, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Return (positions_BL, segments_BL) of a text, int32; None where the model's default is right.

        keys_B: a random key for each row. It is used with `model.random_positions` only: a row then has sorted random
          positions without repetition (Ruoss et al. 2023). Without keys_B, these depend on the first token and the
          length of a row, so that a row has the same score in every call and batch. If many rows have the same first
          token, as in a task, pass `keys_of(row_numbers)`.
        """
        positions_BL = segments_BL = None
        if self.separator_id is not None:
            segments_BL = jnp.cumsum(tokens_BL == self.separator_id, axis=1, dtype=jnp.int32)
        if self.separator_id is not None or self.operator_ids:
            before_row = -1 if self.operator_ids else 0  # with operators, the first token has position 1
            positions_BL = _since(self.restarts(tokens_BL), before_row)
        count = config.random_positions
        if count is not None:
            if keys_B is None:
                keys_B = keys_of(tokens_BL[:, 0])
            # Take the indices of the largest random numbers, because choice(replace=False) would sort all numbers.
            numbers_BN = jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys_B)
            positions_BL = jnp.sort(jax.lax.top_k(numbers_BN, tokens_BL.shape[1])[1], axis=-1)
        return positions_BL, segments_BL

    def source_positions_and_segments(self, source_BS: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """Return (positions_BS, segments_BS) of an encoder's tokens; None without a separator."""
        if self.separator_id is None:
            return None, None
        is_first_BS = source_BS == self.separator_id
        return _since(is_first_BS), jnp.cumsum(is_first_BS, axis=1, dtype=jnp.int32)

    def restarts(self, tokens: jax.Array) -> jax.Array:
        """Return whether positions restart at each token, bool of the same shape."""
        starts = [token for token in (self.separator_id, *self.operator_ids) if token is not None]
        return jnp.isin(tokens, jnp.array(starts)) if len(starts) > 1 else tokens == starts[0]


PLAIN = Layout()  # one segment in each row, positions 0, 1, 2, …


def _since(is_start_BL: jax.Array, before_row: int = 0) -> jax.Array:
    """Return the distance of each token from the last start, int32. before_row: the index of one before the row."""
    indices_BL = jnp.broadcast_to(jnp.arange(is_start_BL.shape[1], dtype=jnp.int32), is_start_BL.shape)
    return indices_BL - jax.lax.cummax(jnp.where(is_start_BL, indices_BL, before_row), axis=1)


def keys_of(numbers_B: jax.Array) -> jax.Array:
    """Return a random key for each number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), numbers_B)

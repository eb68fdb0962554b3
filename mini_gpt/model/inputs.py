"""The inputs of a model, and of one stack of its blocks."""

from typing import NamedTuple

import jax

from mini_gpt.model.attention.inputs import Memory

PADDING_SEGMENT = -1  # of a source; segments of tokens are not negative


class Inputs(NamedTuple):
    """A batch of tokens, by default with positions 0..L-1 and one segment. Attention stays within a segment.

    source_BS: the tokens of the encoder; negative numbers are padding. None if the model has no encoder. In
    cross-attention, a target token sees the source tokens of its own segment; by default, all are in segment 0.
    """

    tokens_BL: jax.Array
    positions_BL: jax.Array | None = None
    segments_BL: jax.Array | None = None
    source_BS: jax.Array | None = None
    source_positions_BS: jax.Array | None = None
    source_segments_BS: jax.Array | None = None


class StackInputs(NamedTuple):
    """The positions and segments of one stack's tokens, and for a decoder the encoder's hidden states."""

    positions_BL: jax.Array
    segments_BL: jax.Array | None
    memory: Memory | None

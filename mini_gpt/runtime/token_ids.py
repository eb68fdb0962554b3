"""The check of token ids that a caller gives. JAX would wrap or clamp an id outside the vocabulary in silence."""

from collections.abc import Sequence

import jax
import numpy as np

from mini_gpt.runtime.errors import UserError


def check(tokens: Sequence[int] | np.ndarray | jax.Array, vocab_size: int, name: str, *, padding: bool = False) -> None:
    """Raise UserError if the tokens are not whole numbers in 0..vocab_size - 1.

    Arrays that JAX traces have no values yet: they are not checked.

    name: of the tokens, for the message.
    padding: -1 is allowed too.
    """
    if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return
    ids = np.asarray(tokens)
    if ids.size == 0:
        return
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{name}: found the type {ids.dtype}; token ids must be integers")
    lowest = -1 if padding else 0
    if lowest <= ids.min() and ids.max() < vocab_size:
        return
    place = np.argwhere((ids < lowest) | (ids >= vocab_size))[0].tolist()
    allowed = f"-1 for padding, or in 0..{vocab_size - 1}" if padding else f"in 0..{vocab_size - 1}"
    at = ", ".join(map(str, place))
    raise UserError(f"{name}[{at}]: found the token id {ids[tuple(place)]}; must be {allowed}, the vocabulary's ids")

"""The inputs of the model in a training step: tokens, positions, segments, and the source."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mini_gpt.config.schema import Config
from mini_gpt.data.layout import PLAIN, Layout
from mini_gpt.runtime.errors import require

Arrays = dict[str, jax.Array]
Prepare = Callable[[Arrays, jax.Array], tuple[Any, ...]]  # (batch, key) -> the arguments of the model's `hidden`


def make_prepare(config: Config, layout: Layout = PLAIN) -> Prepare | None:
    """Return prepare(batch, key), or None if rows have one segment, positions 0, 1, 2, …, and no source.

    layout: where segments start and positions restart.
    key: of random positions and offsets.

    Raises UserError if `train.random_offsets` does not fit the model.
    """
    _check_offsets(config)
    model, most = config.model, config.train.random_offsets
    unmasked = "inputs" if config.train.objective == "next_token" else "targets"  # the tokens before masking
    if layout == PLAIN and most is None and model.random_positions is None and not model.has_encoder:
        return None

    def prepare(batch: Arrays, key: jax.Array) -> tuple[Any, ...]:
        text_BL = batch[unmasked]
        keys_B = jax.random.split(jax.random.fold_in(key, model.num_layers + 1), len(text_BL))
        positions_BL, segments_BL = layout.coordinates(model, text_BL, keys_B)
        if most is not None:
            positions_BL = _with_offsets(positions_BL, text_BL.shape[1], keys_B, most, config.data.position_ids)
        inputs = layout.read(batch["inputs"]), positions_BL, segments_BL
        if "source" not in batch:
            return inputs
        return *inputs, layout.read_source(batch["source"]), *layout.source_coordinates(batch["source"])

    return prepare


def _with_offsets(
    positions_BL: jax.Array | None, length: int, keys_B: jax.Array, most: int, position_ids: str
) -> jax.Array:
    """Return the positions after a random offset for each row; all stay below `most` (Huang et al. 2025)."""
    positions_BL = jnp.arange(length)[None] if positions_BL is None else positions_BL
    most_B = jnp.broadcast_to(most - positions_BL.max(axis=1), keys_B.shape)
    offsets_B = jax.vmap(lambda key, most: jax.random.randint(key, (), 0, most))(keys_B, most_B)
    has_offset_BL = (positions_BL > 0) | (position_ids != "abacus")
    return positions_BL + jnp.where(has_offset_BL, offsets_B[:, None], 0)


def _check_offsets(config: Config) -> None:
    """Raise UserError if `train.random_offsets` does not fit the model. Evaluation ignores the field."""
    most, model = config.train.random_offsets, config.model
    if most is None:
        return
    remedy = f"must be at least context_length ({config.context_length})"
    require(most >= config.context_length, "train.random_offsets", most, remedy)
    remedy = f"learned positions end at model.max_positions ({model.max_positions})"
    require(model.position != "learned" or most <= model.max_positions, "train.random_offsets", most, remedy)
    require(model.random_positions is None, "train.random_offsets", most, "must be None with model.random_positions")

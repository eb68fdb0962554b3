"""The inputs of the model: their number of tokens and their layout, and in a training step, positions and source."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.layout import PLAIN, Layout
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import require

Arrays = dict[str, jax.Array]
Inputs = tuple[jax.Array | None, ...]  # the arguments of the model's `hidden`
ModelInputs = Callable[[Arrays, jax.Array], Inputs]  # (batch, key) -> inputs


def layout_of(config: Config, tokenizer: Tokenizer) -> Layout:
    """Return the layout of the tokens of a corpus. Operators are all characters but letters and digits.

    With an encoder, each row of sources and of targets has several pairs, and each text starts with a separator. Span
    corruption has one pair per row, and its text may have separators of documents.
    """
    data, has_pairs = config.data, config.model.has_encoder and not config.objective_class.corrupts
    separator_id, first_id = tokenizers.separator(tokenizer), tokenizer.first
    if has_pairs:
        layout = Layout(separator_id, start_id=tokenizer.start)
    elif data.isolate_documents:  # a document begins as a row does
        layout = Layout(separator_id, start_id=first_id, first_id=first_id)
    else:
        layout = Layout(first_id=first_id)
    if config.objective_class.masks:
        layout = layout._replace(mask_id=tokenizer.mask_id)
    if data.position_ids == "sequence":
        return layout
    characters = [text.decode() for text in tokenizer.texts]
    return layout._replace(operator_ids=tuple(i for i, text in enumerate(characters) if not text.isalnum()))


def vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of the model: those of the tokenizer, and those that the objective adds."""
    return tokenizers.vocab_size(tokenizer) + config.objective_class.added_tokens(tokenizer.mask_id)


def make_model_inputs(config: Config, layout: Layout = PLAIN) -> ModelInputs | None:
    """Return model_inputs(batch, key), or None if rows have one segment, positions 0, 1, 2, …, and no source.

    layout: where segments start and positions restart.
    key: of the step. Dropout uses fold_in(key, 0) to fold_in(key, num_layers), so positions use the next number.

    Raises UserError if `train.random_offsets` does not fit the model.
    """
    _check_offsets(config)
    model, limit = config.model, config.train.random_offsets
    unmasked = "targets" if config.objective_class.masks else "inputs"  # the tokens before masking
    if layout == PLAIN and limit is None and model.random_positions is None and not model.has_encoder:
        return None

    def model_inputs(batch: Arrays, key: jax.Array) -> Inputs:
        text_BL = batch[unmasked]
        keys_B = jax.random.split(jax.random.fold_in(key, model.num_layers + 1), len(text_BL))
        arguments = layout.arguments(model, batch["inputs"], text_BL, keys_B, batch.get("source"))
        if limit is None:
            return arguments
        tokens_BL, positions_BL, *others = arguments
        length = text_BL.shape[1]
        return tokens_BL, _with_offsets(positions_BL, length, keys_B, limit, config.data.position_ids), *others

    return model_inputs


def _with_offsets(
    positions_BL: jax.Array | None, length: int, keys_B: jax.Array, limit: int, position_ids: str
) -> jax.Array:
    """Return the positions, moved by one random offset for each row; all stay below `limit` (Huang et al. 2025)."""
    positions_BL = jnp.arange(length)[None] if positions_BL is None else positions_BL
    room_B = jnp.broadcast_to(limit - positions_BL.max(axis=1), keys_B.shape)
    offsets_B = jax.vmap(lambda key, room: jax.random.randint(key, (), 0, room))(keys_B, room_B)
    has_offset_BL = (positions_BL > 0) | (position_ids != "abacus")  # Abacus: position 0 is no digit
    return positions_BL + jnp.where(has_offset_BL, offsets_B[:, None], 0)


def _check_offsets(config: Config) -> None:
    """Raise UserError if `train.random_offsets` does not fit the model. Evaluation ignores the field."""
    limit, model = config.train.random_offsets, config.model
    if limit is None:
        return
    remedy = f"must be at least context_length ({config.context_length})"
    require(limit >= config.context_length, "train.random_offsets", limit, remedy)
    remedy = f"learned positions end at model.max_positions ({model.max_positions})"
    require(limit <= (model.table_length or limit), "train.random_offsets", limit, remedy)
    require(model.random_positions is None, "train.random_offsets", limit, "must be None with model.random_positions")

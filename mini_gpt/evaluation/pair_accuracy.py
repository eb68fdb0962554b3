"""The score of pairs when the model is given the true target up to each token, with several pairs in a row."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import pairs as pair_rows
from mini_gpt.data.batches import in_full_batches
from mini_gpt.data.pairs import Pair
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import loss as losses
from mini_gpt.runtime import progress, sharding
from mini_gpt.runtime.threads import in_order

SIZE_STEP = 16  # rows for longer pairs than in training are a multiple of this, so that few shapes are compiled


class PairPredictions(NamedTuple):
    """What a model predicts at each token of a target, its end included: arrays of shape [tokens] in a list of pairs.

    predicted: the most likely tokens, int32.
    confidence: their probabilities.
    nll: of the true tokens, in nats.
    """

    predicted: list[np.ndarray]
    confidence: list[np.ndarray]
    nll: list[np.ndarray]


def predict(model: LoadedModel, pairs: Sequence[Pair], separator: int) -> PairPredictions:
    """Return the predictions for all pairs, in their order.

    Raises the errors of `LoadedModel.with_layout` for pairs that are longer than the model's positions.
    """
    limits = row_lengths(model, pairs)

    def predict_batch(part: tuple[int, list[list[Pair]]]) -> list[np.ndarray]:
        count, rows = part
        batch = pair_rows.batch_of(rows, separator, limits)
        arrays = sharding.put_whole((batch["inputs"], batch["targets"], batch["source"]), model.mesh)
        is_scored_BL = batch["weights"][:count] > 0
        return [np.asarray(array)[:count][is_scored_BL] for array in _predict(model, *arrays)]

    rows = list(pair_rows.in_rows(pairs, limits))
    parts = in_full_batches(rows, model.rows_at_a_time(max(limits), "logits", len(rows)))
    found: list[list[np.ndarray]] = [[], [], []]
    for arrays in in_order(predict_batch, parts, model.batches_at_a_time):
        for values, array in zip(found, arrays, strict=True):
            values.append(array)
        progress.advance(len(arrays[0]))
    ends = np.cumsum([len(pair.target) + 1 for pair in pairs])[:-1]
    return PairPredictions(*(np.split(np.concatenate(values), ends) for values in found))


def row_lengths(model: LoadedModel, pairs: Sequence[Pair]) -> tuple[int, int]:
    """Return the lengths of rows: those of training, or longer ones if a pair needs them."""
    config, lengths = model.config, []
    for side, trained in enumerate((config.source_length, config.context_length)):
        longest = max(len(pair[side]) + 1 for pair in pairs)
        size = max(trained, -(-longest // SIZE_STEP) * SIZE_STEP)
        lengths.append(max(longest, min(size, config.model.table_length or size)))
    return lengths[0], lengths[1]


@jax.jit
def _predict(model: LoadedModel, inputs_BL, targets_BL, source_BS) -> tuple[jax.Array, jax.Array, jax.Array]:
    logits_BLV = model.logits(inputs_BL, None, None, source_BS)
    confidence_BL = jnp.exp(jnp.max(jax.nn.log_softmax(logits_BLV, axis=-1), axis=-1))
    return jnp.argmax(logits_BLV, axis=-1), confidence_BL, losses.nll(logits_BLV, targets_BL)

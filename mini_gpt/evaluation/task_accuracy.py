"""The share of a task's problems, or of pairs, that a model solves; only answers and targets are scored.

Answers are greedy. Exact match needs no decoding: greedy decoding gives the true answer if and only if each of its
tokens is the most likely one after the true tokens before it. A masked model predicts all tokens of an answer at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import pairs as pair_rows
from mini_gpt.data import task_batches, tokenizers
from mini_gpt.data.batches import Batch, in_full_batches, next_token_batch
from mini_gpt.data.layout import keys_of
from mini_gpt.data.pairs import Pair
from mini_gpt.data.tasks import Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation.items import Items
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import loss as losses
from mini_gpt.runtime import progress, sharding
from mini_gpt.runtime.threads import in_order

SIZE_STEP = 16  # rows for longer pairs than in training are a multiple of this, so that few shapes are compiled


class Prompt(NamedTuple):
    """The tokens of a text, and of the answer or continuation after it."""

    prompt: np.ndarray
    answer: np.ndarray


class Predictions(NamedTuple):
    """What a model predicts for each token of an answer, its end included, after the true tokens before it.

    The arrays of the problems in a list, each of shape [tokens].

    predicted: the most likely tokens, int32.
    confidence: their probabilities.
    nll: of the true tokens, in nats.
    right: whether the true tokens are the predicted ones.
    """

    predicted: list[np.ndarray]
    confidence: list[np.ndarray]
    nll: list[np.ndarray]
    right: list[np.ndarray]


@dataclass(frozen=True)
class TaskScore:
    """Sums over problems and their answers.

    answers: the predictions for the tokens that count: some in the question (`Task.scored`), the answer, and its end.
    items: {metric: results of each problem}.

    The end is the newline after an answer, or the separator after a target. A problem is solved if its answer and the
    end are predicted correctly. The end counts in `nll_sum`, as in training, but not in `tokens` and `right`.
    """

    problems: int
    solved: int
    tokens: int
    right: int
    nll_sum: float
    answers: list[np.ndarray]
    items: Mapping[str, Items]

    @property
    def exact_match(self) -> float:
        return self.solved / self.problems

    @property
    def token_accuracy(self) -> float:
        return self.right / self.tokens

    @property
    def nll(self) -> float:
        """Mean loss in nats per token, including the ends."""
        return self.nll_sum / (self.tokens + self.problems)


# As `scoring.METRICS`, of the score of problems or pairs.
METRICS: dict[str, Callable[[TaskScore], float]] = {
    "exact_match": lambda score: score.exact_match,
    "token_accuracy": lambda score: score.token_accuracy,
}


def metrics(score: TaskScore) -> dict[str, float]:
    """Return the METRICS of a score."""
    return {name: float(metric(score)) for name, metric in METRICS.items()}


def accuracy(model: LoadedModel, tokenizer: Tokenizer, problems: list[Problem], length: int) -> TaskScore:
    """Score (question, answer) problems, in rows of `length` inputs if there is no encoder."""
    if model.config.model.has_encoder:
        of_problems = [task_batches.pair_of(tokenizer, problem) for problem in problems]
        return of_pairs(model, of_problems, tokenizers.separator(tokenizer))

    def batch_of(indices: list[int]) -> Batch:
        return task_batches.problem_batch([problems[index] for index in indices], model.config, tokenizer, length)

    return score(model, batch_of, len(problems), length)


def of_pairs(model: LoadedModel, pairs: Sequence[Pair], separator: int) -> TaskScore:
    """Score pairs of a source and a target. The end of a target is the separator after it."""
    return _total(predict_pairs(model, pairs, separator))


def score(model: LoadedModel, batch_of: Callable[[list[int]], Batch], count: int, length: int) -> TaskScore:
    """Score `count` problems in rows of `length` inputs. batch_of: returns the batch of some problems, by index."""
    parts = in_full_batches(range(count), model.rows_at_a_time(length, "logits", count))
    batches = ((filled, batch_of(indices) | {"numbers": np.array(indices, np.int32)}) for filled, indices in parts)
    return _total(predict(model, batches))


def prompt_batch(prompts: Sequence[Prompt], length: int, padding: int, indices: Sequence[int]) -> Batch:
    """Return the batch of some prompts, padded on the right to `length` tokens. Only the answers have weight."""
    rows_BM = np.full((len(indices), length), padding, np.int32)
    weights_BM = np.zeros(rows_BM.shape, np.float32)
    for row, index in enumerate(indices):
        begin, end = len(prompts[index].prompt), sum(map(len, prompts[index]))
        rows_BM[row, :end] = np.concatenate(prompts[index])
        weights_BM[row, begin:end] = 1
    return next_token_batch(rows_BM) | {"weights": weights_BM[:, 1:]}


def predict_pairs(model: LoadedModel, pairs: Sequence[Pair], separator: int) -> Predictions:
    """Return the predictions for all pairs, in their order. A row has several pairs.

    Raises the errors of `LoadedModel.with_layout` for pairs that are longer than the model's positions.
    """
    limits = row_lengths(model, pairs)
    rows = list(pair_rows.in_rows(pairs, limits))
    parts = in_full_batches(rows, model.rows_at_a_time(max(limits), "logits", len(rows)))
    batches = ((filled, pair_rows.batch_of(of_batch, separator, limits)) for filled, of_batch in parts)
    return predict(model, batches, [len(pair.target) + 1 for pair in pairs])


def row_lengths(model: LoadedModel, pairs: Sequence[Pair]) -> tuple[int, int]:
    """Return the lengths of rows: those of training, or longer ones if a pair needs them."""
    config, lengths = model.config, []
    for side, trained in enumerate((config.source_length, config.context_length)):
        longest = max(len(pair[side]) + 1 for pair in pairs)
        size = max(trained, -(-longest // SIZE_STEP) * SIZE_STEP)
        lengths.append(max(longest, min(size, config.model.table_length or size)))
    return lengths[0], lengths[1]


def predict(
    model: LoadedModel, batches: Iterable[tuple[int, Batch]], tokens: Sequence[int] | None = None
) -> Predictions:
    """Return the predictions of the targets with weight, in the first `filled` rows of each (filled, batch).

    batches: each may have `numbers`, from which its rows draw random positions.
    tokens: the number of targets of each problem; None: each row is a problem.
    """

    def of_batch(part: tuple[int, Batch]) -> tuple[np.ndarray, ...]:
        filled, batch = part
        arrays = {name: array for name, array in batch.items() if name != "weights"}
        predicted_BL, confidence_BL, nll_BL = map(np.asarray, _predict(model, sharding.put_whole(arrays, model.mesh)))
        is_scored_BL = batch["weights"][:filled] > 0
        of_targets = predicted_BL, confidence_BL, nll_BL, predicted_BL == batch["targets"]
        progress.advance(is_scored_BL.size)
        return is_scored_BL.sum(axis=1), *(array_BL[:filled][is_scored_BL] for array_BL in of_targets)

    counts, *found = zip(*in_order(of_batch, batches, model.batches_at_a_time), strict=True)
    ends = np.cumsum(np.concatenate(counts) if tokens is None else tokens)[:-1]
    return Predictions(*(np.split(np.concatenate(arrays), ends) for arrays in found))


@jax.jit
def _predict(model: LoadedModel, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys_B = keys_of(batch["numbers"]) if "numbers" in batch else None
    text_BL = batch["targets"] if model.masked else None
    logits_BLV = model.logits(batch["inputs"], text_BL, keys_B, batch.get("source"))
    confidence_BL = jnp.exp(jnp.max(jax.nn.log_softmax(logits_BLV, axis=-1), axis=-1))
    return jnp.argmax(logits_BLV, axis=-1), confidence_BL, losses.nll(logits_BLV, batch["targets"])


def _total(found: Predictions) -> TaskScore:
    count = len(found.nll)
    solved_P = np.array([right.all() for right in found.right])
    tokens_P = np.array([len(right) - 1 for right in found.right])  # without the end
    right_P = np.array([right[:-1].sum() for right in found.right])
    nll_P = np.array([nll.sum(dtype=np.float64) for nll in found.nll])
    by_problem = {
        "exact_match": Items(solved_P, np.ones(count)),
        "token_accuracy": Items(right_P, tokens_P),
        "nll": Items(nll_P, tokens_P + 1),
    }
    sums = (int(solved_P.sum()), int(tokens_P.sum()), int(right_P.sum()), float(nll_P.sum()))
    return TaskScore(count, *sums, found.predicted, by_problem)

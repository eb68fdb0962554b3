"""The share of a task's problems that a model solves; only the answers are scored.

Answers are greedy. Exact match needs no decoding: greedy decoding gives the true answer if and only if each of its
tokens is the most likely one after the true tokens before it. A masked model predicts all tokens of an answer at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.data import task_batches, tokenizers
from mini_gpt.data.batches import Batch, in_full_batches
from mini_gpt.data.layout import keys_of
from mini_gpt.data.pairs import Pair
from mini_gpt.data.tasks import Problem
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import pair_accuracy
from mini_gpt.evaluation.items import Items
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.model import loss as losses
from mini_gpt.runtime import progress, sharding
from mini_gpt.runtime.threads import in_order


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
    predicted, _, nll = pair_accuracy.predict(model, pairs, separator)
    columns = []
    for pair, tokens, nll_L in zip(pairs, predicted, nll, strict=True):
        right_L = tokens == [*pair.target, separator]
        columns.append((right_L.all(), len(pair.target), right_L[:-1].sum(), nll_L.sum(dtype=np.float64)))
    return _total([np.array(column) for column in zip(*columns, strict=True)], predicted)


def score(model: LoadedModel, batch_of: Callable[[list[int]], Batch], count: int, length: int) -> TaskScore:
    """Score `count` problems in rows of `length` inputs. batch_of: returns the batch of some problems, by index."""
    columns: dict[str, list[np.ndarray]] = {"solved": [], "tokens": [], "right": [], "nll": []}  # of each problem
    answers: list[np.ndarray] = []

    def predict(part: tuple[int, list[int]]) -> tuple[np.ndarray, ...]:
        count, indices = part
        batch = batch_of(indices)
        arrays = (batch["inputs"], batch["targets"], np.array(indices, np.int32))
        predicted = _predict(model, *sharding.put_whole(arrays, model.mesh))
        return tuple(np.asarray(array)[:count] for array in (batch["targets"], batch["weights"], *predicted))

    parts = in_full_batches(range(count), model.rows_at_a_time(length, "logits", count))
    for targets_BL, weights_BL, nll_BL, predicted_BL in in_order(predict, parts, model.batches_at_a_time):
        scored_BL = weights_BL > 0
        right_BL = predicted_BL == targets_BL
        answer_BL = scored_BL & (scored_BL[:, ::-1].cumsum(axis=1)[:, ::-1] > 1)  # all but the last, which is the end
        columns["solved"].append((right_BL | ~scored_BL).all(axis=1))
        columns["tokens"].append(answer_BL.sum(axis=1))
        columns["right"].append((right_BL & answer_BL).sum(axis=1))
        columns["nll"].append(np.where(scored_BL, nll_BL, 0.0).sum(axis=1, dtype=np.float64))
        answers += [predicted_L[scored_L] for predicted_L, scored_L in zip(predicted_BL, scored_BL, strict=True)]
        progress.advance(targets_BL.size)
    return _total([np.concatenate(parts) for parts in columns.values()], answers)


def _total(columns: list[np.ndarray], answers: list[np.ndarray]) -> TaskScore:
    """Return the score of P problems from arrays [P]: solved, tokens, right, loss."""
    solved_P, tokens_P, right_P, nll_P = columns
    count = len(solved_P)
    by_problem = {
        "exact_match": Items(solved_P, np.ones(count)),
        "token_accuracy": Items(right_P, tokens_P),
        "nll": Items(nll_P, tokens_P + 1),
    }
    sums = (int(solved_P.sum()), int(tokens_P.sum()), int(right_P.sum()), float(nll_P.sum()))
    return TaskScore(count, *sums, answers, by_problem)


@jax.jit
def _predict(model: LoadedModel, inputs_BL, targets_BL, indices_B) -> tuple[jax.Array, jax.Array]:
    logits_BLV = model.logits(inputs_BL, targets_BL if model.masked else None, keys_of(indices_B))
    return losses.nll(logits_BLV, targets_BL), jnp.argmax(logits_BLV, axis=-1)

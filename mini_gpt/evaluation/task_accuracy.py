"""How many of a task's problems a model solves, by length; nothing but the answer is scored.

The answer is greedy: where every token of it is the likeliest one after the true tokens before it, decoding writes the
same answer, so exact match needs no decoding.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mini_gpt.config.schema import Config
from mini_gpt.data import batches, tasks
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.model import loss as losses
from mini_gpt.model.gpt import check_length
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError

PROBLEMS = 512  # a length, where it has so many
FRACTIONS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2)  # of the longest trained length, where no lengths are given


@dataclass(frozen=True)
class TaskScore:
    """Sums over problems and their answers; `answers` is what was written.

    An answer is solved with the line's end that completes it. The end is no token of the answer; its loss counts, as in
    training.
    """

    problems: int
    solved: int
    tokens: int
    right: int
    nll_sum: float
    answers: list[np.ndarray]

    @property
    def exact_match(self) -> float:
        return self.solved / self.problems

    @property
    def token_accuracy(self) -> float:
        return self.right / self.tokens

    @property
    def nll(self) -> float:
        """Nats a token, the ends included."""
        return self.nll_sum / (self.tokens + self.problems)


def accuracy(
    model: LoadedModel,
    tokenizer: Tokenizer,
    problems: list[tuple[str, str]],
    length: int,
    *,
    advance: Advance = progress.silent,
) -> TaskScore:
    """Score problems, (question, answer), in rows of `length` inputs.

    advance: called with the number of tokens of each batch.
    """
    rows = perplexity.rows_at_a_time(model, length)
    solved = tokens = right = 0
    nll_sum, answers = 0.0, []
    for first in range(0, len(problems), rows):
        part = problems[first : first + rows]
        filled = part + part[:1] * (rows - len(part))  # the last batch has the others' shape
        batch = batches.problem_batch(filled, model.config, tokenizer, length)
        numbers_B = np.arange(first, first + rows, dtype=np.int32)
        put = sharding.put_whole((batch["inputs"], batch["targets"], numbers_B), model.mesh)
        nll_BL, likeliest_BL = map(np.asarray, _predict(model, *put))
        counts_BL = batch["weights"] > 0
        counts_BL[len(part) :] = False
        right_BL = likeliest_BL == batch["targets"]
        solved += int((right_BL | ~counts_BL)[: len(part)].all(axis=1).sum())
        answer_BL = counts_BL & np.pad(counts_BL[:, 1:], ((0, 0), (0, 1)))  # all but the last, the end
        tokens += int(answer_BL.sum())
        right += int((right_BL & answer_BL).sum())
        nll_sum += float(nll_BL[counts_BL].sum(dtype=np.float64))
        answers += [likeliest_BL[row, counts_BL[row]] for row in range(len(part))]
        advance(len(part) * length)
    return TaskScore(len(problems), solved, tokens, right, nll_sum, answers)


@jax.jit
def _predict(model: LoadedModel, inputs_BL, targets_BL, numbers_B):
    # Draw random positions by the problem's number: by its first token, as for a text, many problems would share them.
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), numbers_B)
    logits_BLV = model.logits(inputs_BL, targets_BL if model.masked else None, keys_B)
    return losses.nll(logits_BLV, targets_BL), jnp.argmax(logits_BLV, axis=-1)


def default_lengths(config: Config) -> tuple[int, ...]:
    """Gives lengths up to twice the longest one trained, as far as the task has them."""
    task = tasks.find(config.data.corpus)
    lengths = {round(fraction * config.data.task_length) for fraction in FRACTIONS}
    return tuple(sorted(n for n in lengths if n >= task.shortest and (task.longest is None or n <= task.longest)))


def by_length(model: LoadedModel, tokenizer: Tokenizer, split: str, lengths: tuple[int, ...]) -> list[dict]:
    """Gives a row a length: exact_match, token_accuracy (shares of 1), nll in nats a token, counts.

    The end of an answer counts in exact_match and in nll, not in token_accuracy: where an answer is a letter, half of
    it would be right for nothing.

    Every length has up to PROBLEMS different problems of the split, the same whatever the model, the seed or the other
    lengths. Where the model has no positions, or gives no finite loss, the status is undefined, with the reason.
    """
    rows, config = [], model.config
    needed = {length: batches.row_length(config, length) for length in lengths}
    what = f"up to {PROBLEMS} problems of each of {len(lengths)} lengths"
    with progress.shown(what, PROBLEMS * sum(needed.values())) as advance:
        for length in lengths:
            row = {"length": length, "exact_match": None, "token_accuracy": None, "nll": None}
            row |= {"problems": 0, "answer_tokens": 0, "status": "ok", "reason": None}
            try:
                check_length(config.model, needed[length])
            except UserError as error:
                rows.append(row | {"status": "undefined", "reason": str(error)})
                continue
            problems = tasks.different(config.data.corpus, split, PROBLEMS, shortest=length, longest=length)
            score = accuracy(model, tokenizer, problems, needed[length], advance=advance)
            if not math.isfinite(score.nll_sum):
                rows.append(row | {"status": "undefined", "reason": "the model's loss is not finite"})
                continue
            figures = {name: getattr(score, name) for name in ("exact_match", "token_accuracy", "nll", "problems")}
            rows.append(row | figures | {"answer_tokens": score.tokens})
    return rows

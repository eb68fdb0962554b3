"""How many of a task's problems a model solves, by length; nothing but the answer is scored.

The answer is greedy: where every token of it is the likeliest one after the true tokens before it, decoding writes the
same answer, so exact match needs no decoding.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mini_gpt.config.schema import Config
from mini_gpt.data import batches, tasks, tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.model import loss as losses
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import check_length, text_layout
from mini_gpt.model.parameters import Parameters
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
    definition: nnx.GraphDef,
    parameters: Parameters,
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    problems: list[tuple[str, str]],
    length: int,
    *,
    batch_tokens: int | None = None,
    advance: Advance = progress.silent,
    head_mask_NBH: np.ndarray | None = None,
) -> TaskScore:
    """Scores problems, (question, answer), in rows of `length` inputs.

    batch_tokens: how many go through the model at a time, as in training unless given; `advance` is told of them.
    head_mask_NBH: the model's, its batch axis 1.
    """
    isolate_at = tokenizers.isolate_at(config.data, tokenizer.token_bytes)
    masked = config.train.objective == "masked"
    rows = perplexity.rows_at_a_time(batch_tokens or config.batch_tokens, mesh, length)
    solved = tokens = right = 0
    nll_sum, answers = 0.0, []
    for first in range(0, len(problems), rows):
        part = problems[first : first + rows]
        filled = part + part[:1] * (rows - len(part))  # the last batch has the others' shape
        batch = batches.problem_batch(filled, config, tokenizer, length)
        numbers_B = np.arange(first, first + rows, dtype=np.int32)
        put = sharding.put_whole((batch["inputs"], batch["targets"], numbers_B), mesh)
        nll_BL, likeliest_BL = map(
            np.asarray, _predict(definition, mesh, isolate_at, masked, parameters, head_mask_NBH, *put)
        )
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


@functools.partial(jax.jit, static_argnames=("definition", "mesh", "isolate_at", "masked"))
def _predict(definition, mesh, isolate_at, masked, parameters, head_mask_NBH, inputs_BL, targets_BL, numbers_B):
    model = model_parameters.merge(definition, parameters)
    # Random positions by the problem's number: by the first token, as a text's, they would be a few draws for them all.
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), numbers_B)
    layout = text_layout(model.config, targets_BL if masked else inputs_BL, isolate_at, keys_B)
    with sharding.over(mesh):
        logits_BLV = model(inputs_BL, *layout, head_mask_NBH=head_mask_NBH)
    predicted = losses.nll(logits_BLV, targets_BL), jnp.argmax(logits_BLV, axis=-1)
    return jax.lax.with_sharding_constraint(predicted, NamedSharding(mesh, PartitionSpec()))


def default_lengths(config: Config) -> tuple[int, ...]:
    """Gives lengths up to twice the longest one trained, as far as the task has them."""
    task = tasks.find(config.data.corpus)
    lengths = {round(fraction * config.data.task_length) for fraction in FRACTIONS}
    return tuple(sorted(n for n in lengths if n >= task.shortest and (task.longest is None or n <= task.longest)))


def by_length(
    definition: nnx.GraphDef,
    parameters: Parameters,
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    split: str,
    lengths: tuple[int, ...],
    *,
    batch_tokens: int | None = None,
) -> list[dict]:
    """Gives a row a length: exact_match, token_accuracy (shares of 1), nll in nats a token, counts.

    The end of an answer counts in exact_match and in nll, not in token_accuracy: where an answer is a letter, half of
    it would be right for nothing.

    Every length has up to PROBLEMS different problems of the split, the same whatever the model, the seed or the other
    lengths. Where the model has no positions, or gives no finite loss, the status is undefined, with the reason.
    """
    rows = []
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
            score = accuracy(
                definition,
                parameters,
                config,
                tokenizer,
                mesh,
                problems,
                needed[length],
                batch_tokens=batch_tokens,
                advance=advance,
            )
            if not math.isfinite(score.nll_sum):
                rows.append(row | {"status": "undefined", "reason": "the model's loss is not finite"})
                continue
            figures = {name: getattr(score, name) for name in ("exact_match", "token_accuracy", "nll", "problems")}
            rows.append(row | figures | {"answer_tokens": score.tokens})
    return rows

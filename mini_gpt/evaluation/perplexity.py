"""The loss of a split in blocks of the context length, for training and eval.py."""

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np

from mini_gpt.config.fields import at_least, convert
from mini_gpt.config.model import ModelConfig
from mini_gpt.config.schema import Config
from mini_gpt.data import batches
from mini_gpt.data.batches import Batch
from mini_gpt.data.text_batches import corrupted_blocks
from mini_gpt.evaluation import items, scoring
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.evaluation.scoring import NllFn, Score
from mini_gpt.runtime import progress
from mini_gpt.runtime.errors import UserError, require
from mini_gpt.runtime.threads import in_order

MAX_STRETCHES = 16  # in a sample of a split
MOST_RISE = 0.1  # nats per token, of the validation loss above its lowest value: more is worth a word
NOT_FINITE = "the model's loss is not finite"


def make_nll_fn(model: LoadedModel) -> NllFn:
    """Return nll_fn(inputs_BL, targets_BL) -> nll_BL in nats, float32, over NumPy arrays, for `score_tokens`.

    The first input of each row is replaced by the token that rows of an imported model begin with, if there is one.
    With an encoder, the function takes source_BS too. It raises UserError for a token id outside the vocabulary.
    """

    def nll_fn(inputs_BL: np.ndarray, targets_BL: np.ndarray, source_BS: np.ndarray | None = None) -> np.ndarray:
        begun_BL = batches.begun(inputs_BL, model.layout.first_id)
        source = {} if source_BS is None else {"source_BS": source_BS}
        arrays = model.put(inputs_BL=begun_BL, targets_BL=targets_BL, **source)
        return np.asarray(model.nll(*arrays))[: len(inputs_BL)]

    nll_fn.threads = model.batches_at_a_time  # type: ignore[attr-defined]
    return nll_fn


def score_split(
    model: LoadedModel, tokens: np.ndarray, token_bytes: np.ndarray, *, most_tokens: int | None = None
) -> Score:
    """Score the tokens of a split in blocks of the context length, each token once.

    token_bytes: [V], UTF-8 bytes of each token.
    most_tokens: score about this many tokens, the same in every call; None: all.

    Raises the errors of `check_scorable`.

    Only the masked tokens of whole blocks are scored with the masked objective, and the targets of whole blocks with
    span corruption; they are the same in every call. The score then has 0 bytes, because bits per byte need the loss of
    every token.
    """
    check_scorable(model.config, len(tokens))
    most_tokens = convert("most_tokens", most_tokens, Annotated[int | None, at_least(1)])
    nll_fn, length = make_nll_fn(model), model.config.text_length
    scores: list[Score] = []
    for number, part in enumerate(stretches(tokens, most_tokens, length)):
        if model.config.objective_class.corrupts:
            rows = model.rows_at_a_time(length, count=len(part) // length)
            blocks = corrupted_blocks(part, model.config, vocab=model.vocab, batch_size=rows, seed=number)
            scores.append(score_batches(model, blocks))
        else:
            rows = model.rows_at_a_time(length, count=scoring.num_windows(len(part) - 1, length, length))
            nll = scoring.score_tokens(nll_fn, part, window=length, stride=length, batch_size=rows)
            scores.append(scoring.score(nll, part[1:], token_bytes))
    count = sum(s.tokens for s in scores)
    require(count > 0, "eval.tokens", most_tokens, "no target of the sample counts in the loss: raise it")
    parts_of_text = scores[0].items if len(scores) == 1 else {}
    losses_T = np.concatenate([s.losses_T for s in scores])
    return Score(sum(s.nll_sum for s in scores), count, sum(s.bytes for s in scores), losses_T, parts_of_text)


def cost(config: Config, num_tokens: int) -> int:
    """Return the number of tokens that the model processes to score a whole split of `num_tokens`."""
    length = config.text_length
    if config.objective_class.corrupts:
        return num_tokens // length * length
    return length * scoring.num_windows(num_tokens - 1, length, length)


def result(score: Score, model: LoadedModel) -> dict[str, Any]:
    """Return the score of a split as fields of eval/perplexity.json."""
    return {
        "protocol": model.config.objective_class.protocol,
        "context_length": model.config.context_length,
        "nll": score.nll,
        "perplexity": score.perplexity,
        **scoring.metrics(score),
        "tokens_scored": score.tokens,
        "bytes_scored": score.bytes,
        "items": items.packed(score.items),
    }


def check_scorable(config: Config, num_tokens: int) -> None:
    """Raise UserError if the split is too short to score a token, or the context exceeds the model's positions."""
    config.model.check_length(config.context_length)
    least = config.text_length if config.objective_class.corrupts else 2
    if num_tokens < least:
        raise UserError(f"data.corpus: the split has {num_tokens} tokens; must have at least {least}")


def why_undefined(config: ModelConfig, length: int) -> str | None:
    """Return the reason why a model has no loss at a length, or None if it has one."""
    try:
        config.check_length(length)
    except UserError as error:
        return str(error)
    return None


def stretches(tokens: np.ndarray, most_tokens: int | None, window: int) -> list[np.ndarray]:
    """Return the whole stream, or up to MAX_STRETCHES evenly spaced pieces with about `most_tokens` tokens in all.

    Each piece has whole windows of targets and the token before them. Many pieces cover more documents than one piece.
    """
    if most_tokens is None or len(tokens) <= most_tokens + 1:
        return [tokens]
    pieces = max(1, min(MAX_STRETCHES, most_tokens // window))
    length = max(1, most_tokens // pieces // window) * window
    starts = batches.evenly_spaced(len(tokens), length + 1, pieces)
    return [tokens[start : start + length + 1] for start in starts]


def score_batches(model: LoadedModel, filled_batches: Iterable[tuple[int, Batch]]) -> Score:
    """Score the targets with weight in the first `filled` rows of each (filled, batch). The score has 0 bytes."""
    nll_fn, nll_sum, losses = make_nll_fn(model), 0.0, [np.zeros(0, np.float32)]
    length = model.config.text_length

    def score_batch(block: tuple[int, Batch]) -> tuple[float, np.ndarray, int]:
        filled, batch = block
        nll_BL = nll_fn(*(batch[name] for name in ("inputs", "targets", "source") if name in batch))[:filled]
        weights_BL = batch["weights"][:filled]
        return float((nll_BL * weights_BL).sum(dtype=np.float64)), nll_BL[weights_BL > 0], filled

    for batch_nll, scored_T, filled in in_order(score_batch, filled_batches, model.batches_at_a_time):
        nll_sum += batch_nll
        losses.append(scored_T)
        progress.advance(filled * length)
    losses_T = np.concatenate(losses)
    return Score(nll_sum, len(losses_T), 0, losses_T)

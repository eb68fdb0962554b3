"""A split's loss under a model, in blocks of the context length: what training watches and `eval.py` reports."""

import functools

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mini_gpt.config.schema import Config
from mini_gpt.data import batches, tokenizers
from mini_gpt.evaluation import progress, scoring
from mini_gpt.evaluation.progress import Advance
from mini_gpt.evaluation.scoring import NllFn, Score
from mini_gpt.model import output_loss
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import check_length, text_layout
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding
from mini_gpt.runtime.errors import UserError

STRETCHES = 16
COUNTED_TOKENS = 10_000_000


def make_nll_fn(
    definition: nnx.GraphDef,
    parameters: Parameters,
    mesh: Mesh,
    *,
    isolate_at: int | None = None,
    masked: bool = False,
    advance: Advance = progress.silent,
    head_mask_NBH: np.ndarray | None = None,
) -> NllFn:
    """Gives nll_fn(inputs_BL, targets_BL) -> nll_BL over NumPy arrays; the batch is divided over the mesh.

    isolate_at: the separator at which documents are kept apart, for a model that was trained so. masked: the targets
    are the text itself, of which the inputs show a part. advance: is told how many tokens each call had.
    head_mask_NBH: the model's, its batch axis 1.
    """

    def nll_fn(inputs_BL: np.ndarray, targets_BL: np.ndarray) -> np.ndarray:
        batch = sharding.put_whole((inputs_BL, targets_BL), mesh)
        nll_BL = np.asarray(_nll(definition, mesh, isolate_at, masked, parameters, head_mask_NBH, *batch))
        advance(inputs_BL.size)
        return nll_BL

    return nll_fn


@functools.partial(jax.jit, static_argnames=("definition", "mesh", "isolate_at", "masked"))
def _nll(definition, mesh, isolate_at, masked, parameters, head_mask_NBH, inputs_BL, targets_BL):
    model = model_parameters.merge(definition, parameters)
    layout = text_layout(model.config, targets_BL if masked else inputs_BL, isolate_at)
    with sharding.over(mesh):
        x_BLD = model.hidden(inputs_BL, *layout, head_mask_NBH=head_mask_NBH)
        nll_BL = output_loss.token_nll(x_BLD, model.output_table, targets_BL, mesh)
    return jax.lax.with_sharding_constraint(nll_BL, NamedSharding(mesh, PartitionSpec()))


def score_split(
    definition: nnx.GraphDef,
    parameters: Parameters,
    config: Config,
    tokens: np.ndarray,
    token_bytes: np.ndarray,
    mesh: Mesh,
    *,
    most_tokens: int | None = None,
    batch_tokens: int | None = None,
    advance: Advance = progress.silent,
    head_mask_NBH: np.ndarray | None = None,
) -> Score:
    """Scores a split's joined stream in blocks of the context length, each token once.

    most_tokens: score about so many, in stretches spread over the split, the same at every call. batch_tokens: how many
    go through the model at a time, as in training unless given; `advance` is told of them. head_mask_NBH: the model's,
    its batch axis 1. Under the masked objective
    the masked tokens alone are scored, drawn once for all from the place of their block, and a last, partial block is
    left out; their bytes count as 0, since no text is compressed that way. Raises UserError where there is nothing to
    score, or the context length is past a learned table.
    """
    check_scorable(config, len(tokens))
    masked = config.train.objective == "masked"
    isolate_at = tokenizers.isolate_at(config.data, token_bytes)
    options = {"isolate_at": isolate_at, "masked": masked, "advance": advance, "head_mask_NBH": head_mask_NBH}
    nll_fn = make_nll_fn(definition, parameters, mesh, **options)
    score_stretch = _score_masked if masked else _score_next
    rows = rows_at_a_time(batch_tokens or config.batch_tokens, mesh, config.context_length)
    parts = stretches(tokens, most_tokens, config.context_length)
    scores = [score_stretch(nll_fn, part, config, token_bytes, rows) for part in parts]
    return Score(sum(s.nll_sum for s in scores), sum(s.tokens for s in scores), sum(s.bytes for s in scores))


def check_scorable(config: Config, num_tokens: int) -> None:
    """Raises UserError where a split is too short to score any token, or the context is past a learned table."""
    check_length(config.model, config.context_length)
    least = 2 if config.train.objective == "next_token" else config.context_length
    if num_tokens < least:
        raise UserError(f"data.corpus: the split has {num_tokens} tokens; at least {least} are needed to score any")


def stretches(tokens: np.ndarray, most_tokens: int | None, window: int) -> list[np.ndarray]:
    """Gives the whole stream, or up to STRETCHES pieces of it at even distances, each of whole windows and one token.

    The start of a split is one document, and no sample of it.
    """
    if most_tokens is None or len(tokens) <= most_tokens + 1:
        return [tokens]
    pieces = max(1, min(STRETCHES, most_tokens // window))
    length = max(1, most_tokens // pieces // window) * window
    starts = np.linspace(0, len(tokens) - 1 - length, pieces).astype(int)
    return [tokens[start : start + length + 1] for start in starts]


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts each token of a stream, or of stretches of COUNTED_TOKENS of it."""
    return sum(np.bincount(piece, minlength=vocab_size) for piece in stretches(tokens, COUNTED_TOKENS, window=1))


def rows_at_a_time(batch_tokens: int, mesh: Mesh, length: int) -> int:
    """Gives how many windows of a length have at most so many tokens; one a device at least."""
    shards = sharding.shards(mesh)
    return shards * max(1, batch_tokens // length // shards)


def _score_next(nll_fn: NllFn, tokens: np.ndarray, config: Config, token_bytes: np.ndarray, rows: int) -> Score:
    window = config.context_length
    nll = scoring.score_tokens(nll_fn, tokens, window=window, stride=window, batch_size=rows)
    return scoring.score(nll, tokens[1:], token_bytes)


def _score_masked(nll_fn: NllFn, tokens: np.ndarray, config: Config, token_bytes: np.ndarray, rows: int) -> Score:
    nll_sum, count = 0.0, 0
    for filled, batch in batches.masked_blocks(tokens, config, vocab_size=len(token_bytes), batch_size=rows):
        nll_BL = nll_fn(batch["inputs"], batch["targets"]) * batch["weights"]
        nll_sum += float(nll_BL[:filled].sum(dtype=np.float64))
        count += int(batch["weights"][:filled].sum())
    return Score(nll_sum, count, 0)

"""Which heads a model can do without: their importance by gradient, and the loss as they are removed (Michel et al.
2019). That paper could remove about 20% of a translation model's heads and 40% of BERT's, one model and one task each;
what holds for another is what is measured here."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mini_gpt.config.schema import Config
from mini_gpt.data import batches
from mini_gpt.data.batches import Batch
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.model import loss as losses
from mini_gpt.model import parameters as model_parameters
from mini_gpt.model.gpt import text_layout
from mini_gpt.model.parameters import Parameters
from mini_gpt.runtime import sharding

IMPORTANCE_TOKENS = 65_536  # of the training split
SCORED_TOKENS = 32_768  # of the split that the curve is measured on
SEEDS = 5  # of the orders that heads are removed in at random
MOST_POINTS = 16  # of a curve


def importance(
    definition: nnx.GraphDef,
    parameters: Parameters,
    config: Config,
    texts: Iterable[tuple[int, Batch]],
    vocab_size: int,
    mesh: Mesh,
    *,
    advance: Advance = progress.silent,
) -> np.ndarray:
    """Gives each head's importance_NH in nats a token, float64: the mean over texts of |∂loss/∂mask| where nothing is
    masked (Michel et al. 2019, eq. 2). texts: (rows that count, batch), a row being a text; one at least."""
    isolate_at = vocab_size - 1 if config.data.isolate_documents else None
    masked = config.train.objective == "masked"
    total_NH, count = 0.0, 0
    for filled, batch in texts:
        put = sharding.put_whole((batch["inputs"], batch["targets"], batch["weights"]), mesh)
        gradient_NBH = np.asarray(_mask_gradient(definition, mesh, isolate_at, masked, parameters, *put))
        total_NH = total_NH + np.abs(gradient_NBH[:, :filled].astype(np.float64)).sum(axis=1)
        count += filled
        advance(batch["inputs"].size)
    return total_NH / count


def removal_order(importance_NH: np.ndarray) -> list[tuple[int, int]]:
    """Gives (layer, head) from the least important on, each layer's importances over their ℓ2 norm (ibid., 4.1), or
    as they are where a layer has one head."""
    norms_N1 = np.linalg.norm(importance_NH, axis=1, keepdims=True) if importance_NH.shape[1] > 1 else np.ones((1, 1))
    relative_NH = importance_NH / np.maximum(norms_N1, np.finfo(np.float64).tiny)
    return [divmod(int(place), importance_NH.shape[1]) for place in np.argsort(relative_NH, axis=None, kind="stable")]


def random_order(layers: int, heads: int, seed: int) -> list[tuple[int, int]]:
    return [divmod(int(place), heads) for place in np.random.default_rng(seed).permutation(layers * heads)]


def counts(num_heads: int) -> list[int]:
    """Gives how many heads are removed at the points of a curve, none and all among them."""
    return sorted({round(share * num_heads) for share in np.linspace(0, 1, min(MOST_POINTS, num_heads) + 1)})


def curves(importance_NH: np.ndarray, loss: Callable[[np.ndarray], float]) -> list[dict[str, Any]]:
    """Gives a row for each order, seed and number of removed heads: loss(mask_NH), in nats a token."""
    layers, heads = importance_NH.shape
    orders = [("importance", None, removal_order(importance_NH))]
    orders += [("random", seed, random_order(layers, heads, seed)) for seed in range(SEEDS)]
    known: dict[bytes, float] = {}  # none and all removed are the same in every order
    rows = []
    for name, seed, order in orders:
        for removed in counts(layers * heads):
            mask_NH = np.ones((layers, heads), np.float32)
            for head in order[:removed]:
                mask_NH[head] = 0
            if mask_NH.tobytes() not in known:
                known[mask_NH.tobytes()] = loss(mask_NH)
            share = removed / (layers * heads)
            rows.append(
                {"order": name, "seed": seed, "removed": removed, "share": share, "nll": known[mask_NH.tobytes()]}
            )
    return rows


def cost(num_heads: int) -> int:
    """Gives about how many tokens a measurement puts through the model."""
    return IMPORTANCE_TOKENS + (2 + (1 + SEEDS) * (len(counts(num_heads)) - 2)) * SCORED_TOKENS


def text_batches(tokens: np.ndarray, config: Config, vocab_size: int, rows: int) -> Iterator[tuple[int, Batch]]:
    """Yields (rows that count, batch) of windows spread over a stream, with the targets of the run's objective."""
    length = config.context_length
    for piece in perplexity.stretches(tokens, IMPORTANCE_TOKENS, length):
        if config.train.objective == "masked":
            yield from batches.masked_blocks(piece, config, vocab_size=vocab_size, batch_size=rows)
            continue
        starts = range(0, len(piece) - length, length)
        for first in range(0, len(starts), rows):
            some = list(starts[first : first + rows])
            filled = some + some[:1] * (rows - len(some))
            windows_BM = np.stack([piece[start : start + length + 1] for start in filled]).astype(np.int32)
            weights_BL = np.ones((rows, length), np.float32)
            yield len(some), {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:], "weights": weights_BL}


def problem_batches(
    problems: list[tuple[str, str]], config: Config, tokenizer: Tokenizer, rows: int
) -> Iterator[tuple[int, Batch]]:
    """Yields (rows that count, batch) of a task's problems, (question, answer)."""
    for first in range(0, len(problems), rows):
        some = problems[first : first + rows]
        filled = some + some[:1] * (rows - len(some))
        yield len(some), batches.problem_batch(filled, config, tokenizer, config.context_length)


@functools.partial(jax.jit, static_argnames=("definition", "mesh", "isolate_at", "masked"))
def _mask_gradient(definition, mesh, isolate_at, masked, parameters, inputs_BL, targets_BL, weights_BL):
    """Gives gradient_NBH of each row's mean loss by its own mask."""
    model = model_parameters.merge(definition, parameters)
    layout = text_layout(model.config, targets_BL if masked else inputs_BL, isolate_at)

    def loss(mask_NBH: jax.Array) -> jax.Array:
        with sharding.over(mesh):
            x_BLD = model.hidden(inputs_BL, *layout, head_mask_NBH=mask_NBH)
            of_rows_BL = weights_BL / jnp.maximum(weights_BL.sum(axis=1, keepdims=True), 1)
            return losses.loss_sums(x_BLD, model.output_table, targets_BL, of_rows_BL, 0.0, mesh)[0]

    config = model.config
    gradient_NBH = jax.grad(loss)(jnp.ones((config.num_layers, len(inputs_BL), config.num_heads), jnp.float32))
    return jax.lax.with_sharding_constraint(gradient_NBH, NamedSharding(mesh, PartitionSpec()))

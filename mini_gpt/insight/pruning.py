"""Gradient-based importance of heads, and the loss as heads are removed.

Michel et al. (2019) could remove about 20% of the heads of a translation model and 40% of BERT's. Other models differ.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.data import batches
from mini_gpt.data.batches import Batch, in_full_batches
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.evaluation import perplexity, progress
from mini_gpt.evaluation.progress import Advance
from mini_gpt.insight.curves import Curve, finish, label_heads, new_figure, plot_curve
from mini_gpt.model import loss as losses
from mini_gpt.model.loaded import LoadedModel
from mini_gpt.runtime import sharding

IMPORTANCE_TOKENS = 65_536  # of the training split
SCORED_TOKENS = 32_768  # of the split whose loss is measured
SEEDS = 5  # random orders of removal
MOST_POINTS = 16  # of a curve


def importance(
    model: LoadedModel, texts: Iterable[tuple[int, Batch]], *, advance: Advance = progress.silent
) -> np.ndarray:
    """Return importance_NH in nats a token, float64: the mean over texts of |∂loss/∂mask| at a mask of ones.

    Michel et al. (2019), eq. 2. texts: at least one (count, batch). The first `count` rows are used; each is one text.
    """
    config = model.config.model
    total_NH, rows = np.zeros((config.num_layers, config.num_heads)), 0
    for count, batch in texts:
        gradient_NBH = np.asarray(_mask_gradient(model, sharding.put_whole(batch, model.mesh)))
        total_NH = total_NH + np.abs(gradient_NBH[:, :count].astype(np.float64)).sum(axis=1)
        rows += count
        advance(batch["inputs"][:count].size)
    return total_NH / rows


@jax.jit
def _mask_gradient(model: LoadedModel, batch: dict[str, jax.Array]) -> jax.Array:
    """Return gradient_NBH of each row's mean loss with respect to its head mask."""
    inputs_BL, targets_BL, weights_BL = batch["inputs"], batch["targets"], batch["weights"]
    config, row_weights_BL = model.config.model, weights_BL / jnp.maximum(weights_BL.sum(axis=1, keepdims=True), 1)

    def loss(mask_NBH: jax.Array) -> jax.Array:
        with_mask = dataclasses.replace(model, head_mask_NBH=mask_NBH)
        x_BLD = with_mask.hidden(inputs_BL, targets_BL if model.masked else None)
        with sharding.use_mesh(model.mesh):
            table_VD = model.merge().output_table
            return losses.loss_sums(x_BLD, table_VD, targets_BL, row_weights_BL, 0.0, model.mesh)[0]

    ones_NBH = jnp.ones((config.num_layers, len(inputs_BL), config.num_heads), jnp.float32)
    return sharding.replicate(jax.grad(loss)(ones_NBH), model.mesh)


def text_batches(model: LoadedModel, tokens: np.ndarray) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of windows spread over a stream, with the targets of the model's objective."""
    config, length = model.config, model.config.context_length
    rows = perplexity.rows_at_a_time(model, length)
    for piece in perplexity.stretches(tokens, IMPORTANCE_TOKENS, length):
        if model.masked:
            yield from batches.masked_blocks(piece, config, vocab_size=model.vocab_size, batch_size=rows)
            continue
        for count, starts in in_full_batches(range(0, len(piece) - length, length), rows):
            windows_BM = np.stack([piece[start : start + length + 1] for start in starts]).astype(np.int32)
            yield count, batches.next_token_batch(windows_BM)


def problem_batches(
    model: LoadedModel, tokenizer: Tokenizer, problems: list[tuple[str, str]]
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of a task's problems, which are pairs (question, answer)."""
    length = model.config.context_length
    for count, part in in_full_batches(problems, perplexity.rows_at_a_time(model, length)):
        yield count, batches.problem_batch(part, model.config, tokenizer, length)


def removal_order(importance_NH: np.ndarray) -> list[tuple[int, int]]:
    """Return all (layer, head), the least important first.

    The importances of a layer are divided by their ℓ2 norm (Michel et al. 2019, 4.1), unless layers have one head.
    """
    norms_N1 = np.linalg.norm(importance_NH, axis=1, keepdims=True) if importance_NH.shape[1] > 1 else np.ones((1, 1))
    relative_NH = importance_NH / np.maximum(norms_N1, np.finfo(np.float64).tiny)
    return [divmod(int(index), importance_NH.shape[1]) for index in np.argsort(relative_NH, axis=None, kind="stable")]


def random_order(layers: int, heads: int, seed: int) -> list[tuple[int, int]]:
    """Return all (layer, head) in a random order."""
    return [divmod(int(index), heads) for index in np.random.default_rng(seed).permutation(layers * heads)]


def counts(num_heads: int) -> list[int]:
    """Return the numbers of removed heads at which the loss is measured, from 0 to all."""
    return sorted({round(share * num_heads) for share in np.linspace(0, 1, min(MOST_POINTS, num_heads) + 1)})


def curves(importance_NH: np.ndarray, loss: Callable[[np.ndarray], float]) -> list[dict[str, Any]]:
    """Return a row for each order, seed and number of removed heads. loss: a function of mask_NH."""
    layers, heads = importance_NH.shape
    orders: dict[int | None, list[tuple[int, int]]] = {None: removal_order(importance_NH)}
    orders |= {seed: random_order(layers, heads, seed) for seed in range(SEEDS)}

    @functools.cache  # all orders share the first and the last mask
    def loss_without(removed: frozenset[tuple[int, int]]) -> float:
        mask_NH = np.ones((layers, heads), np.float32)
        for head in removed:
            mask_NH[head] = 0
        return loss(mask_NH)

    rows = []
    for (seed, order), removed in itertools.product(orders.items(), counts(layers * heads)):
        row = {"order": "importance" if seed is None else "random", "seed": seed, "removed": removed}
        nll = loss_without(frozenset(order[:removed]))
        rows.append(row | {"share": removed / (layers * heads), "nll": nll})
    return rows


def cost(num_heads: int) -> int:
    """Return the approximate number of tokens that the model processes in a measurement."""
    return IMPORTANCE_TOKENS + (2 + (1 + SEEDS) * (len(counts(num_heads)) - 2)) * SCORED_TOKENS


def pruning_figure(importance_NH: np.ndarray, rows: list[dict[str, Any]], *, title: str) -> Figure:
    """Return a figure: a grid of importances, layer 0 at the bottom, beside the curves of `rows`."""
    layers, heads = importance_NH.shape
    size = (7.2 + 0.55 * heads, max(4.3, 1.6 + 0.4 * layers))
    figure, (left, right) = new_figure(size, 1, 2, title=title, width_ratios=(1.4 + 0.55 * heads, 5.5))
    image = left.imshow(importance_NH, origin="lower", cmap="YlGnBu", vmin=0, aspect="auto")
    label_heads(left, layers, heads, "Importance of each head")
    figure.colorbar(image, ax=left, label="mean |∂loss/∂mask|, nats a token", shrink=0.8)

    by_importance = [row for row in rows if row["seed"] is None]
    shares = [100 * row["share"] for row in by_importance]
    plot_curve(right, Curve("least important first", shares, [row["nll"] for row in by_importance]), "C0")
    random = np.array([row["nll"] for row in rows if row["seed"] is not None]).reshape(-1, len(shares))
    mean, low, high = (list(function(random, axis=0)) for function in (np.mean, np.min, np.max))
    plot_curve(right, Curve(f"at random, {len(random)} seeds", shares, mean, low, high), "C1")
    title = "Loss after removal, without retraining"
    finish(right, xlabel="heads removed (%)", ylabel="loss (nats a token)", title=title)
    return figure

"""Which heads a model can do without: their importance by gradient, and the loss as they are removed.

Michel et al. (2019) could remove about 20% of the heads of a translation model and 40% of BERT's. Other models differ.
"""

import dataclasses
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
from mini_gpt.insight.curves import finish
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

    Michel et al. (2019), eq. 2. texts: at least one (count, batch), of which the first `count` rows are used, a text
    each.
    """
    config = model.config.model
    total_NH, rows = np.zeros((config.num_layers, config.num_heads)), 0
    for count, batch in texts:
        put = sharding.put_whole((batch["inputs"], batch["targets"], batch["weights"]), model.mesh)
        gradient_NBH = np.asarray(_mask_gradient(model, *put))
        total_NH = total_NH + np.abs(gradient_NBH[:, :count].astype(np.float64)).sum(axis=1)
        rows += count
        advance(batch["inputs"].size)
    return total_NH / rows


@jax.jit
def _mask_gradient(model: LoadedModel, inputs_BL: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array) -> jax.Array:
    """Return gradient_NBH of each row's mean loss with respect to its head mask."""
    config, row_weights_BL = model.config.model, weights_BL / jnp.maximum(weights_BL.sum(axis=1, keepdims=True), 1)

    def loss(mask_NBH: jax.Array) -> jax.Array:
        x_BLD = dataclasses.replace(model, head_mask_NBH=mask_NBH).hidden(
            inputs_BL, targets_BL if model.masked else None
        )
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
            mask_token = model.parameters["embedding"].shape[0] - 1
            yield from batches.masked_blocks(piece, config, vocab_size=mask_token, batch_size=rows)
            continue
        for count, starts in in_full_batches(range(0, len(piece) - length, length), rows):
            windows_BM = np.stack([piece[start : start + length + 1] for start in starts]).astype(np.int32)
            weights_BL = np.ones((rows, length), np.float32)
            yield count, {"inputs": windows_BM[:, :-1], "targets": windows_BM[:, 1:], "weights": weights_BL}


def problem_batches(
    model: LoadedModel, tokenizer: Tokenizer, problems: list[tuple[str, str]]
) -> Iterator[tuple[int, Batch]]:
    """Yield (count, batch) of a task's problems, (question, answer)."""
    length = model.config.context_length
    rows = perplexity.rows_at_a_time(model, length)
    for count, some in in_full_batches(problems, rows):
        yield count, batches.problem_batch(some, model.config, tokenizer, length)


def removal_order(importance_NH: np.ndarray) -> list[tuple[int, int]]:
    """Return (layer, head) from the least important on.

    The importances of a layer are divided by their ℓ2 norm (Michel et al. 2019, 4.1), unless layers have one head.
    """
    norms_N1 = np.linalg.norm(importance_NH, axis=1, keepdims=True) if importance_NH.shape[1] > 1 else np.ones((1, 1))
    relative_NH = importance_NH / np.maximum(norms_N1, np.finfo(np.float64).tiny)
    return [divmod(int(index), importance_NH.shape[1]) for index in np.argsort(relative_NH, axis=None, kind="stable")]


def random_order(layers: int, heads: int, seed: int) -> list[tuple[int, int]]:
    """Return all (layer, head) in a random order."""
    return [divmod(int(index), heads) for index in np.random.default_rng(seed).permutation(layers * heads)]


def counts(num_heads: int) -> list[int]:
    """Return the numbers of removed heads at the points of a curve, from 0 to all."""
    return sorted({round(share * num_heads) for share in np.linspace(0, 1, min(MOST_POINTS, num_heads) + 1)})


def curves(importance_NH: np.ndarray, loss: Callable[[np.ndarray], float]) -> list[dict[str, Any]]:
    """Return a row for each order, seed and number of removed heads. loss: from mask_NH to nats a token."""
    layers, heads = importance_NH.shape
    orders: list[tuple[str, int | None, list[tuple[int, int]]]]
    orders = [("importance", None, removal_order(importance_NH))]
    orders += [("random", seed, random_order(layers, heads, seed)) for seed in range(SEEDS)]
    known: dict[bytes, float] = {}  # the masks with no head and with all heads are the same in every order
    rows = []
    for name, seed, order in orders:
        for removed in counts(layers * heads):
            mask_NH = np.ones((layers, heads), np.float32)
            for head in order[:removed]:
                mask_NH[head] = 0
            key = mask_NH.tobytes()
            if key not in known:
                known[key] = loss(mask_NH)
            share = removed / (layers * heads)
            rows.append({"order": name, "seed": seed, "removed": removed, "share": share, "nll": known[key]})
    return rows


def cost(num_heads: int) -> int:
    """Return about how many tokens a measurement puts through the model."""
    return IMPORTANCE_TOKENS + (2 + (1 + SEEDS) * (len(counts(num_heads)) - 2)) * SCORED_TOKENS


def pruning_figure(importance_NH: np.ndarray, rows: list[dict[str, Any]], *, title: str) -> Figure:
    """Return a figure: importances as a grid, with layers upwards, beside the rows of `curves`."""
    layers, heads = importance_NH.shape
    figure = Figure(figsize=(7.2 + 0.55 * heads, max(4.3, 1.6 + 0.4 * layers)), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1.4 + 0.55 * heads, 5.5))
    image = left.imshow(importance_NH, origin="lower", cmap="YlGnBu", vmin=0, aspect="auto")
    left.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers), title="Importance of each head")
    left.tick_params(length=0)
    left.spines[:].set_visible(False)
    figure.colorbar(image, ax=left, label="mean |∂loss/∂mask|, nats a token", shrink=0.8)

    by_seed: dict[int | None, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row["nll"])
    share = [100 * row["share"] for row in rows if row["seed"] is None]
    style = {"marker": "o", "markersize": 4}
    right.plot(share, by_seed.pop(None), label="least important first", **style)
    random = np.array(list(by_seed.values()))
    right.plot(share, random.mean(axis=0), color="C1", label=f"at random, {len(random)} seeds", **style)
    right.fill_between(share, random.min(axis=0), random.max(axis=0), color="C1", alpha=0.18, linewidth=0)
    right.set(xlabel="heads removed (%)", ylabel="loss (nats a token)", title="Loss without them, without retraining")
    finish(right)
    return figure

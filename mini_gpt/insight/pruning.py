"""The importance of heads by their gradients and by ablation, and the loss as heads are removed.

Michel et al. (2019) could remove about 20% of the heads of a translation model and 40% of BERT's. Other models differ.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.data.batches import Batch
from mini_gpt.data.layout import keys_of
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import colours
from mini_gpt.insight.attention import each_layer
from mini_gpt.insight.curves import Curve, finish, label_heads, new_figure, plot_curve
from mini_gpt.insight.observing import Layer
from mini_gpt.model import editing
from mini_gpt.model import loss as losses
from mini_gpt.model.editing import Edit
from mini_gpt.runtime import progress, sharding

IMPORTANCE_TOKENS = 65_536  # of the training split
SCORED_TOKENS = 32_768  # of the split whose loss is measured
SEEDS = 5  # random orders of removal
MOST_POINTS = 16  # of a curve, besides its last
LABELS = {  # of the orders of removal, in the figure
    "ablation": "by ablation, head by head",
    "gradient": "by gradient",
    "importance": "by gradient, normalised in each layer",
}

UNITS = {  # names and units of the scores in the figure
    "ablation": ("Ablation", "loss without the head − loss, nats per token"),
    "mean_ablation": ("Mean ablation", "loss with its mean output − loss, nats per token"),
    "importance": ("Gradient", "mean |∂loss/∂mask|, nats per token"),
}

Place = tuple[int, int]  # (layer, head); layer: an index of axis N
Order = list[Place]  # all heads, in the order of removal


def importance(model: LoadedModel, texts: Iterable[tuple[int, Batch]]) -> np.ndarray:
    """Return importance_NH in nats per token, float64: the mean over texts of |∂loss/∂mask| at a mask of ones.

    Michel et al. (2019), eq. 2.

    texts: at least one (count, batch). The first `count` rows are used; each is one text. Axis N:
      `editing.attention_layers`, here and in the other functions.
    """
    layers, heads = _shape(model)
    total_NH, rows = np.zeros((layers, heads)), 0
    for count, batch in texts:
        ones_NBH = jnp.ones((layers, len(batch["inputs"]), heads), jnp.float32)
        gradient_NBH = np.asarray(_mask_gradient(model, _put(model, rows, count, batch), ones_NBH))
        total_NH = total_NH + np.abs(gradient_NBH.astype(np.float64)).sum(axis=1)
        rows += count
        progress.advance(batch["inputs"][:count].size)
    return total_NH / rows


def ablation(
    model: LoadedModel,
    texts: Iterable[tuple[int, Batch]],
    means_NHK: np.ndarray | None = None,
    places: Sequence[tuple[int, int]] | None = None,
) -> np.ndarray:
    """Return increase_NH in nats per token, float64: the loss without one head, minus the loss with all heads.

    texts: as in `importance`. The loss is the mean over texts.
    means_NHK: the outputs that replace those of a removed head, such as `mean_outputs` (mean ablation, Wang et al.
      2023); None: zeros.
    places: (layer, head) of the heads to remove; None: all. The others have NaN.
    """
    layers, heads = _shape(model)
    places = [*np.ndindex(layers, heads)] if places is None else places
    masks_XNH = np.ones((1 + len(places), layers, heads), np.float32)
    masks_XNH[(range(1, 1 + len(places)), *zip(*places, strict=True))] = 0
    total_X, rows = np.zeros(len(masks_XNH)), 0
    for count, batch in texts:
        put = _put(model, rows, count, batch)
        for number, mask_NH in enumerate(masks_XNH):
            mask_NBH = jnp.asarray(mask_NH[:, None])
            total_X[number] += float(_loss_sum(model, put, mask_NBH, means_NHK))
            progress.advance(batch["inputs"].size)
        rows += count
    increase_NH = np.full((layers, heads), np.nan)
    increase_NH[*zip(*places, strict=True)] = (total_X[1:] - total_X[0]) / rows
    return increase_NH


def mean_outputs(model: LoadedModel, texts: Iterable[tuple[int, Batch]]) -> np.ndarray:
    """Return each head's mean output_NHK over the places of the targets of `texts`, float32.

    texts: as in `importance`. The model has no encoder.
    """
    total_NHK, total, rows = np.zeros(()), 0.0, 0
    for count, batch in texts:
        weights_BL = batch["weights"] * (np.arange(len(batch["weights"])) < count)[:, None]
        text_BL = batch["targets"] if model.masked else None
        rows_B = rows + np.arange(len(weights_BL), dtype=np.int32)
        layers = each_layer(model, batch["inputs"], _weighted_sum, (weights_BL,), text_BL=text_BL, rows_B=rows_B)
        rows += count
        total_NHK = total_NHK + np.stack(layers, dtype=np.float64)
        total += weights_BL.sum(dtype=np.float64)
        progress.advance(batch["inputs"].size)
    return np.asarray(total_NHK / total, np.float32)


def _weighted_sum(layer: Layer, weights_BL: jax.Array) -> jax.Array:
    return jnp.einsum("blhk,bl->hk", layer.heads_BLHK.astype(jnp.float32), weights_BL)


def _shape(model: LoadedModel) -> tuple[int, int]:
    return len(editing.attention_layers(model.config.model)), model.config.model.num_heads


def _put(model: LoadedModel, first: int, count: int, batch: Batch) -> dict[str, jax.Array]:
    """Put a batch on the devices, with the numbers of its rows, and weights of 0 in all rows from `count` on."""
    indices_B = np.arange(len(batch["inputs"]), dtype=np.int32)
    weights_BL = batch["weights"] * (indices_B < count)[:, None]
    return sharding.put_whole(batch | {"rows": first + indices_B, "weights": weights_BL}, model.mesh)


@jax.jit
def _loss_sum(
    model: LoadedModel, batch: dict[str, jax.Array], mask_NBH: jax.Array, means_NHK: jax.Array | None = None
) -> jax.Array:
    """Return the sum over rows of each row's mean loss. means_NHK: as in `ablation`."""
    inputs_BL, targets_BL, weights_BL = batch["inputs"], batch["targets"], batch["weights"]
    row_weights_BL = weights_BL / jnp.maximum(weights_BL.sum(axis=1, keepdims=True), 1)
    text_BL = targets_BL if model.masked else None
    scale = mask_NBH[:, :, None, :, None]
    masked = Edit(scale, None if means_NHK is None else (1 - scale) * means_NHK[:, None, None])
    edits = model.edits or editing.NO_EDITS
    heads = editing.compose(edits.heads, masked)
    with_mask = dataclasses.replace(model, edits=edits._replace(heads=heads))
    x_BLD = with_mask.hidden(inputs_BL, text_BL, keys_of(batch["rows"]), batch.get("source"))
    table_VD = model.merge().output_table
    fields = losses.LossOptions(soft_cap=model.config.model.output_soft_cap)
    loss = losses.loss_sums(x_BLD, table_VD, targets_BL, row_weights_BL, fields, model.mesh)[0]
    return sharding.replicate(loss, model.mesh)


@jax.jit
def _mask_gradient(model: LoadedModel, batch: dict[str, jax.Array], mask_NBH: jax.Array) -> jax.Array:
    return sharding.replicate(jax.grad(_loss_sum, argnums=2)(model, batch, mask_NBH), model.mesh)


def removal_orders(importance_NH: np.ndarray, ablation_NH: np.ndarray) -> dict[str, Order]:
    """Return the orders "ablation", "gradient" and "importance", each from the least important head on.

    importance: as gradient, but the importances of a layer are divided by their ℓ2 norm (Michel et al. 2019, 4.1),
    unless layers have one head. Heads whose importance is NaN do not exist.
    """
    known_NH = np.nan_to_num(importance_NH)
    norms_N1 = np.linalg.norm(known_NH, axis=1, keepdims=True) if importance_NH.shape[1] > 1 else np.ones((1, 1))
    relative_NH = importance_NH / np.maximum(norms_N1, np.finfo(np.float64).tiny)
    scores = {"ablation": ablation_NH, "gradient": importance_NH, "importance": relative_NH}
    heads = importance_NH.shape[1]
    order = {name: np.argsort(score_NH, axis=None, kind="stable").tolist() for name, score_NH in scores.items()}
    exist = set(np.flatnonzero(~np.isnan(importance_NH)).tolist())
    return {name: [divmod(index, heads) for index in indices if index in exist] for name, indices in order.items()}


def random_order(places: Sequence[Place], seed: int) -> Order:
    """Return all places in a random order."""
    return [places[index] for index in np.random.default_rng(seed).permutation(len(places))]


def counts(num_heads: int) -> list[int]:
    """Return the numbers of removed heads at which the loss is measured, from 0 to all."""
    return sorted({round(share * num_heads) for share in np.linspace(0, 1, min(MOST_POINTS, num_heads) + 1)})


def curves(orders: Mapping[str, Order], loss: Callable[[frozenset[Place]], float]) -> list[dict[str, Any]]:
    """Return a row for each order and number of removed heads, also for SEEDS random orders.

    loss: takes the heads that are removed.
    """
    places = sorted(next(iter(orders.values())))
    every: list[tuple[str, int | None, Order]] = [(name, None, order) for name, order in orders.items()]
    every += [("random", seed, random_order(places, seed)) for seed in range(SEEDS)]
    loss_without = functools.cache(loss)  # all orders share the first and the last set
    rows = []
    for (name, seed, order), removed in itertools.product(every, counts(len(places))):
        nll = loss_without(frozenset(order[:removed]))
        share = removed / len(places)
        rows.append({"order": name, "seed": seed, "removed": removed, "share": share, "nll": nll})
    return rows


def cost(num_heads: int, most: int = IMPORTANCE_TOKENS) -> int:
    """Return the approximate number of tokens that the model processes in a measurement. most: in each pass."""
    curves_inside = (len(LABELS) + SEEDS) * (len(counts(num_heads)) - 2)
    return (4 + 2 * num_heads) * min(most, IMPORTANCE_TOKENS) + (2 + curves_inside) * min(most, SCORED_TOKENS)


def pruning_figure(
    scores: Mapping[str, np.ndarray], rows: list[dict[str, Any]], *, names: list[str], title: str
) -> Figure:
    """Return a figure: grids of scores_NH by the keys of UNITS, layer 0 at the top, beside the curves of `rows`.

    names: of the layers.
    """
    layers, heads = next(iter(scores.values())).shape
    width = 1.9 + 0.55 * heads
    size = (6.5 + len(scores) * width, max(4.3, 1.6 + 0.4 * layers))
    ratios = (*[width] * len(scores), 6)
    figure, (*grids, right) = new_figure(size, 1, len(ratios), title=title, width_ratios=ratios)
    for axes, (score, score_NH) in zip(grids, scores.items(), strict=True):
        name, unit = UNITS[score]
        limit, is_signed = np.nanmax(np.abs(score_NH)), np.nanmin(score_NH) < 0  # 0 has the colour of the paper in both
        colours.heat_map(axes, score_NH, limit, signed=is_signed, bar=unit)
        label_heads(axes, layers, heads, name)
        axes.set_yticks(range(layers), names)
    shares = [100 * share for share in dict.fromkeys(row["share"] for row in rows)]
    for number, (order, label) in enumerate(LABELS.items()):
        losses = [row["nll"] for row in rows if row["order"] == order]
        plot_curve(right, Curve(label, shares, losses), f"C{number}")
    random = np.array([row["nll"] for row in rows if row["order"] == "random"]).reshape(-1, len(shares))
    mean, low, high = (list(function(random, axis=0)) for function in (np.mean, np.min, np.max))
    plot_curve(right, Curve(f"at random, {len(random)} seeds", shares, mean, low, high), "grey")
    title = "Loss after removal, without retraining"
    finish(right, xlabel="heads removed (%)", ylabel="loss (nats per token)", title=title)
    return figure

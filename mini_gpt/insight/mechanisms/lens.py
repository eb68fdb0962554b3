"""The logit lens: what the model would predict if it ended after each block (nostalgebraist 2020).

The last norm and the unembedding are applied to the residual stream. Depth 0 is the stream of the embeddings, depth n
the stream after n blocks; the last depth is the model's own prediction.

The Jacobian lens (Gurnee et al. 2026, arXiv 2607.15495) first multiplies the stream by the mean Jacobian of the
last stream by it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.data.batches import Batch
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import colours, observing
from mini_gpt.insight.curves import finish, new_figure, token_label
from mini_gpt.insight.uncertainty import of_ratio
from mini_gpt.model import editing
from mini_gpt.model.editing import Edit
from mini_gpt.runtime import progress, sharding

LONGEST_LABEL = 12  # characters of a token


class Depths(NamedTuple):
    """What is predicted at each depth. Axis P: the depths. Axis T: the most likely tokens, the first is the likeliest.

    nll_PBL: the loss of the target, in nats.
    divergence_PBL: KL(last depth ‖ this depth), in nats. Float32.
    """

    nll_PBL: Any
    divergence_PBL: Any
    tokens_PBLT: Any
    probabilities_PBLT: Any


def read(model: LoadedModel, batch: Batch, most: int = 1, jacobians_NDE: np.ndarray | None = None) -> Depths:
    """Return the predictions at all depths, in NumPy.

    batch: inputs and targets.
    most: the number of likely tokens.
    jacobians_NDE: for the Jacobian lens, of `mean_jacobians`; None: the logit lens.

    The model has no encoder.
    """
    padded = [sharding.pad_rows(batch[name], model.mesh) for name in ("inputs", "targets")]
    found = jax.device_get(_read(model, *sharding.put_whole(padded, model.mesh), jacobians_NDE, most=most))
    return jax.tree.map(lambda array: array[:, : len(batch["inputs"])], found)


@functools.partial(jax.jit, static_argnames="most")
def _read(
    model: LoadedModel, inputs_BL: jax.Array, targets_BL: jax.Array, jacobians_NDE: jax.Array | None, *, most: int
) -> Depths:
    module = model.merge()

    def log_probabilities(x_BLD: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(module.logits(module.finish(x_BLD)))

    layers = observing.layers(model.edited(), model.with_layout(inputs_BL))
    streams_PBLD = jnp.stack([layers[0].before_BLD, *(layer.after_BLD for layer in layers)])
    last_BLV = log_probabilities(streams_PBLD[-1])
    if jacobians_NDE is not None:
        moved_NBLD = jnp.einsum("nde,nble->nbld", jacobians_NDE, streams_PBLD[:-1].astype(jnp.float32))
        streams_PBLD = jnp.concatenate([moved_NBLD, streams_PBLD[-1:]])

    def predict(x_BLD: jax.Array) -> Depths:
        log_BLV = log_probabilities(x_BLD)
        nll_BL = -jnp.take_along_axis(log_BLV, targets_BL[..., None], axis=-1)[..., 0]
        divergence_BL = jnp.sum(jnp.exp(last_BLV) * (last_BLV - log_BLV), axis=-1)
        top_BLT, tokens_BLT = jax.lax.top_k(log_BLV, most)
        return Depths(nll_BL, divergence_BL, tokens_BLT, jnp.exp(top_BLT))

    return sharding.replicate(jax.lax.map(predict, streams_PBLD), model.mesh)


def mean_jacobians(model: LoadedModel, texts: Iterable[tuple[int, Batch]]) -> np.ndarray:
    """Return jacobians_NDE, float64: ∂(last stream, element d) / ∂(stream before block n, element e).

    Of each place with a target, the derivatives of all such places of its text are added up. Then the mean over places,
    and that over texts are taken (Gurnee et al. 2026; their code leaves out the first 16 places).

    texts: as in `by_depth`, with at least one target.
    """
    config, count = model.config.model, 0
    total_NDE = np.zeros((config.num_layers, config.d_model, config.d_model))
    for filled, batch in texts:
        is_counted_BL = (batch["weights"] > 0) & (np.arange(len(batch["weights"])) < filled)[:, None]
        put = sharding.put_whole([batch["inputs"], is_counted_BL.astype(np.float32)], model.mesh)
        total_NDE += jax.device_get(_jacobians(model, *put))
        count += int(is_counted_BL.any(axis=1).sum())
        progress.advance(batch["inputs"].size * config.d_model)
    return total_NDE / count


@jax.jit
def _jacobians(model: LoadedModel, inputs_BL: jax.Array, is_counted_BL: jax.Array) -> jax.Array:
    """Return the sum over texts of their jacobians_NDE, by a backward pass for each element of the last stream."""
    config, edits = model.config.model, model.edits or editing.NO_EDITS
    shares_BL = is_counted_BL / jnp.maximum(is_counted_BL.sum(axis=1, keepdims=True), 1)

    def last_stream(added_NBLD: jax.Array) -> jax.Array:
        added = Edit(jnp.ones((config.num_layers, 1, 1, 1)), added_NBLD)
        edited = dataclasses.replace(model, edits=edits._replace(stream=editing.compose(edits.stream, added)))
        return observing.layers(edited.edited(), model.with_layout(inputs_BL))[-1].after_BLD.astype(jnp.float32)

    _, pull = jax.vjp(last_stream, jnp.zeros((config.num_layers, *inputs_BL.shape, config.d_model)))

    def derivatives(unit_D: jax.Array) -> jax.Array:
        (gradient_NBLE,) = pull(is_counted_BL[..., None] * unit_D)
        return jnp.einsum("nble,bl->ne", gradient_NBLE, shares_BL)

    return sharding.replicate(jax.lax.map(derivatives, jnp.eye(config.d_model)).swapaxes(0, 1), model.mesh)


def by_depth(
    model: LoadedModel, texts: Iterable[tuple[int, Batch]], jacobians_NDE: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Return a row for each depth: means over the targets of `texts`, in float64.

    nll: nats per token.
    accuracy: share of targets that are the likeliest token.
    agreement: share of targets at which the likeliest token is that of the last depth.
    divergence: as in `Depths`.
    nll_error and so on: the standard error of each mean, over texts.
    texts: (count, batch); the first `count` rows are used.
    jacobians_NDE: as in `read`.
    """
    sums_PX, total = np.zeros((model.config.model.num_layers + 1, 4)), 0.0
    texts_BPX, weights_B = list[np.ndarray](), list[float]()
    for count, batch in texts:
        found = read(model, batch, jacobians_NDE=jacobians_NDE)
        weights_BL = np.asarray(batch["weights"], np.float64)[:count]
        tokens_PBL = found.tokens_PBLT[..., 0]
        is_target_PBL, is_last_PBL = tokens_PBL == batch["targets"], tokens_PBL == tokens_PBL[-1]
        values = np.stack([found.nll_PBL, is_target_PBL, is_last_PBL, found.divergence_PBL], axis=-1)[:, :count]
        sums_PX += np.einsum("pblx,bl->px", values.astype(np.float64), weights_BL)
        total += weights_BL.sum()
        texts_BPX += [*np.einsum("pblx,bl->bpx", values.astype(np.float64), weights_BL)]
        weights_B += weights_BL.sum(axis=1).tolist()
        progress.advance(batch["inputs"].size)
    names = ("nll", "accuracy", "agreement", "divergence")
    rows: list[dict[str, Any]]
    rows = [{"depth": depth} | dict(zip(names, means, strict=True)) for depth, means in enumerate(sums_PX / total)]
    for place in np.ndindex(sums_PX.shape):
        rows[place[0]][f"{names[place[1]]}_error"] = of_ratio(
            np.array([text_PX[place] for text_PX in texts_BPX]), weights_B
        )
    return rows


def _cut(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def lens_figure(rows: Sequence[dict[str, Any]], shown: dict[str, Any], *, title: str) -> Figure:
    """Return a figure: the loss by depth, beside the likeliest token at each depth and place of a short text.

    shown: the text's tokens (inputs), and the likely next tokens and their probabilities at each depth and place.
    """
    depths, columns = len(rows), len(shown["inputs"])
    texts = [[_cut(token_label(tokens[0])) for tokens in depth] for depth in shown["tokens"]]
    read = [_cut(token_label(token)) for token in shown["inputs"]]
    across = max(3.2, columns * max(0.62, 0.1 * max(map(len, itertools.chain(read, *texts)))))  # inches
    size = (5 + across, max(3.6, 1.6 + 0.42 * depths))
    figure, (left, right) = new_figure(size, 1, 2, title=title, width_ratios=(3.4, across + 0.8))
    left.plot([row["nll"] for row in rows], range(depths), marker="o", color="C0")
    labels = ["0: embedding", *(f"{layer + 1}: after layer {layer}" for layer in range(depths - 1))]
    left.set_yticks(range(depths), labels)
    left.set_ylim(depths - 0.5, -0.5)  # downwards, as in the maps
    finish(left, xlabel="loss (nats per token)", ylabel="depth", title="Loss after each layer")
    probabilities_PL = np.array(shown["probabilities"])[..., 0]
    image = colours.heat_map(right, probabilities_PL, signed=False, bar="probability")
    is_next = lambda at: shown["tokens"][at[0]][at[1]][:1] == shown["inputs"][at[1] + 1 : at[1] + 2]
    colours.write_cells(image, lambda at, _: texts[at[0]][at[1]], is_next, fontsize=9)
    right.set_xticks(range(columns), read, fontsize=9)
    right.set_yticks(range(depths), labels if columns > 40 else [])
    right.set(xlabel="token read (in bold: the next token of the text)", title="Likeliest next token")
    return figure

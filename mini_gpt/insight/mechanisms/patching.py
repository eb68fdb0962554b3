"""Activation patching: which activations carry the difference between two texts.

The model reads the corrupted text, but one activation is replaced by the one that it has on the clean text. If the
patched pass predicts as on the clean text, then this activation carries the difference (Meng et al. 2022; Heimersheim
and Nanda 2024).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mini_gpt.data.batches import in_full_batches
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import budget, colours, observing
from mini_gpt.insight.curves import label_heads, new_figure
from mini_gpt.model import editing
from mini_gpt.model.editing import Edit
from mini_gpt.runtime import progress, sharding
from mini_gpt.runtime.errors import UserError

BY_PLACE = ("stream", "attention", "feed_forward")  # sites that are patched by layer and place; the names of `Edits`
MOST_PATCHES = 4096  # of single heads at single places; with more, heads are only patched at all places
SMALLEST_DIFFERENCE = 1e-4  # between the scores of both texts, in nats
ANY = -1  # all places, or all heads


class TextPair(NamedTuple):
    """Two texts of L tokens, and the token that should follow each.

    The score of a pass is logit(clean answer) - logit(corrupted answer) after the last token. If both answers are the
    same token, it is its log-probability. Both are in nats.
    """

    clean_L: np.ndarray
    corrupted_L: np.ndarray
    clean_answer: int
    corrupted_answer: int


class Patch(NamedTuple):
    """The layer, place and head of a patch. ANY: all places, or all heads."""

    layer: Any
    place: Any
    head: Any


class Effects(NamedTuple):
    """(score with the patch - corrupted) / (clean - corrupted): 0 if a patch changes nothing, 1 if it restores all.

    by_place: {site: effects_NL}.
    heads_NH: of a head at all places.
    heads_NHL: at one place; None if there would be more than MOST_PATCHES.
    clean, corrupted: the scores without a patch. float64. Patches that a budget leaves out are NaN.
    """

    clean: float
    corrupted: float
    by_place: dict[str, np.ndarray]
    heads_NH: np.ndarray
    heads_NHL: np.ndarray | None


class Activations(NamedTuple):
    """The activations of a pass, float32, under the names of `Edits`: heads_NBLHK, and the others as x_NBLD."""

    heads: Any
    attention: Any
    feed_forward: Any
    stream: Any


def activations(model: LoadedModel, tokens_BL: np.ndarray) -> Activations:
    """Return the activations of all layers, in NumPy."""
    padded_BL = sharding.put_whole(sharding.pad_rows(tokens_BL, model.mesh), model.mesh)
    return Activations(*(array[:, : len(tokens_BL)] for array in jax.device_get(_activations(model, padded_BL))))


@jax.jit
def _activations(model: LoadedModel, tokens_BL: jax.Array) -> tuple[jax.Array, ...]:
    layers = observing.layers(model.edited(), model.with_layout(tokens_BL))
    sites = [(layer.heads_BLHK, layer.attention_BLD, layer.feed_forward_BLD, layer.before_BLD) for layer in layers]
    stacked = tuple(jnp.stack(arrays).astype(jnp.float32) for arrays in zip(*sites, strict=True))
    return sharding.replicate(stacked, model.mesh)


def patch(model: LoadedModel, pair: TextPair) -> Effects:
    """Return the effects of all patches. The model is causal and has no encoder.

    Raises UserError if the scores of both texts are almost equal.
    """
    layers, heads, length = model.config.model.num_layers, model.config.model.num_heads, len(pair.clean_L)
    answers = np.array([pair.clean_answer, pair.corrupted_answer], np.int32)
    rows = model.rows_at_a_time(length, "logits")
    clean_BL, corrupted_BL = (
        sharding.put_whole(np.repeat(tokens_L[None], rows, axis=0), model.mesh) for tokens_L in pair[:2]
    )
    clean = float(answer_scores(model, clean_BL, answers)[0])
    corrupted = float(answer_scores(model, corrupted_BL, answers)[0])
    if abs(clean - corrupted) < SMALLEST_DIFFERENCE:
        remedy = "give texts between which the model's prediction differs"
        raise UserError(f"--other: found the scores {clean:.4g} and {corrupted:.4g} for the two texts; {remedy}")
    values = activations(model, pair.clean_L[None])
    is_small = layers * heads * length <= MOST_PATCHES
    shares = (1 / sites for sites in range(len(BY_PLACE) + 1 + is_small, 0, -1))  # of the time that a budget has left

    def effects(site: str, name: str, *axes: Iterable[int]) -> np.ndarray:
        """Return the effect of each combination of a layer, a place and a head."""
        patches = [Patch(*patch) for patch in itertools.product(range(layers), *axes)]
        scores = dict.fromkeys(patches, math.nan)
        for count, part in budget.within(f"patches of {name}", in_full_batches(patches, rows), next(shares)):
            put = sharding.put_whole(Patch(*np.array(part, np.int32).T), model.mesh)
            found = _patched_scores(model, corrupted_BL, answers, put, getattr(values, site), site=site)
            scores |= zip(part[:count], found[:count].tolist(), strict=True)
            progress.advance(count * length)
        return (np.array([*scores.values()]) - corrupted) / (clean - corrupted)

    by_place = {site: effects(site, site, range(length), [ANY]).reshape(layers, length) for site in BY_PLACE}
    heads_NH = effects("heads", "heads at all places", [ANY], range(heads)).reshape(layers, heads)
    heads_NHL = None
    if is_small:
        at_places = effects("heads", "heads at one place", range(length), range(heads))
        heads_NHL = at_places.reshape(layers, length, heads).swapaxes(1, 2)
    return Effects(clean, corrupted, by_place, heads_NH, heads_NHL)


def cost(model: LoadedModel, length: int) -> int:
    """Return the number of tokens that the model processes in `patch`."""
    layers, heads = model.config.model.num_layers, model.config.model.num_heads
    single = layers * heads * length
    return length * (len(BY_PLACE) * layers * length + layers * heads + (single if single <= MOST_PATCHES else 0))


@jax.jit
def answer_scores(model: LoadedModel, tokens_BL: jax.Array, answers: jax.Array) -> jax.Array:
    """Return the score_B of each row."""
    logits_BV = model.merge().logits(model.hidden(tokens_BL)[:, -1:])[:, 0]
    log_B = jax.nn.log_softmax(logits_BV)[:, answers[0]]
    score_B = jnp.where(answers[0] == answers[1], log_B, logits_BV[:, answers[0]] - logits_BV[:, answers[1]])
    return sharding.replicate(score_B, model.mesh)


@functools.partial(jax.jit, static_argnames="site")
def _patched_scores(
    model: LoadedModel, tokens_BL: jax.Array, answers: jax.Array, patches: Patch, values: jax.Array, *, site: str
) -> jax.Array:
    """Return the score_B of each row with its patch. values: the activations of the clean text, [N, 1, L, ...]."""
    layer_NB11 = _is_at(patches.layer, len(values)).T[..., None, None]
    place_BL1 = _is_at(patches.place, values.shape[2])[..., None]
    head_B1H = _is_at(patches.head, model.config.model.num_heads)[:, None]
    chosen_NBLH = layer_NB11 & place_BL1 & head_B1H
    chosen = chosen_NBLH if site == "heads" else chosen_NBLH[..., 0]
    edits = model.edits or editing.NO_EDITS
    edits = edits._replace(**{site: editing.compose(getattr(edits, site), Edit.replace(chosen, values))})
    return answer_scores(dataclasses.replace(model, edits=edits), tokens_BL, answers)


def _is_at(chosen_B: jax.Array, size: int) -> jax.Array:
    return (chosen_B[:, None] == jnp.arange(size)) | (chosen_B[:, None] == ANY)


def patching_figure(effects: Effects, direct_NX: np.ndarray | None, labels: list[str], *, title: str) -> Figure:
    """Return a figure: effects by layer and place for each site, and by layer and head. Layer 0 is at the top.

    direct_NX: what each head adds to the answer's logit on the clean text, and in the last column the feed-forward;
      None: not shown.
    labels: of the places.
    """
    (layers, length), heads = effects.by_place["stream"].shape, effects.heads_NH.shape[1]
    width, height = max(3.5, 1.2 + 0.3 * length), max(2.4, 1.3 + 0.32 * layers)
    if effects.heads_NHL is not None:
        height = max(height, 1.3 + 0.16 * layers * heads)
    figure, grid = new_figure((3 * width, 2 * height), 2, 3, title=title)
    names = {"stream": "Residual stream before the layer", "attention": "Output of attention"}
    names |= {"feed_forward": "Output of the feed-forward"}
    for axes, (site, name) in zip(grid[0], names.items(), strict=True):
        image = _heat_map(axes, effects.by_place[site], 1)
        axes.set(ylabel="layer", yticks=range(layers), title=name)
        _label_places(axes, labels)
    figure.colorbar(image, ax=grid[0], label="share that is restored", shrink=0.9)
    _heat_map(grid[1, 0], effects.heads_NH, 1)
    label_heads(grid[1, 0], layers, heads, "Output of a head, at all places")
    if effects.heads_NHL is None:
        grid[1, 1].set_visible(False)
    else:
        _heat_map(grid[1, 1], effects.heads_NHL.reshape(-1, length), 1)
        rows = [f"{layer}.{head}" for layer, head in np.ndindex(layers, heads)]
        grid[1, 1].set_yticks(range(len(rows)), rows, fontsize=8 if len(rows) <= 24 else 5)
        grid[1, 1].set(ylabel="layer.head", title="Output of a head, at one place")
        _label_places(grid[1, 1], labels)
    if direct_NX is None:
        grid[1, 2].set_visible(False)
    else:
        image = _heat_map(grid[1, 2], direct_NX, float(np.nanmax(np.abs(direct_NX))))
        label_heads(grid[1, 2], layers, heads + 1, "Direct shares of the logit of the first text's answer")
        grid[1, 2].set_xticks(range(heads + 1), [*map(str, range(heads)), "feed-forward"])
        figure.colorbar(image, ax=grid[1, 2], label="nats")
    return figure


def _heat_map(axes: Axes, values_NX: np.ndarray, limit: float) -> Any:
    axes.tick_params(length=0)
    return axes.imshow(values_NX, cmap=colours.SIGNED, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")


def _label_places(axes: Axes, labels: list[str]) -> None:
    count = len(labels)
    axes.set_xticks(range(count), labels, fontsize=8 if count <= 40 else 5, rotation=90 if count > 24 else 0)

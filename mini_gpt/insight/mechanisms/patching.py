"""Activation patching: which activations carry the difference between two texts.

The model reads the corrupted text, but one activation is replaced by the one that it has on the clean text. If the
patched pass predicts as on the clean text, then this activation carries the difference (Meng et al. 2022; Heimersheim
and Nanda 2024).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from mini_gpt.data.batches import in_full_batches
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import colours, observing
from mini_gpt.insight.curves import every, label_heads, new_figure
from mini_gpt.model import editing
from mini_gpt.model.editing import Edit
from mini_gpt.runtime import progress, sharding
from mini_gpt.runtime.errors import UserError

BY_PLACE = ("stream", "attention", "feed_forward")  # sites that are patched by layer and place; the names of `Edits`
MOST_PATCHES = 4096  # of single heads at single places; with more, heads are only patched at all places
SMALLEST_DIFFERENCE = 1e-4  # between the scores of both texts, in nats
ANY = -1  # all places, or all heads
WIDEST, HIGHEST = 8.0, 4.4  # inches of a map
MOST_ROWS = 24  # heads of the map of single heads at single places
TURNED, MOST_LABELS = 24, 60  # places: more have turned labels; with more, not each has one
HEADS_AT_ALL = "Output of a head, at all places"


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
    clean, corrupted: the scores without a patch. float64.
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
    return patch_each(model, [pair])[0]


def patch_each(model: LoadedModel, pairs: Sequence[TextPair]) -> list[Effects]:
    """Return the effects of all patches for each pair, as `patch` does.

    If pairs differ in length, their places do not correspond: only heads at all places are patched.
    """
    sites, single = _by_place(model, pairs)
    return [_effects(model, texts, sites, single=single) for texts in _prepared_each(model, pairs)]


def _effects(model: LoadedModel, texts: "_Prepared", sites: Sequence[str], *, single: bool) -> Effects:
    layers, length = model.config.model.num_layers, texts.corrupted_BL.shape[1]
    every_place, every_head = range(length), range(model.config.model.num_heads)

    def effects(site: str, places: Sequence[int], heads: Sequence[int]) -> np.ndarray:
        scores = []
        patches = [Patch(*patch) for patch in itertools.product(range(layers), places, heads)]
        for count, part in in_full_batches(patches, len(texts.corrupted_BL)):
            put = sharding.put_whole(Patch(*np.array(part, np.int32).T), model.mesh)
            values = getattr(texts.values, site)
            scores += _patched_scores(model, texts.corrupted_BL, texts.answers, put, values, site=site)[:count].tolist()
            progress.advance(count * length)
        shares = (np.array(scores) - texts.corrupted) / (texts.clean - texts.corrupted)
        return shares.reshape(layers, len(places), len(heads))

    return Effects(
        texts.clean,
        texts.corrupted,
        {site: effects(site, every_place, [ANY])[:, :, 0] for site in sites},
        effects("heads", [ANY], every_head)[:, 0],
        effects("heads", every_place, every_head).swapaxes(1, 2) if single else None,
    )


def estimate_each(model: LoadedModel, pairs: Sequence[TextPair]) -> list[Effects]:
    """Return first-order estimates of all that `patch_each` returns, by attribution patching.

    The estimate of a patch is (clean - corrupted activation) · gradient of the score by the activation, in the pass on
    the corrupted text (Nanda 2023; Syed et al. 2023, eq. 2). One backward pass estimates all patches. It is exact where
    the score is linear in the activation. The corrections of AtP* (Kramár et al. 2024) are not made: one is for queries
    and keys, which are no sites here, the other gives no sign.

    Raises the errors of `patch_each`.
    """
    sites, single = _by_place(model, pairs)
    found = []
    for texts, pair in zip(_prepared_each(model, pairs), pairs, strict=True):
        tokens_BL = sharding.put_whole(sharding.pad_rows(pair.corrupted_L[None], model.mesh), model.mesh)
        changes = jax.tree.map(np.subtract, texts.values, activations(model, pair.corrupted_L[None]))
        first_order = jax.device_get(_first_order(model, tokens_BL, texts.answers, changes))
        shares = jax.tree.map(lambda array, whole=texts.clean - texts.corrupted: np.float64(array) / whole, first_order)
        heads_NHL = shares.heads.swapaxes(1, 2)
        by_place = {site: getattr(shares, site) for site in sites}
        found.append(Effects(*texts[:2], by_place, heads_NHL.sum(-1), heads_NHL if single else None))
    return found


@jax.jit
def _first_order(model: LoadedModel, tokens_BL: jax.Array, answers: jax.Array, changes: Activations) -> Activations:
    """Return change · gradient of the score of the first row: heads_NLH, and the others as x_NL. Axis B has size 1."""

    def score(added: Activations) -> jax.Array:
        edits = model.edits or editing.NO_EDITS
        for site, add in added._asdict().items():
            edit = Edit(jnp.ones_like(add, shape=(len(add), *[1] * (add.ndim - 1))), add)
            edits = edits._replace(**{site: editing.compose(getattr(edits, site), edit)})
        return answer_scores(dataclasses.replace(model, edits=edits), tokens_BL, answers)[0]

    gradients = jax.grad(score)(jax.tree.map(jnp.zeros_like, changes))
    products = jax.tree.map(lambda change, gradient: (change * gradient).sum(-1)[:, 0], changes, gradients)
    return sharding.replicate(products, model.mesh)


def cost(model: LoadedModel, pairs: Sequence[TextPair]) -> int:
    """Return the number of tokens that the model processes in `patch_each`."""
    layers, heads = model.config.model.num_layers, model.config.model.num_heads
    sites, single = _by_place(model, pairs)
    lengths = [len(pair.clean_L) for pair in pairs]
    return sum(length * layers * (heads + (len(sites) + heads * single) * length) for length in lengths)


def _by_place(model: LoadedModel, pairs: Sequence[TextPair]) -> tuple[tuple[str, ...], bool]:
    """Return the sites to patch by place, and whether to patch single heads at single places too."""
    lengths = {len(pair.clean_L) for pair in pairs}
    if len(lengths) > 1:
        return (), False
    return BY_PLACE, model.config.model.num_layers * model.config.model.num_heads * lengths.pop() <= MOST_PATCHES


class _Prepared(NamedTuple):
    """What the patches of a pair need. answers: the tokens of both."""

    clean: float
    corrupted: float
    corrupted_BL: jax.Array
    answers: np.ndarray
    values: Activations


def _prepared_each(model: LoadedModel, pairs: Sequence[TextPair]) -> list[_Prepared]:
    return [_prepared(model, pair, "--other" if len(pairs) == 1 else f"pair {n}") for n, pair in enumerate(pairs)]


def _prepared(model: LoadedModel, pair: TextPair, name: str) -> _Prepared:
    answers = np.array([pair.clean_answer, pair.corrupted_answer], np.int32)
    rows = model.rows_at_a_time(len(pair.clean_L), "logits")
    clean_BL, corrupted_BL = (
        sharding.put_whole(np.repeat(tokens_L[None], rows, axis=0), model.mesh) for tokens_L in pair[:2]
    )
    clean, corrupted = (float(answer_scores(model, tokens_BL, answers)[0]) for tokens_BL in (clean_BL, corrupted_BL))
    if abs(clean - corrupted) < SMALLEST_DIFFERENCE:
        remedy = "give texts between which the model's prediction differs"
        raise UserError(f"{name}: found the scores {clean:.4g} and {corrupted:.4g} for the two texts; {remedy}")
    return _Prepared(clean, corrupted, corrupted_BL, answers, activations(model, pair.clean_L[None]))


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

    Single heads at single places: at most MOST_ROWS, those of the largest effects.

    direct_NX: what each head adds to the answer's logit on the clean text, and in the last column the feed-forward;
      None: not shown.
    labels: of the places.
    """
    layers, heads = effects.heads_NH.shape
    names = {"stream": "Residual stream before the layer", "attention": "Output of attention"}
    names |= {"feed_forward": "Output of the feed-forward"}
    maps = [(effects.by_place[site], name) for site, name in names.items() if site in effects.by_place]
    maps += [(effects.heads_NH, HEADS_AT_ALL)]
    chosen = []  # heads
    if effects.heads_NHL is not None:
        largest_X = np.abs(np.nan_to_num(effects.heads_NHL)).max(axis=-1).ravel()
        chosen = sorted(np.argsort(-largest_X, kind="stable")[:MOST_ROWS].tolist())
        count = f"{len(chosen)} heads of the largest effects" if len(chosen) < layers * heads else "Output of a head"
        maps += [(effects.heads_NHL.reshape(layers * heads, -1)[chosen], f"{count}, at one place")]
    columns, rows = min(3, len(maps) + (direct_NX is not None)), math.ceil((len(maps) + (direct_NX is not None)) / 3)
    place = 0.3 if len(labels) <= TURNED else 0.13  # inches
    width = max(3.5, 1.2 + 0.3 * min(heads, 24), min(1.2 + place * len(labels) * bool(effects.by_place), WIDEST))
    height = max(2.4, 1.3 + max(0.18 * len(chosen), min(0.32 * layers, HIGHEST)))
    figure, grid = new_figure((columns * width, rows * height), rows, columns, title=title, squeeze=False)
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, (values, name) in zip(grid.flat, maps, strict=False):
        image = colours.heat_map(axes, values)
        if name == HEADS_AT_ALL:
            label_heads(axes, layers, heads, name)
            continue
        if name in names.values():
            axes.set(ylabel="layer", yticks=range(0, layers, every(layers)), title=name)
        else:
            axes.set(ylabel="layer.head", title=name)
            axes.set_yticks(range(len(chosen)), ["{}.{}".format(*divmod(head, heads)) for head in chosen], fontsize=8)
        ticks = range(0, len(labels), 1 + len(labels) // MOST_LABELS)
        is_turned = len(labels) > TURNED or max(map(len, labels)) > 3
        axes.set_xticks(ticks, [labels[tick] for tick in ticks], fontsize=8, rotation=90 * is_turned)
    figure.colorbar(image, ax=list(grid[0, : len(maps)]), label="share that is restored", shrink=0.9)
    if direct_NX is not None:
        axes = grid.flat[len(maps)]
        axes.set_visible(True)
        colours.heat_map(axes, direct_NX, float(np.nanmax(np.abs(direct_NX))), bar="nats")
        label_heads(axes, layers, heads, "Direct shares of the logit of the first text's answer")
        ticks = range(0, heads, every(heads))
        axes.set_xticks([*ticks, heads], [*map(str, ticks), "\nfeed-forward"])
    return figure

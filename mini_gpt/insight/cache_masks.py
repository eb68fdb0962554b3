"""The mask of a KV cache, as generation computes it: L × L for the prompts, then 1 × S for each new token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from mini_gpt.config import loading
from mini_gpt.data.layout import PLAIN
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.generation import cache as caches
from mini_gpt.insight import colours, images
from mini_gpt.insight.curves import new_figure
from mini_gpt.model import build
from mini_gpt.model.attention.context import Coordinates, Mask
from mini_gpt.runtime import sharding

LENGTHS, WINDOW, STEPS = (3, 5), 4, 4  # tokens of two prompts, keys of the second layer, new tokens
VOCABULARY = 8
SEEN, UNSEEN = images.WEIGHTS[4], images.WEIGHTS[1]


class Masks(NamedTuple):
    """The masks of a layer. T: new tokens.

    prompt_BLL: of the prompts, padded on the right.
    visible_BTS: which of the S slots each new token sees.
    indices_BTS: the index of the token in each slot at that step; below 0: an empty slot.
    """

    window: int | None
    prompt_BLL: np.ndarray
    visible_BTS: np.ndarray
    indices_BTS: np.ndarray


@functools.cache
def masks() -> list[Masks]:
    """Return the masks of two layers, one with a window, while two prompts get new tokens."""
    fields: dict[str, Any] = {
        "context_length": max(LENGTHS) + STEPS,
        "model.num_layers": 2,
        "model.d_model": 8,
        "model.num_heads": 1,
    }
    fields |= {"model.attention_window": (None, WINDOW), "model.dtype": "float32"}
    config = loading.from_dict(loading.flatten(loading.defaults()) | fields)
    definition, parameters = build.split(build.make(config.model, VOCABULARY, rngs=nnx.Rngs(0)))
    mesh = sharding.make_reading_mesh(1, 1)
    model = LoadedModel(parameters, definition, config, mesh, config.batch_tokens, PLAIN)
    steps = _steps(model, np.zeros((len(LENGTHS), max(LENGTHS)), np.int32), config.context_length)
    found = []
    for layer, kind in enumerate(config.model.layer_kinds):
        mask = Mask(True, kind.window)
        rows = Coordinates.of(max(LENGTHS))
        prompt_BLL = np.repeat(np.asarray(mask.visible(rows, rows)), len(LENGTHS), axis=0)
        new = [
            (Coordinates(lengths_B[:, None] - 1, lengths_B[:, None] - 1), slots[layer]) for lengths_B, slots in steps
        ]
        visible_BTS = np.concatenate([mask.visible(query, keys) for query, keys in new], axis=1)
        filled = [np.where(keys.indices_BL > query.indices_BL, -1, keys.indices_BL) for query, keys in new]
        found.append(Masks(kind.window, prompt_BLL, visible_BTS, np.stack(filled, axis=1)))
    return found


@functools.partial(jax.jit, static_argnums=2)
def _steps(model: LoadedModel, tokens_BL: jax.Array, capacity: int) -> list[tuple[jax.Array, list[Coordinates]]]:
    """Return, after each new token, the lengths of the rows and the tokens in the slots of each layer."""
    cache: Any = caches.prefill(model, tokens_BL, jnp.array(LENGTHS), capacity)[1]
    after = []
    for _ in range(STEPS):
        written, cache = cache.written, caches.decode(model, tokens_BL[:, 0], cache)[1]
        sizes = [kept.keys_XSK.shape[1] for kept in cache.layers]
        after.append((cache.lengths_B, [caches.slots_of(cache.tokens, written, size) for size in sizes]))
    return after


def figure() -> Figure:
    """Return a figure: a row for each prompt; for each layer, the mask of the prompt beside those of new tokens."""
    layers = masks()
    widths = [shape[-1] for layer in layers for shape in (layer.prompt_BLL.shape, layer.visible_BTS.shape)]
    title = "The mask of a KV cache. Blue: the query sees the key. Hatched: padding, or an empty slot"
    drawn, grid = new_figure((13.5, 6.2), len(LENGTHS), len(widths), title=title, width_ratios=widths)
    for row, length in enumerate(LENGTHS):
        for layer, (left, right) in zip(layers, grid[row].reshape(-1, 2), strict=True):
            keys = "all keys" if layer.window is None else f"window {layer.window}"
            places = np.arange(layer.prompt_BLL.shape[-1])
            own_LL = np.broadcast_to(np.where(places < length, places, -1), layer.prompt_BLL.shape[1:])
            _draw(
                left, layer.prompt_BLL[row] & (places < length)[:, None], np.where(places[:, None] < length, own_LL, -1)
            )
            left.set(title=f"prompt, {keys}\n{len(places)} × {len(places)}", ylabel="query", xlabel="key")
            left.set_yticks(places, [str(n) if n < length else "pad" for n in places])
            _draw(right, layer.visible_BTS[row], layer.indices_BTS[row])
            slots = layer.visible_BTS.shape[-1]
            ring = ", a ring" if layer.window is not None else ""
            right.set(title=f"new tokens, {keys}\n1 × {slots} each{ring}", xlabel="slot (number: its token)")
            right.set_yticks(range(STEPS), [f"token {length + step}" for step in range(STEPS)])
        grid[row][0].set_ylabel(f"prompt of {length} tokens\nquery")
    return drawn


def _draw(axes: Axes, visible_LS: np.ndarray, indices_LS: np.ndarray) -> None:
    """Plot which cells are seen; a cell has the index of its key, or hatching without one."""
    cells_LS = np.ma.masked_array(visible_LS.astype(int), indices_LS < 0)
    axes.patch.set(hatch="////", edgecolor=colours.HATCHING, linewidth=0)
    axes.imshow(cells_LS, cmap=ListedColormap([UNSEEN, SEEN]), vmin=0, vmax=1)
    for (query, slot), index in np.ndenumerate(indices_LS):
        if index >= 0:
            colour = "white" if visible_LS[query, slot] else "black"
            axes.text(slot, query, str(index), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(indices_LS.shape[1]))
    axes.tick_params(length=0)

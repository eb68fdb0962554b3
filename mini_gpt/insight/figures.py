"""Figures of positional encodings before and after training."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from mini_gpt.config import attention
from mini_gpt.config.model import ModelConfig
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.insight import colours, encodings, images
from mini_gpt.insight.curves import COLOURS, finish, new_figure
from mini_gpt.insight.encodings import Curves
from mini_gpt.model.positions.absolute import InputEncoding, Learned, Sinusoidal
from mini_gpt.model.positions.biases import T5, Alibi, alibi_slopes, t5_bucket
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.model.positions.waves import geometric_frequencies, rope_frequencies
from mini_gpt.runtime import sharding

MOST_PANELS = 12  # of an encoding with other parameters in each layer


def model_figures(name: str, model: LoadedModel, tokens: np.ndarray) -> dict[str, Figure]:
    """Return {name: figure} of a model's positional encodings; of the decoder's if there are two stacks.

    tokens: of a text whose embeddings and positions are shown.
    """
    config, by_name = model.config.model, {}
    layers = encodings.of_layers(model)
    used = {type(encoding): encoding for layer in layers for encoding in layer}
    if Sinusoidal in used:
        by_name["sinusoids"] = sinusoids(config)
    if Rope in used:
        by_name["rope"] = rope(config)
    if used.keys() & {Alibi, T5}:
        t5 = used.get(T5)
        by_name["biases"] = biases(config, None if t5 is None else np.asarray(t5.bias_table[...]))
    learned = used.get(Learned)
    by_name["similarity"] = similarity(config, None if learned is None else np.asarray(learned.embedding[...]))
    by_name |= other_encodings(layers, config)
    if found := encodings.places(model, tokens):
        by_name[f"place_{found[0].name}"] = _curves_figure(found[:MOST_PANELS], np.arange(len(tokens)))
    for encoding in (encoding for encoding in used.values() if isinstance(encoding, InputEncoding)):
        factor = config.d_model**0.5 if config.scale_embeddings else 1
        x_LD = factor * sharding.to_host(model.parameters["embedding"], model.mesh)[tokens]
        title = f"{name}: embeddings x, positions p, and the terms of (x+p)ᵀ(y+p′)"
        positions_1L = model.layout.positions_and_segments(config, jnp.asarray(tokens)[None])[0]
        places_L = jnp.arange(len(tokens)) if positions_1L is None else positions_1L[0]
        p_LD = np.asarray(encoding.vectors(places_L, config.d_model))
        sum_LD = encoding.embed(jnp.asarray(x_LD)[None], places_L[None])[0]
        x_LD = np.asarray(sum_LD) - p_LD  # without columns that p replaces
        by_name["sums"] = sums(x_LD, p_LD, [""] * len(tokens), title=title)
    return by_name


def other_encodings(layers: list[list[Any]], config: ModelConfig, length: int = 160) -> dict[str, Figure]:
    """Return a figure of each encoding that has none of its own: what it computes, by distance, in each layer.

    layers: as `encodings.of_layers` returns them.
    """
    distances_S = np.arange(0 if config.causal else 1 - length, length)
    by_name: dict[str, list[Curves]] = {}
    for found in encodings.curves(layers, config, distances_S):
        by_name.setdefault(f"{found.kind}_{found.name}", []).append(found)
    return {name: _curves_figure(found[:MOST_PANELS], distances_S) for name, found in by_name.items()}


def _curves_figure(found: list[Curves], distances_S: np.ndarray) -> Figure:
    """Plot the curves of one encoding, with a panel for layers that have equal curves."""
    columns = min(len(found), 4)
    rows = -(-len(found) // columns)
    name, kind, meaning, *_ = found[0]
    size, title = (1.5 + 5.6 * columns, 4.3 * rows), f"{name}: {meaning}"
    figure, grid = new_figure(size, rows, columns, title=title, sharex=True, sharey=True, squeeze=False)
    named = {"similarity": "distance (tokens)", "place": "token"}
    xlabel = named.get(kind, "distance to the left (tokens)")
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, of_layers in zip(grid.flat, found, strict=False):
        for head, (label, values_S) in enumerate(zip(of_layers.labels, of_layers.values_HS, strict=True)):
            is_gap = np.pad(np.isnan(values_S), 1, constant_values=True)
            is_alone = is_gap[:-2] & ~is_gap[1:-1] & is_gap[2:]  # no line can show these
            style: Any = {"marker": ".", "markevery": is_alone} if is_alone.any() else {}
            axes.plot(distances_S, values_S, label=label, linestyle="-" if head < COLOURS else "--", **style)
        layers = f"layer{'s' if len(of_layers.layers) > 1 else ''} {', '.join(map(str, of_layers.layers))}"
        finish(axes, xlabel=xlabel, ylabel=meaning, title=layers)
        ncols = -(-len(of_layers.values_HS) // 16)  # at most 16 heads fit below each other
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5), ncols=ncols)
    return figure


def initial_table(encoding: str, config: ModelConfig, length: int) -> np.ndarray:
    """Return table_LD, the vectors that an encoding adds to the embeddings before training."""
    position: Any = attention.encoding(encoding)(config, rngs=nnx.Rngs(0))
    return np.asarray(position.vectors(jnp.arange(length), config.d_model))


def sinusoids(config: ModelConfig, length: int = 128) -> Figure:
    """Plot the table, four of its dimensions, and the wavelength of every pair (Vaswani et al. 2017, 3.5)."""
    encoding = Sinusoidal(config, rngs=nnx.Rngs(0))
    width = encoding.width
    table_LD = initial_table("sinusoidal", config, length)[:, -width:] / encoding.amplitude
    title = f"Sinusoidal positions, width {width}, base {encoding.base:,g}"
    figure, (heat, bands, waves) = new_figure((3 * 5.0, 4.3), 1, 3, title=title)
    colours.heat_map(heat, table_LD, bar="value")
    heat.set(xlabel="dimension", ylabel="position (tokens)", title="The table: sines at even dimensions")
    pairs = [0, width // 8, width // 4, 3 * width // 8]
    for number, pair in enumerate(pairs):
        period = 2 * math.pi * encoding.base ** (2 * pair / width)
        bands.plot(table_LD[:, 2 * pair] - 2.4 * number, label=f"dimension {2 * pair}: {period:,.1f} tokens")
    bands.set(xlabel="position (tokens)", yticks=[], ylim=(-2.4 * len(pairs) + 0.9, 4.2))
    bands.set_title("Four dimensions, with their wavelengths")
    bands.legend(frameon=False, fontsize=8, loc="upper right")
    bands.spines[["top", "right", "left"]].set_visible(False)
    longest = 2 * math.pi * encoding.base
    wavelengths_P = 2 * math.pi / np.array(encoding.frequencies)
    waves.semilogy(np.arange(0, width, 2), wavelengths_P, marker=".", linewidth=1)
    first, last = wavelengths_P[0], wavelengths_P[-1]
    for text, xy, shift, style in (
        (f"{first:,.{2 if first < 100 else 0}f}", (0, first), (6, -3), {"ha": "left"}),
        (f"{last:,.{2 if last < 100 else 0}f}", (width - 2, last), (-8, -4), {"ha": "right"}),
        ("2π·base, which no pair reaches", (0, longest), (2, 4), {"color": "dimgrey"}),
    ):
        waves.annotate(text, xy, xytext=shift, textcoords="offset points", fontsize=9, **style)
    waves.set_ylim(top=3 * longest)
    waves.axhline(longest, color="grey", linestyle="--", linewidth=1)
    finish(waves, xlabel="dimension", ylabel="wavelength (tokens)", title="2π·base^(2i/width)")
    return figure


def similarity(config: ModelConfig, trained: np.ndarray | None = None, length: int = 128) -> Figure:
    """Plot the similarity of two positions by distance, for most encodings. trained: a learned table_PD."""
    figure, (added, inside) = new_figure((2 * 5.6, 4.3), 1, 2, title="Similarity of two positions by distance")
    distance = np.arange(length)
    frequencies = geometric_frequencies(config.sinusoidal.base, config.d_model)
    waves = np.cos(np.outer(distance, frequencies)).mean(axis=1)
    added.plot(distance, waves, label="sinusoidal: depends only on the distance")
    table_PD = initial_table("learned", config, config.max_positions or length) if trained is None else trained
    cosines = images.cosines(table_PD)
    reach = min(length, len(table_PD) // 2)
    diagonals = [np.diagonal(cosines, offset) for offset in range(reach)]
    mean, low, high = np.array([(values.mean(), *np.quantile(values, [0.1, 0.9])) for values in diagonals]).T
    name = "before training" if trained is None else "trained"
    added.plot(distance[:reach], mean, color="C1", label=f"learned, {name}: mean, and the central 80% of pairs")
    added.fill_between(distance[:reach], low, high, color="C1", alpha=0.2, linewidth=0)
    added.set_ylim(min(-0.3, low.min()), 1.45)
    finish(added, xlabel="distance (tokens)", ylabel="cosine of two positions", title="Added to the embeddings")
    frequencies = rope_frequencies(config.rope.of_first_layer, config.rotated_width)
    by_rope = np.cos(np.outer(distance, frequencies)).mean(axis=1)
    inside.plot(distance, by_rope, color="C2", label="RoPE: score of equal vectors")
    for head, slope in enumerate(alibi_slopes(config.num_heads, config.alibi_exponent)):
        style = {"color": "C3", "alpha": 1 - 0.75 * head / config.num_heads, "linewidth": 1}
        label = None if head else "ALiBi: factor exp(-slope·distance), one line per head"
        inside.plot(distance, np.exp(-slope * distance), **style, label=label)
    inside.axhline(1, color="grey", linestyle="--", linewidth=1, label="none")
    inside.set_ylim(-0.3, 1.6)
    finish(inside, xlabel="distance (tokens)", ylabel="relative to distance 0", title="Inside attention")
    return figure


def rope(config: ModelConfig) -> Figure:
    """Plot the rotation of two pairs, and the scores with RoPE and with added sinusoids against the offset."""
    first_layer = dataclasses.replace(config, rope=config.rope.of_first_layer)
    encoding, width = Rope(first_layer, rngs=nnx.Rngs(0)), config.rotated_width
    title = f"RoPE on heads of {config.head_width} dimensions: a unit vector at positions 0 to 7, and scores by offset"
    figure, (fast, slow, score) = new_figure((3 * 4.6, 4.3), 1, 3, title=title)
    _plot_rotation(fast, encoding, 0)
    _plot_rotation(slow, encoding, width // 8)
    random, offsets = np.random.default_rng(0), np.arange(65)
    (q, k), (q_D, k_D) = (_similar_vectors(random, size) for size in (width, config.d_model))
    waves_LD = initial_table("sinusoidal", config, 500)
    waves_LD = waves_LD / np.linalg.norm(waves_LD, axis=1, keepdims=True)

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        return np.asarray(encoding.rotate(jnp.asarray(x)[None, None, None], jnp.array([[position]])))[0, 0, 0]

    def by_rope(start: int) -> list[float]:
        return [rotated(q, start + int(offset)) @ rotated(k, start) for offset in offsets]

    def by_waves(start: int) -> np.ndarray:
        return (q_D + waves_LD[np.minimum(start + offsets, 499)]) @ (k_D + waves_LD[start])

    for name, colour, scores in (("RoPE", "C0", by_rope), ("sinusoids added", "C1", by_waves)):
        for start, linestyle, linewidth in ((0, "-", 1.2), (100, "--", 2), (400, ":", 3)):
            style: Any = {"linestyle": linestyle, "linewidth": linewidth}
            score.plot(offsets, scores(start), color=colour, label=f"{name}, key at {start}", **style)
    score.set(ylim=(None, 1.55 * score.get_ylim()[1]), title="RoPE depends only on the offset")
    finish(score, xlabel="offset of the query (tokens)", ylabel="score of a query and a similar key")
    score.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def _plot_rotation(axes: Axes, encoding: Rope, pair: int) -> None:
    """Plot a unit vector of one pair of dimensions at the first eight positions."""
    partner = pair + encoding.width // 2
    unit_BLHK = np.zeros((1, 8, 1, encoding.width), np.float32)
    unit_BLHK[..., pair] = 1
    rotated_LK = np.asarray(encoding.rotate(jnp.asarray(unit_BLHK), jnp.arange(8)[None]))[0, :, 0]
    for position, (x, y) in enumerate(rotated_LK[:, [pair, partner]]):
        arrow = {"arrowstyle": "-|>", "color": "C0", "alpha": 0.3 + 0.1 * position}
        axes.annotate("", (x, y), (0, 0), arrowprops=arrow)
        axes.text(1.13 * x, 1.13 * y, str(position), ha="center", va="center", fontsize=9)
    axes.add_patch(Circle((0, 0), 1, fill=False, color="grey", alpha=0.4))
    axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", xlabel=f"dimension {pair}", xticks=[], yticks=[])
    radians = encoding.frequencies[pair]
    axes.set(ylabel=f"dimension {partner}", title=f"Pair {pair}: {radians:.3g} radians per token")
    axes.spines[:].set_visible(False)


def _similar_vectors(random: np.random.Generator, width: int) -> np.ndarray:
    q, other = (x / np.linalg.norm(x) for x in random.normal(size=(2, width)).astype(np.float32))
    return np.stack([q, q + 0.3 * other])


def biases(config: ModelConfig, t5_table: np.ndarray | None = None, length: int = 160) -> Figure:
    """Plot the biases of ALiBi and T5 against distance. Without t5_table[bucket, H], plot T5's buckets."""
    figure, (alibi, t5) = new_figure((2 * 5.4, 4.3), 1, 2, title="Biases that are added to the attention logits")
    distance = np.arange(length)
    encoding = Alibi(config, rngs=nnx.Rngs(0))
    bias_BHLS = np.asarray(encoding.bias(jnp.full((1, 1), length - 1), (length - 1 - jnp.asarray(distance))[None]))
    for head, bias in enumerate(bias_BHLS[0, :, 0]):
        alibi.plot(distance, bias, label=f"head {head}: slope {encoding.slopes[head]:.4g}")
    alibi.set_ylim(-12, 0.5)
    finish(alibi, xlabel="distance (tokens)", ylabel="bias of the logit", title="ALiBi: fixed, one slope per head")
    alibi.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    buckets = t5_buckets(config, length)
    if t5_table is None:
        t5.plot(distance, buckets, drawstyle="steps-post", color="C4")
        finish(t5, xlabel="distance (tokens)", ylabel="bucket", title="T5: distances that share a learned bias")
    else:
        for head, bias_of_bucket in enumerate(t5_table.T):
            t5.plot(distance, bias_of_bucket[buckets], drawstyle="steps-post", label=f"head {head}")
        title = "T5: learned, for each bucket and head"
        finish(t5, xlabel="distance to the left (tokens)", ylabel="bias of the logit", title=title)
    return figure


def t5_buckets(config: ModelConfig, length: int) -> np.ndarray:
    """Return T5's bucket of each distance to the left, from 0 to length - 1."""
    num_buckets = config.t5.num_buckets if config.causal else config.t5.num_buckets // 2
    most = config.t5.max_distance
    return np.asarray(t5_bucket(-jnp.arange(length), causal=True, num_buckets=num_buckets, max_distance=most))


def sums(x_LD: np.ndarray, p_LD: np.ndarray, words: list[str], *, title: str) -> Figure:
    """Plot embeddings X, positions P and X + P on one colour scale, and the terms of (x+p)ᵀ(y+p′) on another."""
    figure, (top, bottom) = new_figure((4 * 3.6, 2 * 3.1 + 0.4), 2, 4, title=title)
    sum_LD = x_LD + p_LD
    limit = np.abs([x_LD, p_LD, sum_LD]).max()
    shown = {"X: embeddings": x_LD, "P: positions": p_LD, "X + P": sum_LD}
    for axes, (name, values_LD) in zip(top, shown.items(), strict=False):
        image = colours.heat_map(axes, values_LD, limit)
        axes.set(title=f"{name} (rms {np.sqrt(np.mean(values_LD**2)):.3g})", xlabel="dimension")
        _label_words(axes, words)
    figure.colorbar(image, ax=top[:3], label="value", shrink=0.85, pad=0.01)
    weights_LL = jax.nn.softmax(jnp.asarray(sum_LD @ sum_LD.T / math.sqrt(x_LD.shape[1])))
    image = colours.show_weights(top[3], np.asarray(weights_LL))
    colours.weight_bar(figure, image, top[3], shrink=0.85)
    top[3].set(title="softmax of (x+p)ᵀ(y+p′)/√d")
    terms = {"xᵀy": x_LD @ x_LD.T, "xᵀp′": x_LD @ p_LD.T, "pᵀy": p_LD @ x_LD.T, "pᵀp′": p_LD @ p_LD.T}
    limit = max(np.abs(term).max() for term in terms.values())
    for axes, (name, term_LL) in zip(bottom, terms.items(), strict=True):
        image = colours.heat_map(axes, term_LL, limit)
        axes.set_aspect("equal")
        axes.set(title=f"{name}: rms {np.sqrt(np.mean(term_LL**2)):.3g}")
    for axes in (top[3], *bottom):
        _label_words(axes, words, columns=True)
    figure.colorbar(image, ax=bottom, label="dot product", shrink=0.85, pad=0.01)
    return figure


def _label_words(axes: Axes, words: list[str], *, columns: bool = False) -> None:
    """Label the rows, and with `columns` the columns too; with positions if there are no words, or more than 24."""
    if len(words) > 24 or not any(words):
        axes.set(ylabel="position (tokens)", **({"xlabel": "position (tokens)"} if columns else {}))
        return
    axes.set_yticks(range(len(words)), words, fontsize=8)
    if columns:
        axes.set_xticks(range(len(words)), words, fontsize=8, rotation=90)
    axes.tick_params(length=0)

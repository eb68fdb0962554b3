"""Figures of positional encodings, drawn from the encodings that train."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from mini_gpt.config.schema import ModelConfig
from mini_gpt.insight import images
from mini_gpt.insight.curves import finish
from mini_gpt.model import positions
from mini_gpt.model.positions import Position

SIGNED = {"cmap": "RdBu_r", "interpolation": "nearest"}


def sinusoids(config: ModelConfig, length: int = 128) -> Figure:
    """Draw the table, some of its dimensions, and the wavelength of every pair (Vaswani et al. 2017, 3.5)."""
    encoding, width = positions.Sinusoidal(config, rngs=nnx.Rngs(0)), config.d_model
    table_LD = table_of(encoding, length, width) / encoding.amplitude
    figure, ((heat, bands, waves),) = _grid(3, title=f"Sinusoidal positions, width {width}, base {encoding.base:,g}")
    image = heat.imshow(table_LD, aspect="auto", vmin=-1, vmax=1, **SIGNED)
    heat.set(xlabel="dimension", ylabel="position (tokens)", title="The table: sines at even dimensions")
    figure.colorbar(image, ax=heat, shrink=0.8)
    pairs = [0, width // 8, width // 4, 3 * width // 8]
    for number, pair in enumerate(pairs):
        period = 2 * math.pi * encoding.base ** (2 * pair / width)
        bands.plot(table_LD[:, 2 * pair] - 2.4 * number, label=f"dimension {2 * pair}: {period:,.1f} tokens")
    bands.set(xlabel="position (tokens)", yticks=[], title="Four bands, with their wavelengths")
    bands.legend(frameon=False, fontsize=8, loc="upper right")
    bands.set_ylim(-2.4 * len(pairs) + 0.9, 4.2)
    bands.spines[["top", "right", "left"]].set_visible(False)
    longest = 2 * math.pi * encoding.base
    wavelengths_P = 2 * math.pi / positions.geometric_frequencies(encoding.base, width)
    waves.semilogy(np.arange(0, width, 2), wavelengths_P, marker=".", linewidth=1)
    note = lambda text, xy, shift, **style: waves.annotate(
        text, xy, xytext=shift, textcoords="offset points", **{"fontsize": 9} | style
    )
    first, last = wavelengths_P[0], wavelengths_P[-1]
    note(f"{first:,.{2 if first < 100 else 0}f}", (0, first), (6, -3), ha="left")
    note(f"{last:,.{2 if last < 100 else 0}f}", (width - 2, last), (-6, 4), ha="right")
    waves.axhline(longest, color="grey", linestyle="--", linewidth=1)
    note("2π·base, which no pair reaches", (0, longest), (2, 4), color="grey", fontsize=8)
    waves.set(xlabel="dimension", ylabel="wavelength (tokens)", title="2π·base^(2i/width)")
    finish(waves)
    return figure


def similarity(config: ModelConfig, trained: np.ndarray | None = None, length: int = 128) -> Figure:
    """Draw the similarity of two positions against their distance, for each encoding. trained: a learned table_PD."""
    figure, ((added, inside),) = _grid(2, width=5.6, title="How an encoding tells near from far")
    distance = np.arange(length)
    score = lambda frequencies: np.cos(np.outer(distance, frequencies)).mean(axis=1)
    waves = score(positions.geometric_frequencies(config.sinusoidal.base, config.d_model))
    added.plot(distance, waves, label="sinusoidal: the same from any position")
    table_PD = trained
    if table_PD is None:
        table_PD = table_of(positions.Learned(config, rngs=nnx.Rngs(0)), config.max_positions or length, config.d_model)
    cosines = images.cosines(table_PD)
    reach = min(length, len(table_PD) // 2)
    diagonals = [np.diagonal(cosines, offset) for offset in range(reach)]
    mean, low, high = np.array([(values.mean(), *np.quantile(values, [0.1, 0.9])) for values in diagonals]).T
    name = "before training" if trained is None else "trained"
    added.plot(distance[:reach], mean, color="C1", label=f"learned, {name}: mean, and 80% of all pairs")
    added.fill_between(distance[:reach], low, high, color="C1", alpha=0.2, linewidth=0)
    added.set(xlabel="distance (tokens)", ylabel="cosine of two positions", title="Added to the embeddings")
    added.set_ylim(min(-0.3, low.min()), 1.45)
    finish(added)
    rope = score(positions.rope_frequencies(config.rope, config.rotated_width))
    inside.plot(distance, rope, color="C2", label="RoPE: score of equal vectors")
    for head, slope in enumerate(positions.alibi_slopes(config.num_heads)):
        style = {"color": "C3", "alpha": 1 - 0.75 * head / config.num_heads, "linewidth": 1}
        label = None if head else "ALiBi: factor exp(-slope·distance), one line per head"
        inside.plot(distance, np.exp(-slope * distance), **style, label=label)
    inside.axhline(1, color="grey", linestyle="--", linewidth=1, label="none")
    inside.set(xlabel="distance (tokens)", ylabel="relative to distance 0", title="Inside attention")
    inside.set_ylim(-0.3, 1.6)
    finish(inside)
    return figure


def rope(config: ModelConfig) -> Figure:
    """Draw the rotation of two pairs, and scores against offset: for RoPE the same from any position."""
    encoding, width = positions.Rope(config, rngs=nnx.Rngs(0)), config.rotated_width
    figure, ((fast, slow, score),) = _grid(3, width=4.6, title=f"RoPE on heads of {config.head_width} dimensions")
    for axes, pair in ((fast, 0), (slow, width // 8)):
        _draw_rotation(axes, encoding, pair)
    random, offsets = np.random.default_rng(0), np.arange(65)
    (q, k), (q_D, k_D) = (_similar_vectors(random, size) for size in (width, config.d_model))
    waves_LD = table_of(positions.Sinusoidal(config, rngs=nnx.Rngs(0)), 500, config.d_model)
    waves_LD = waves_LD / np.linalg.norm(waves_LD, axis=1, keepdims=True)

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        return np.asarray(encoding.rotate(jnp.asarray(x)[None, None, None], jnp.array([[position]])))[0, 0, 0]

    for number, start in enumerate((0, 100, 400)):
        by_rope = [rotated(q, start + int(offset)) @ rotated(k, start) for offset in offsets]
        style = {"linestyle": ("-", "--", ":")[number], "linewidth": (1.2, 2, 3)[number]}
        score.plot(offsets, by_rope, color="C0", label=f"RoPE, key at {start}", **style)
        by_waves = (q_D + waves_LD[np.minimum(start + offsets, 499)]) @ (k_D + waves_LD[start])
        score.plot(offsets, by_waves, color="C1", label=f"sinusoids added, key at {start}", **style)
    score.set(xlabel="offset of the query (tokens)", ylabel="score of a query and a similar key")
    score.set_title("RoPE depends only on the offset")
    score.set_ylim(top=1.55 * score.get_ylim()[1])
    finish(score)
    score.legend(frameon=False, fontsize=7.5, ncols=2)
    return figure


def _draw_rotation(axes: Axes, encoding: positions.Rope, pair: int) -> None:
    """Draw a unit vector of one pair of dimensions at the first eight positions."""
    partner = pair + encoding.width // 2
    unit_BLHK = np.zeros((1, 8, 1, encoding.width), np.float32)
    unit_BLHK[..., pair] = 1
    rotated_LK = np.asarray(encoding.rotate(jnp.asarray(unit_BLHK), jnp.arange(8)[None]))[0, :, 0]
    for position, (x, y) in enumerate(rotated_LK[:, [pair, partner]]):
        style = {"arrowstyle": "-|>", "color": "C0", "alpha": 0.3 + 0.1 * position}
        axes.annotate("", (x, y), (0, 0), arrowprops=style)
        axes.text(1.13 * x, 1.13 * y, str(position), ha="center", va="center", fontsize=9)
    axes.add_patch(Circle((0, 0), 1, fill=False, color="grey", alpha=0.4))
    axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", xlabel=f"dimension {pair}", xticks=[], yticks=[])
    radians = encoding.frequencies[pair]
    axes.set(ylabel=f"dimension {partner}", title=f"Pair {pair}: {radians:.3g} radians a token")
    axes.spines[:].set_visible(False)


def _similar_vectors(random: np.random.Generator, width: int) -> np.ndarray:
    """Return a unit vector and a similar one."""
    q, other = (x / np.linalg.norm(x) for x in random.normal(size=(2, width)).astype(np.float32))
    return np.stack([q, q + 0.3 * other])


def biases(config: ModelConfig, t5_table: np.ndarray | None = None, length: int = 160) -> Figure:
    """Draw ALiBi's biases and T5's buckets against distance; with t5_table[bucket, H], T5's biases."""
    figure, ((alibi, t5),) = _grid(2, width=5.4, title="Biases that are added to the attention logits")
    distance = np.arange(length)
    encoding = positions.Alibi(config, rngs=nnx.Rngs(0))
    bias_BHLS = np.asarray(encoding.bias(jnp.full((1, 1), length - 1), (length - 1 - jnp.asarray(distance))[None]))
    for head, bias in enumerate(bias_BHLS[0, :, 0]):
        alibi.plot(distance, bias, label=f"head {head}: slope {encoding.slopes[head]:.4g}")
    alibi.set(xlabel="distance (tokens)", ylabel="bias", title="ALiBi: fixed, one slope per head", ylim=(-12, 0.5))
    finish(alibi)
    buckets = t5_buckets(config, length)
    if t5_table is None:
        t5.plot(distance, buckets, drawstyle="steps-post", color="C4")
        t5.set(xlabel="distance (tokens)", ylabel="bucket", title="T5: distances that share a learned bias")
    else:
        for head, bias_of_bucket in enumerate(t5_table.T):
            t5.plot(distance, bias_of_bucket[buckets], drawstyle="steps-post", label=f"head {head}")
        t5.set(xlabel="distance to the left (tokens)", ylabel="bias", title="T5: learned, for each bucket and head")
    finish(t5)
    return figure


def t5_buckets(config: ModelConfig, length: int) -> np.ndarray:
    """Return T5's bucket of each distance to the left, from 0 to length - 1."""
    num_buckets = config.t5.num_buckets if config.causal else config.t5.num_buckets // 2
    buckets_L = positions.t5_bucket(
        -jnp.arange(length), causal=True, num_buckets=num_buckets, max_distance=config.t5.max_distance
    )
    return np.asarray(buckets_L)


def sums(x_LD: np.ndarray, p_LD: np.ndarray, words: list[str], *, title: str) -> Figure:
    """Draw embeddings X, positions P and X + P with one scale, and the four terms of (x+p)ᵀ(y+p′) with another."""
    figure, (top, bottom) = _grid(4, rows=2, width=3.6, height=3.1, title=title)
    sum_LD = x_LD + p_LD
    limit = np.abs([x_LD, p_LD, sum_LD]).max()
    shown = {"X: embeddings": x_LD, "P: positions": p_LD, "X + P": sum_LD}
    for axes, (name, values_LD) in zip(top, shown.items(), strict=False):
        image = axes.imshow(values_LD, aspect="auto", vmin=-limit, vmax=limit, **SIGNED)
        axes.set(title=f"{name} (rms {np.sqrt(np.mean(values_LD**2)):.3g})", xlabel="dimension")
        _label_words(axes, words)
    figure.colorbar(image, ax=top[:3], shrink=0.85, pad=0.01)
    weights_LL = jax.nn.softmax(jnp.asarray(sum_LD @ sum_LD.T / math.sqrt(x_LD.shape[1])), axis=-1)
    top[3].imshow(np.asarray(weights_LL), cmap="magma", vmin=0, interpolation="nearest")
    top[3].set(title="softmax of (x+p)ᵀ(y+p′)/√d")
    terms = {"xᵀy": x_LD @ x_LD.T, "xᵀp′": x_LD @ p_LD.T, "pᵀy": p_LD @ x_LD.T, "pᵀp′": p_LD @ p_LD.T}
    limit = max(np.abs(term).max() for term in terms.values())
    for axes, (name, term_LL) in zip(bottom, terms.items(), strict=True):
        image = axes.imshow(term_LL, vmin=-limit, vmax=limit, **SIGNED)
        axes.set(title=f"{name}: rms {np.sqrt(np.mean(term_LL**2)):.3g}")
    for axes in (top[3], *bottom):
        _label_words(axes, words, columns=True)
    figure.colorbar(image, ax=bottom, shrink=0.85, pad=0.01)
    return figure


def table_of(encoding: Position, length: int, width: int) -> np.ndarray:
    """Return table_LD: what an encoding adds to the embeddings at each position."""
    return np.asarray(encoding.embed(jnp.zeros((1, length, width)), jnp.arange(length)[None])[0])


def _grid(columns: int, *, rows: int = 1, width: float = 5.0, height: float = 3.9, title: str):
    figure = Figure(figsize=(width * columns, height * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _label_words(axes: Axes, words: list[str], *, columns: bool = False) -> None:
    """Label rows, and columns if asked, with the words if they are few enough to read."""
    words = words if len(words) <= 24 else []
    axes.set_yticks(range(len(words)), words, fontsize=8)
    if columns:
        axes.set_xticks(range(len(words)), words, fontsize=8, rotation=90)
    axes.tick_params(length=0)

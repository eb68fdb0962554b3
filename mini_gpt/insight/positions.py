"""Figures of positional encodings, drawn from the encodings that train."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.insight import images
from mini_gpt.insight.curves import finish
from mini_gpt.model import positions
from mini_gpt.model.positions import Position


def _grid(columns: int, *, rows: int = 1, width: float = 5.0, height: float = 3.9, title: str = ""):
    figure = Figure(figsize=(width * columns, height * rows + 0.4 * bool(title)), layout="constrained")
    if title:
        figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def table_of(encoding: Position, length: int, width: int) -> np.ndarray:
    """Gives table_LD: what an encoding adds to the embeddings at each position."""
    return np.asarray(encoding.embed(jnp.zeros((1, length, width)), jnp.arange(length)[None])[0])


def sinusoids(config: ModelConfig, length: int = 128) -> Figure:
    """Draws the table, some of its dimensions, and the wavelength of every pair (Vaswani et al. 2017, 3.5)."""
    encoding, width = positions.Sinusoidal(config, rngs=nnx.Rngs(0)), config.d_model
    table_LD = table_of(encoding, length, width) / encoding.amplitude
    figure, ((heat, bands, waves),) = _grid(3, title=f"Sinusoidal positions, width {width}, base {encoding.base:,g}")
    image = heat.imshow(table_LD, aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
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
    wavelengths_P = 2 * math.pi / positions.geometric_frequencies(encoding.base, width)
    waves.semilogy(np.arange(0, width, 2), wavelengths_P, marker=".", linewidth=1)
    for dimension, wavelength in ((0, wavelengths_P[0]), (width - 2, wavelengths_P[-1])):
        end = {"ha": "left", "xytext": (6, -3)} if dimension == 0 else {"ha": "right", "xytext": (-6, 4)}
        said = f"{wavelength:,.{2 if wavelength < 100 else 0}f}"
        waves.annotate(said, (dimension, wavelength), textcoords="offset points", fontsize=9, **end)
    waves.axhline(2 * math.pi * encoding.base, color="grey", linestyle="--", linewidth=1)
    waves.annotate("2π·base, which no pair reaches", (0, 2 * math.pi * encoding.base), xytext=(2, 4), color="grey",
                   textcoords="offset points", fontsize=8)  # fmt: skip
    waves.set(xlabel="dimension", ylabel="wavelength (tokens)", title="2π·base^(2i/width)")
    finish(waves)
    return figure


def similarity(config: ModelConfig, trained: np.ndarray | None = None, length: int = 128) -> Figure:
    """Draws how alike two positions are for each encoding, against their distance; `trained` is a learned table_PD."""
    figure, ((added, inside),) = _grid(2, width=5.6, title="How an encoding tells near from far")
    distance = np.arange(length)
    frequencies_P = positions.geometric_frequencies(config.sinusoidal.base, config.d_model)
    added.plot(
        distance, np.cos(np.outer(distance, frequencies_P)).mean(axis=1), label="sinusoidal: the same from any position"
    )
    table_PD = trained
    if table_PD is None:
        table_PD = table_of(positions.Learned(config, rngs=nnx.Rngs(0)), config.max_positions or length, config.d_model)
    cosines = images.cosines(table_PD)
    reach = min(length, len(table_PD) // 2)
    mean, low, high = (
        np.array([f(np.diagonal(cosines, offset)) for offset in range(reach)])
        for f in (np.mean, lambda d: np.quantile(d, 0.1), lambda d: np.quantile(d, 0.9))
    )
    name = "before training" if trained is None else "trained"
    added.plot(distance[:reach], mean, color="C1", label=f"learned, {name}: mean, and 80% of all pairs")
    added.fill_between(distance[:reach], low, high, color="C1", alpha=0.2, linewidth=0)
    added.set(xlabel="distance (tokens)", ylabel="cosine of two positions", title="Added to the embeddings")
    added.set_ylim(min(-0.3, low.min()), 1.45)
    finish(added)
    rope = positions.rope_frequencies(config.rope, config.rotated_width)
    inside.plot(
        distance, np.cos(np.outer(distance, rope)).mean(axis=1), color="C2", label="RoPE: score of equal vectors"
    )
    for number, slope in enumerate(positions.alibi_slopes(config.num_heads)):
        shown = {"color": "C3", "alpha": 1 - 0.75 * number / config.num_heads, "linewidth": 1}
        inside.plot(
            distance,
            np.exp(-slope * distance),
            **shown,
            label=None if number else "ALiBi: factor exp(-slope·distance), a line a head",
        )
    inside.axhline(1, color="grey", linestyle="--", linewidth=1, label="none")
    inside.set(xlabel="distance (tokens)", ylabel="relative to distance 0", title="Inside of attention")
    inside.set_ylim(-0.3, 1.6)
    finish(inside)
    return figure


def rope(config: ModelConfig) -> Figure:
    """Draws two pairs as they turn, and scores against offset: the same from any place, unlike with sinusoids."""
    encoding, width = positions.Rope(config, rngs=nnx.Rngs(0)), config.rotated_width
    figure, ((fast, slow, score),) = _grid(3, width=4.6, title=f"RoPE on heads of {config.head_width} dimensions")
    for axes, pair in ((fast, 0), (slow, width // 8)):
        one_LHK = np.zeros((1, 8, 1, config.head_width), np.float32)
        one_LHK[..., pair] = 1
        turned = np.asarray(encoding.rotate(jnp.asarray(one_LHK), jnp.arange(8)[None]))[0, :, 0]
        for place, (x, y) in enumerate(turned[:, [pair, pair + width // 2]]):
            shade = {"color": "C0", "alpha": 0.3 + 0.1 * place}
            axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", **shade})
            axes.text(1.13 * x, 1.13 * y, place, ha="center", va="center", fontsize=9)
        axes.add_patch(Circle((0, 0), 1, fill=False, color="grey", alpha=0.4))
        radians = encoding.frequencies[pair]
        axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", xlabel=f"dimension {pair}")
        axes.set(ylabel=f"dimension {pair + width // 2}", title=f"Pair {pair}: {radians:.3g} radians a token")
        axes.spines[:].set_visible(False)
        axes.set(xticks=[], yticks=[])
    draw, offsets = np.random.default_rng(0), np.arange(65)
    (q, k), (q_D, k_D) = (_alike(draw, size) for size in (width, config.d_model))
    waves_LD = table_of(positions.Sinusoidal(config, rngs=nnx.Rngs(0)), 500, config.d_model)
    waves_LD = waves_LD / np.linalg.norm(waves_LD, axis=1, keepdims=True)
    for number, start in enumerate((0, 100, 400)):
        turn = lambda x, place: np.asarray(
            encoding.rotate(
                jnp.asarray(np.pad(x, (0, config.head_width - width)))[None, None, None], jnp.array([[place]])
            )
        )[0, 0, 0]
        by_rope = [turn(q, start + offset) @ turn(k, start) for offset in offsets]
        style = {"linestyle": ("-", "--", ":")[number], "linewidth": (1.2, 2, 3)[number]}
        score.plot(offsets, by_rope, color="C0", label=f"RoPE, key at {start}", **style)
        rows = waves_LD[np.minimum(start + offsets, 499)]
        by_waves = (q_D + rows) @ (k_D + waves_LD[start])
        score.plot(offsets, by_waves, color="C1", label=f"sinusoids added, key at {start}", **style)
    score.set(
        xlabel="offset of the query (tokens)",
        ylabel="score of a query and a key much like it",
        title="RoPE's depends on the offset alone",
    )
    score.set_ylim(top=1.55 * score.get_ylim()[1])
    finish(score)
    score.legend(frameon=False, fontsize=7.5, ncols=2)
    return figure


def _alike(draw: np.random.Generator, width: int) -> np.ndarray:
    """Gives a unit vector, and one beside it that is much like it."""
    q, other = (x / np.linalg.norm(x) for x in draw.normal(size=(2, width)).astype(np.float32))
    return np.stack([q, q + 0.3 * other])


def biases(config: ModelConfig, t5_table: np.ndarray | None = None, length: int = 160) -> Figure:
    """Draws ALiBi's biases and T5's buckets against distance; with t5_table[bucket, H], its biases too."""
    figure, ((alibi, t5),) = _grid(2, width=5.4, title="Biases that are added to the attention logits")
    distance = np.arange(length)
    encoding = positions.Alibi(config, rngs=nnx.Rngs(0))
    bias_BHLS = np.asarray(encoding.bias(jnp.full((1, 1), length - 1), (length - 1 - jnp.asarray(distance))[None]))
    for head, bias in enumerate(bias_BHLS[0, :, 0]):
        alibi.plot(distance, bias, label=f"head {head}: slope {encoding.slopes[head]:.4g}")
    alibi.set(xlabel="distance (tokens)", ylabel="bias", title="ALiBi: fixed, a slope a head", ylim=(-12, 0.5))
    finish(alibi)
    buckets = t5_buckets(config, length)
    if t5_table is None:
        t5.plot(distance, buckets, drawstyle="steps-post", color="C4")
        t5.set(xlabel="distance (tokens)", ylabel="bucket", title="T5: distances that share a learned bias")
    else:
        for head, of_bucket in enumerate(t5_table.T):
            t5.plot(distance, of_bucket[buckets], drawstyle="steps-post", label=f"head {head}")
        t5.set(xlabel="distance to the left (tokens)", ylabel="bias", title="T5: learned, a bias a bucket and head")
    finish(t5)
    return figure


def t5_buckets(config: ModelConfig, length: int) -> np.ndarray:
    """Gives T5's bucket of each distance to the left, below `length`."""
    num_buckets = config.t5.num_buckets if config.causal else config.t5.num_buckets // 2
    options = {"causal": True, "num_buckets": num_buckets, "max_distance": config.t5.max_distance}
    return np.asarray(positions.t5_bucket(-jnp.arange(length), **options))


def sums(x_LD: np.ndarray, p_LD: np.ndarray, words: list[str], *, title: str) -> Figure:
    """Draws X, P and X + P on one scale, and the four terms of (x+p)ᵀ(y+p′) on another (topic B12)."""
    figure, (top, bottom) = _grid(4, rows=2, width=3.6, height=3.1, title=title)
    limit = np.abs([x_LD, p_LD, x_LD + p_LD]).max()
    shown = {"X: embeddings": x_LD, "P: positions": p_LD, "X + P": x_LD + p_LD}
    for axes, (name, values_LD) in zip(top, shown.items(), strict=False):
        image = axes.imshow(values_LD, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set(title=f"{name} (rms {np.sqrt(np.mean(values_LD**2)):.3g})", xlabel="dimension")
        _words(axes, words, rows=True)
    figure.colorbar(image, ax=top[:3], shrink=0.85, pad=0.01)
    whole_LD = x_LD + p_LD
    _map(top[3], jax.nn.softmax(jnp.asarray(whole_LD @ whole_LD.T / math.sqrt(x_LD.shape[1])), axis=-1), words)
    top[3].set(title="softmax of (x+p)ᵀ(y+p′)/√d")
    terms = {"xᵀy": x_LD @ x_LD.T, "xᵀp′": x_LD @ p_LD.T, "pᵀy": p_LD @ x_LD.T, "pᵀp′": p_LD @ p_LD.T}
    limit = max(np.abs(term).max() for term in terms.values())
    for axes, (name, term_LL) in zip(bottom, terms.items(), strict=True):
        image = axes.imshow(term_LL, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set(title=f"{name}: rms {np.sqrt(np.mean(term_LL**2)):.3g}")
        _words(axes, words, rows=True, columns=True)
    figure.colorbar(image, ax=bottom, shrink=0.85, pad=0.01)
    return figure


def _map(axes: Axes, weights_LS: np.ndarray, words: list[str]) -> None:
    axes.imshow(np.asarray(weights_LS), cmap="magma", vmin=0, interpolation="nearest")
    _words(axes, words, rows=True, columns=True)


def _words(axes: Axes, words: list[str], *, rows: bool = False, columns: bool = False) -> None:
    few = len(words) <= 24
    if rows:
        axes.set_yticks(range(len(words)) if few else [], words if few else [], fontsize=8)
    if columns:
        axes.set_xticks(range(len(words)) if few else [], words if few else [], fontsize=8, rotation=90)
    axes.tick_params(length=0)

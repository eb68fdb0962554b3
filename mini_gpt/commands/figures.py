"""Draws what the docs show: python -m mini_gpt.commands.figures [--only=rope,biases] [--out=DIR] [--maps RUN RUN]

Figures of positions and of a toy sentence take seconds; post_ln, residual and head_count, by name alone, train
for minutes.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from mini_gpt.commands import command_line
from mini_gpt.commands.suite_options import Request
from mini_gpt.config import loading as configs
from mini_gpt.config.model_schema import ModelConfig
from mini_gpt.insight import curves as length_curves
from mini_gpt.insight import positions as position_figures
from mini_gpt.insight import toy
from mini_gpt.insight.attention import attention_maps
from mini_gpt.model.positions import Sinusoidal
from mini_gpt.runtime import errors, sharding
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.run import Run

MAPPED = 32  # tokens of a text whose maps are drawn
PLAIN = Request()
HEAD_COUNTS = (1, 2, 4, 8, 16, 32)


def _model(**fields: str) -> ModelConfig:
    """Gives the model of configs/tiny.py with other fields: what the figures of positions are drawn for."""
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return configs.load("configs/tiny.py", named).model


def sinusoids() -> Figure:
    return position_figures.sinusoids(_model(model__position="sinusoidal"))


def similarity() -> Figure:
    return position_figures.similarity(_model(model__position="learned"))


def rope() -> Figure:
    return position_figures.rope(_model(model__position="rope"))


def biases() -> Figure:
    return position_figures.biases(_model(model__position="t5"))


def sums() -> Figure:
    """Draws unit-variance embeddings of a sentence with "the" in it three times, and sinusoids of the same size."""
    words = ["the", "cat", "and", "the", "dog", "saw", "the", "cat"]
    config = _model(model__position="sinusoidal", model__d_model=32, model__scale_embeddings=True)
    kinds, draw = sorted(set(words)), np.random.default_rng(0)
    x_LD = draw.normal(size=(len(kinds), 32))[[kinds.index(word) for word in words]]
    encoding = Sinusoidal(config, rngs=nnx.Rngs(0))
    p_LD = position_figures.table_of(encoding, len(words), 32)
    return position_figures.sums(x_LD, p_LD, words, title="Embeddings and positions, and what their sum is made of")


def toy_heads() -> Figure:
    """Draws one softmax over four dimensions beside two over two each, by the same matrices."""
    figure = Figure(figsize=(10.5, 3.7 * 2), layout="constrained")
    figure.suptitle('"The cat sat down": one head mixes what two can tell apart')
    for row, preset in enumerate(("identity", "head 2 negated")):
        _, one_HLS = toy.maps(preset, heads=1)
        _, two_HLS = toy.maps(preset, heads=2)
        shown = {"one head": one_HLS[0], "head 1 of two": two_HLS[0], "head 2 of two": two_HLS[1]}
        for column, (name, weights_LS) in enumerate(shown.items()):
            axes = figure.add_subplot(2, 3, 3 * row + column + 1)
            axes.imshow(weights_LS, cmap="magma", vmin=0, vmax=1)
            for (i, j), weight in np.ndenumerate(weights_LS):
                axes.text(j, i, f"{weight:.2f}", ha="center", va="center", color="white" if weight < 0.6 else "black")
            axes.set_xticks(range(4), toy.WORDS)
            axes.set_yticks(range(4), toy.WORDS)
            axes.set(title=f"{preset}: {name}", ylabel="query" if column == 0 else "", xlabel="key")
            axes.tick_params(length=0)
    return figure


def post_ln() -> Figure:
    """Trains pre-LN and post-LN models of 12 layers with and without warm-up (Xiong et al. 2020). Narrower ones are
    drawn so small (0.02, as GPT-2) that post-LN needs none."""
    variants = {
        f"{placement}-LN, {f'{warmup} steps of' if warmup else 'no'} warm-up": {
            "model.norm_placement": placement,
            "optimizer.warmup_steps": warmup,
        }
        for placement in ("pre", "post")
        for warmup in (100, 0)
    }
    common = {"model.num_layers": 12, "model.d_model": 256, "train.steps": 200, "optimizer.schedule": "constant"}
    common |= {"optimizer.learning_rate": 2e-3, "context_length": 64, "train.batch_size": 8}
    return _training_curves(common, variants, title="12 layers of width 256, AdamW at 2e-3")


def residual() -> Figure:
    """Trains models of few and many layers with and without residual connections (He et al. 2016)."""
    variants = {
        f"{layers} layers, {'with' if residual else 'without'} residuals": {
            "model.num_layers": layers,
            "model.residual": residual,
        }
        for layers in (2, 8)
        for residual in (True, False)
    }
    return _training_curves({"train.steps": 300}, variants, title="configs/tiny.py with and without residuals")


def _training_curves(common: dict, variants: dict[str, dict], *, title: str) -> Figure:
    """Draws the training loss of variants that come in pairs, the second of each dotted."""
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, fields) in enumerate(variants.items()):
        rows = _trained(common | {"train.log_every": 5, "eval.every": common["train.steps"]} | fields)
        steps, losses = zip(*((row["step"], row["train/loss"]) for row in rows if "train/loss" in row), strict=True)
        axes.plot(steps, _smooth(losses), color=f"C{number // 2}", linestyle="-:"[number % 2], label=name)
    axes.set(xlabel="step", ylabel="training loss (nats a token)", title=title)
    length_curves.finish(axes)
    return figure


def head_count() -> Figure:
    """Trains models of one width with more and more heads, each narrower."""
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    losses = []
    for heads in HEAD_COUNTS:
        rows = _trained({"model.num_heads": heads, "train.steps": 400, "eval.every": 400})
        losses.append(rows[-1]["validation/loss"])
    axes.plot(HEAD_COUNTS, losses, marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(HEAD_COUNTS, [f"{heads} × {128 // heads}" for heads in HEAD_COUNTS])
    axes.set(xlabel="heads × width of a head", ylabel="validation loss (nats a token)")
    axes.set_title("The same 128 dimensions in more and more heads, 400 steps, one seed", fontsize=10)
    length_curves.finish(axes)
    return figure


DRAWN: dict[str, Callable[[], Figure]] = {
    each.__name__: each for each in (sinusoids, similarity, rope, biases, sums, toy_heads)
}
TRAINED: dict[str, Callable[[], Figure]] = {each.__name__: each for each in (post_ln, residual, head_count)}


def maps(runs: Sequence[Run], request: Request = PLAIN) -> Figure:
    """Draws every layer's attention, heads averaged, for one text read by several runs, one below the other."""
    layers = max(run.config.model.num_layers for run in runs)
    figure = Figure(figsize=(2.6 * layers + 1, 3.0 * len(runs)), layout="constrained")
    figure.suptitle("Attention averaged over the heads: the root of each weight, black 0, white 1")
    panels = figure.subplots(len(runs), layers, squeeze=False)
    for line, run in zip(panels, runs, strict=True):
        tokens = runs[0].opening(request, MAPPED)
        if run.tokenizer.to_dict() != runs[0].tokenizer.to_dict():
            tokens = run.tokenizer.encode(runs[0].tokenizer.decode(tokens))[:MAPPED].astype(np.int32)
        tokens_BL = tokens[None].repeat(sharding.shards(run.mesh), axis=0)
        found = attention_maps(run.model, tokens_BL)
        for layer, axes in enumerate(line):
            letters = [run.tokenizer.decode([token]).replace("\n", "⏎") for token in tokens_BL[0]]
            axes.set_xticks(range(len(letters)), letters, fontsize=5.5)
            axes.set_yticks(range(len(letters)) if layer == 0 else [], letters if layer == 0 else [], fontsize=5.5)
            axes.tick_params(length=0, pad=1)
            if layer >= len(found):
                axes.set_visible(False)
                continue
            axes.imshow(np.sqrt(found[layer].weights_BHLS[0].mean(axis=0)), cmap="magma", vmin=0, vmax=1)
            axes.set_title(f"layer {layer}", fontsize=9)
        line[0].set_ylabel(f"{run.workdir.name}\nposition={run.config.model.position}", fontsize=9)
    return figure


def of_run(run: Run, request: Request) -> dict[str, Figure]:
    """Gives the figures of a checkpoint: its maps, and what its encoding is and has learnt."""
    config, drawn = run.config.model, {"maps": maps([run], request)}
    names = set(config.position_pattern)
    if "sinusoidal" in names:
        drawn["sinusoids"] = position_figures.sinusoids(config)
    if "rope" in names:
        drawn["rope"] = position_figures.rope(config)
    if names & {"alibi", "t5"}:
        table = _whole(run, run.parameters["positions"]["t5"]["bias_table"]) if "t5" in names else None
        drawn["biases"] = position_figures.biases(config, table)
    table_PD = _whole(run, run.parameters["positions"]["learned"]["embedding"]) if "learned" in names else None
    drawn["similarity"] = position_figures.similarity(config, table_PD)
    if names & {"learned", "sinusoidal"}:
        tokens = run.opening(request, MAPPED)
        factor = config.d_model**0.5 if config.scale_embeddings else 1
        x_LD = factor * _whole(run, run.parameters["embedding"])[tokens]
        if table_PD is None:
            encoding = Sinusoidal(config, rngs=nnx.Rngs(0))
            table_PD = position_figures.table_of(encoding, len(tokens), config.d_model)
        title = f"Step {run.step:,}: embeddings and positions, and what their sum is made of"
        drawn["sums"] = position_figures.sums(x_LD, table_PD[: len(tokens)], [""] * len(tokens), title=title)
    return drawn


def _whole(run: Run, array: jax.Array) -> np.ndarray:
    return sharding.whole(array, run.mesh)


def _trained(fields: dict) -> list[dict]:
    """Gives the rows of a training by configs/tiny.py with other fields."""
    with tempfile.TemporaryDirectory() as directory:
        loaded = configs.load("configs/tiny.py", {"eval.sample_tokens": 0, "checkpoint.every": 10**6} | fields)
        loop.train(loaded, Path(directory) / "run", conclude=False)
        return [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]


def _smooth(losses: Sequence[float], width: int = 5) -> np.ndarray:
    padded = np.pad(np.asarray(losses), (width - 1, 0), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated, of: {', '.join([*DRAWN, *TRAINED])}; default: all of seconds")
    parser.add_argument("--out", type=command_line.directory, default=Path("figures"), help="where PNG files go")
    parser.add_argument("--maps", nargs="+", type=command_line.directory, metavar="RUN", help="maps of runs, compared")
    flags = parser.parse_args()
    names = flags.only.split(",") if flags.only else [] if flags.maps else list(DRAWN)
    for name in names:
        if name not in DRAWN | TRAINED:
            raise UserError(f"--only: found {name!r}; must be of {', '.join([*DRAWN, *TRAINED])}")
    command_line.set_up()
    flags.out.mkdir(parents=True, exist_ok=True)
    drawings = {name: (DRAWN | TRAINED)[name] for name in names}
    if flags.maps:
        runs = [Run(workdir) for workdir in flags.maps]
        drawings["maps"] = lambda: maps(runs)
    for name, draw in drawings.items():
        path = flags.out / f"{name}.png"
        length_curves.save(draw(), path)
        print(path)


if __name__ == "__main__":
    errors.run(main)

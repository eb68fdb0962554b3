"""Shared code of the figures in docs/inside: train a model, plot training curves, save a figure."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mini_gpt.commands import command_line
from mini_gpt.config import loading
from mini_gpt.insight import curves
from mini_gpt.training import loop


def train(fields: dict) -> list[dict]:
    """Train configs/tiny.py with changed fields, and return the rows of its metrics.jsonl."""
    config = loading.load("configs/tiny.py", {"eval.sample_tokens": 0, "checkpoint.every": 10**6} | fields)
    with tempfile.TemporaryDirectory() as directory:
        loop.train(config, Path(directory) / "run", conclude=False)
        return [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]


def training_curves(common: dict, variants: dict[str, dict], *, title: str) -> Figure:
    """Plot the training losses of pairs of variants; the second line of each pair is dotted."""
    figure, axes = curves.new_figure((6.6, 4.2), subplot_kw={"title": title})
    for number, (name, fields) in enumerate(variants.items()):
        rows = train(common | {"train.log_every": 5, "eval.every": common["train.steps"]} | fields)
        steps, losses = zip(*((row["step"], row["train/loss"]) for row in rows if "train/loss" in row), strict=True)
        axes.plot(steps, _smooth(losses), color=f"C{number // 2}", linestyle="-:"[number % 2], label=name)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
    curves.finish(axes)
    return figure


def save(name: str, draw: Callable[[], Figure]) -> None:
    """Write the figure to docs/inside, or to the directory of --out."""
    parser = command_line.parser(f"Plot {name}.png.")
    parser.add_argument("--out", type=command_line.directory, default=Path("docs/inside"), help="directory for the PNG")
    flags = parser.parse_args()
    command_line.set_up()
    flags.out.mkdir(parents=True, exist_ok=True)
    curves.save(draw(), flags.out / f"{name}.png")


def _smooth(losses: Sequence[float], width: int = 5) -> np.ndarray:
    padded = np.pad(np.asarray(losses), (width - 1, 0), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")

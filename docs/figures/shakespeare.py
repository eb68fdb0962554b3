"""Plot docs/shakespeare.png: validation losses of configs/shakespeare_char_cpu.py by positional encoding.

for seed in 0 1 2; do for position in learned rope; do
  python train.py --config=configs/shakespeare_char_cpu.py --config.model.position=$position --config.seed=$seed
done; done
python docs/figures/shakespeare.py runs/shakespeare_char_cpu,*
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

NANOGPT = 1.898  # nats per character; nanoGPT with the same recipe, on the whole validation split in blocks of 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="+", type=Path)
    flags = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    colours = {}
    for workdir in flags.workdirs:
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        points = [(row["step"], row["validation/loss"]) for row in rows if "validation/loss" in row]
        position = json.loads((workdir / "config.json").read_text())["model"]["position"]
        label = None if position in colours else f"{position} positions"
        colour = colours.setdefault(position, f"C{len(colours)}")
        axes.plot(*zip(*points, strict=True), color=colour, alpha=0.8, marker="o", markersize=3, label=label)
    axes.axhline(NANOGPT, color="grey", linestyle="--", linewidth=1)
    axes.text(200, NANOGPT, f"nanoGPT after its 2,000 steps: {NANOGPT}", va="bottom", color="grey", fontsize=9)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("validation loss (nats per character)")
    axes.set_title("Character-level Shakespeare, 0.8M parameters, context 64; each line a seed")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(Path(__file__).parents[1] / "shakespeare.png", dpi=150)


if __name__ == "__main__":
    main()

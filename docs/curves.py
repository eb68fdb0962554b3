"""Draws the validation loss of runs over their steps, one colour a group of names that differ in the seed alone.

python docs/curves.py --out=docs/curves.png runs/shakespeare_char_cpu*
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("workdirs", nargs="+", type=Path)
    flags = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    colours, nanogpt = {}, 1.898
    for workdir in flags.workdirs:
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        points = [(row["step"], row["validation/loss"]) for row in rows if "validation/loss" in row]
        position = json.loads((workdir / "config.json").read_text())["model"]["position"]
        label = None if position in colours else f"{position} positions"
        colour = colours.setdefault(position, f"C{len(colours)}")
        axes.plot(*zip(*points, strict=True), color=colour, alpha=0.8, marker="o", markersize=3, label=label)
    axes.axhline(nanogpt, color="grey", linestyle="--", linewidth=1)
    axes.text(axes.get_xlim()[0], nanogpt, "  nanoGPT at step 2,000", va="bottom", color="grey", fontsize=9)
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("validation loss (nats a character)")
    axes.set_title("Character-level Shakespeare, 0.8M parameters, context 64, three seeds each")
    axes.set_yticks([1.8, 2.0, 2.2, 2.4, 2.6])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(flags.out, dpi=150)


if __name__ == "__main__":
    main()

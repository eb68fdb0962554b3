"""Print one table of loss and time for one head against eight, at the same width. Takes a minute; run nothing else.

    python -m benchmarks.heads

The losses are those of the study of heads (docs/studies/perplexity.csv). The times are of training steps of the same
models, measured in turns.
"""

import csv
from pathlib import Path
from typing import Any

from mini_gpt.commands import bench, command_line
from mini_gpt.config import loading

LOSSES = Path(__file__).parents[1] / "docs" / "studies" / "perplexity.csv"
CONFIG, HEADS, STEPS = "configs/small.py", (1, 8), 500


def table(compared: dict[str, Any]) -> str:
    """Return the table in Markdown. compared: the result of `bench.compare` for the models of HEADS."""
    with LOSSES.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == "heads"]
    losses = {row["condition"]: float(row["nll_mean"]) for row in rows}
    width = loading.load(CONFIG).model.d_model
    lines = ["| heads | d_k | loss (nats per token) | training step (ms) |", "|---|---|---|---|"]
    for heads, times in zip(HEADS, compared["milliseconds_per_step"], strict=True):
        lines.append(f"| {heads} | {width // heads} | {losses[f'heads={heads}']:.3f} | {times['median']:.1f} |")
    ratio = f"{HEADS[1]} heads take {compared['ratio']['median']:.2f} times as long as {HEADS[0]}."
    return "\n".join([*lines, "", ratio])


@command_line.command
def main() -> None:
    command_line.parser(__doc__, prog="python -m benchmarks.heads").parse_args()
    command_line.set_up()
    print(table(bench.compare([f"{CONFIG},model.num_heads={heads}" for heads in HEADS], {}, STEPS)))


if __name__ == "__main__":
    main()

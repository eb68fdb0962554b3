"""Measure how the time and the memory of a training step grow, and plot docs/results/growth.png.

python -m benchmarks.growth --text=input.txt [--minutes=3]

Each point of docs/results/growth.csv is the median of some whole training steps in float32, in a process of its own, so
that its peak memory is that of this point. Memory includes the program, its libraries and the compilation. Points that
are in the file are not measured again. --minutes ends the command before all points are measured; the next command
continues. If no point is missing, the command only plots.
  length    16,384 tokens in each step, with 4 layers of width 128
  width     8 x 256 tokens, 4 layers, heads of width 32
  layers    8 x 256 tokens, width 128
  devices   8 x 256 tokens, 4 layers of width 128; devices that XLA makes from the same cores

Run nothing else. Needs the environment of benchmarks/rivals.py.
"""

import csv
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import rivals, turns
from mini_gpt.commands import command_line
from mini_gpt.insight import curves
from mini_gpt.insight.curves import Curve
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import results

REFERENCE = "mini_gpt, reference attention"
COMPARED = (rivals.OURS, "nanoGPT", "nanoGPT compiled")
BASE = {"layers": 4, "width": 128, "length": 256, "batch": 8, "devices": 1}
LENGTH_TOKENS, HEAD_WIDTH = 16_384, 32
AXES = {
    "length": ((64, 256, 1024, 4096, 16_384), (*COMPARED, REFERENCE)),
    "width": ((64, 256, 1024), COMPARED),
    "layers": ((1, 6, 24), COMPARED),
    "devices": ((1, 2, 4, 8), (rivals.OURS,)),
}
TITLES = {
    "length": "length of a text (tokens); 16,384 tokens in a step",
    "width": "width of the model",
    "layers": "layers",
    "devices": "fake devices on the same cores",
}
STYLES = {rivals.OURS: ("C0", "-"), REFERENCE: ("C0", "--"), "nanoGPT": ("C1", "-"), "nanoGPT compiled": ("C1", "--")}
TEMPORARY = ("C2", ":")  # memory of one call of the compiled step
MEASURES = {"milliseconds": ("time of a step (ms)", 1), "peak_bytes": ("peak memory (GB)", 1e-9)}
STEPS, FEWEST_STEPS, SECONDS = 9, 3, 10.0  # measured steps of a point: fewer if they take longer than SECONDS
LIMIT = 400  # seconds of CPU time for a point
NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


class Point(NamedTuple):
    """A point of the figure: a value on one of the AXES, and a program."""

    axis: str
    value: int
    program: str

    @property
    def size(self) -> dict[str, int]:
        """Return the sizes of the model and of its batch."""
        size = BASE | {self.axis: self.value}
        if self.axis == "length":
            size["batch"] = LENGTH_TOKENS // self.value
        return size | {"heads": size["width"] // HEAD_WIDTH}

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all attention weights, which a backward pass keeps if they are stored."""
        size = self.size
        return 4 * size["layers"] * size["heads"] * size["batch"] * size["length"] ** 2


ABOUT = ("peak_bytes", "temporary_bytes", "parameters")  # what a program says about itself
COLUMNS = (*Point._fields, "milliseconds", "fastest", "slowest", "steps", *ABOUT, "note")


def points() -> Iterator[Point]:
    for axis, (values, programs) in AXES.items():
        yield from itertools.starmap(Point, itertools.product([axis], values, programs))


def measure(point: Point, text: Path) -> dict[str, Any]:
    """Return the row of a point. It has a note instead of values if the point failed or needs too much memory."""
    row: dict[str, Any] = dict(point._asdict())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if point.program == REFERENCE and 2 * point.weight_bytes > memory:  # the weights, and their gradients
        return row | {"note": f"left out: {point.weight_bytes / 1e9:.0f} GB of attention weights"}
    work = point.size | {"task": "training", "text": str(text.resolve()), "dtype": "float32", "warmup": 2, "steps": 1}
    work["attention"] = "reference" if point.program == REFERENCE else "auto"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={point.size['devices']}"
    command, changed = rivals.command(point.program, work), NO_CACHE | {"XLA_FLAGS": flags.strip()}
    try:
        with turns.Worker(str(point), command, rivals.REPOSITORY, changed=changed, limit=LIMIT) as worker:
            times = [worker.measure()]
            while len(times) < FEWEST_STEPS or (len(times) < STEPS and sum(times) < 1000 * SECONDS):
                times.append(worker.measure())
            about = worker.about | worker.finish()
    except UserError as error:
        return row | {"note": f"left out: {str(error).partition(': ')[2]}"}
    row |= {"milliseconds": f"{np.median(times):.2f}", "fastest": f"{min(times):.2f}", "slowest": f"{max(times):.2f}"}
    return row | {"steps": len(times), **{name: about.get(name, "") for name in ABOUT}, "note": ""}


def read(path: Path) -> dict[Point, dict[str, str]]:
    """Return the measured rows. Raises UserError if the file has other columns."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and tuple(rows[0]) != COLUMNS:
        raise UserError(f"{path}: found columns {', '.join(rows[0])}; remove the file to measure all points")
    return {Point(row["axis"], int(row["value"]), row["program"]): row for row in rows}


def exponents(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Return d log y / d log x between neighbouring points."""
    return [math.log(d / c) / math.log(b / a) for (a, b), (c, d) in zip(*map(itertools.pairwise, (x, y)), strict=True)]


def spaced(places: Sequence[float], gap: float) -> list[float]:
    """Return the places, moved so that any two are at least `gap` apart. Those of a crowd keep their mean."""
    crowds: list[list[int]] = []
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        crowd = [index]
        while crowds and _lowest(crowd, places, gap) < _lowest(crowds[-1], places, gap) + gap * len(crowds[-1]):
            crowd = crowds.pop() + crowd
        crowds.append(crowd)
    moved = list(places)
    for crowd in crowds:
        for rank, index in enumerate(crowd):
            moved[index] = _lowest(crowd, places, gap) + gap * rank
    return moved


def _lowest(crowd: Sequence[int], places: Sequence[float], gap: float) -> float:
    """Return the lowest place of a crowd, `gap` apart around the mean of its places."""
    return sum(places[index] for index in crowd) / len(crowd) - gap * (len(crowd) - 1) / 2


def lines(rows: dict[Point, dict[str, str]], axis: str, column: str, scale: float) -> dict[str, Curve]:
    """Return the curve of each program over an axis, without points that have no value."""
    found = {}
    for program in AXES[axis][1]:
        pairs = [
            (point.value, scale * float(row[column]))
            for point, row in sorted(rows.items())
            if point.axis == axis and point.program == program and row[column]
        ]
        if pairs:
            found[program] = Curve(program, *map(list, zip(*pairs, strict=True)))
    return found


def label(axes: Axes, drawn: dict[str, Curve]) -> None:
    """Write the name of each curve beside its last point."""
    ends = [curve.y[-1] for curve in drawn.values()]
    low, high = np.log(axes.get_ylim())
    places = spaced([(math.log(end) - low) / (high - low) for end in ends], 0.055)
    for (name, curve), place in zip(drawn.items(), places, strict=True):
        colour = STYLES.get(name, TEMPORARY)[0]
        axes.annotate(name, (curve.x[-1], place), xycoords=("data", "axes fraction"), xytext=(7, 0), va="center",
                      textcoords="offset points", color=colour, fontsize=8, annotation_clip=False)  # fmt: skip


def draw(rows: dict[Point, dict[str, str]]) -> Figure:
    """Plot time beside memory, with a row for each axis."""
    figure, panels = curves.new_figure((12.5, 15), len(AXES), len(MEASURES))
    for row, axis in zip(panels, AXES, strict=True):
        for axes, (name, (title, scale)) in zip(row, MEASURES.items(), strict=True):
            drawn = lines(rows, axis, name, scale)
            if name == "peak_bytes":
                temporary = lines(rows, axis, "temporary_bytes", scale)
                drawn |= {f"{key}: temporary": each for key, each in temporary.items() if key == rivals.OURS}
            for key, curve in drawn.items():
                curves.plot_curve(axes, curve, *STYLES.get(key, TEMPORARY))
            axes.set(xscale="log", yscale="log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 1.2, max(1.2 * high, 10 * low))  # at least a decade, so that noise looks small
            axes.set_xticks(AXES[axis][0], [f"{value:,}" for value in AXES[axis][0]])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_locator(NullLocator())
            curves.finish(axes, xlabel=TITLES[axis], ylabel=title)
            if axes.get_legend():
                axes.get_legend().remove()
            label(axes, drawn)
    return figure


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="such as Tiny Shakespeare")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no point after this time")
    parser.add_argument("--out", type=command_line.directory, default=Path("docs/results"), help="directory to write")
    flags = parser.parse_args()
    if not flags.text.is_file():
        raise UserError(f"--text: found {flags.text}; must be a text file")
    rivals.check_installed(["torch"])
    rows, begin = read(flags.out / "growth.csv"), time.monotonic()
    for point in points():
        if point in rows:
            continue
        if time.monotonic() - begin > 60 * flags.minutes:
            print("not all points are measured: run the command again", file=sys.stderr)
            break
        row = dict.fromkeys(COLUMNS, "") | measure(point, flags.text)
        rows[point] = {name: str(value) for name, value in row.items()}
        print(*filter(None, rows[point].values()), file=sys.stderr, flush=True)
        files.write_text(flags.out / "growth.csv", results.csv_text(list(rows.values())))
    curves.save(draw(rows), flags.out / "growth.png")
    for axis in AXES:
        for program, curve in lines(rows, axis, "milliseconds", 1).items():
            slopes = " ".join(f"{slope:.2f}" for slope in exponents(curve.x, curve.y))
            print(f"{axis}, {program}: exponents of the time between neighbouring points: {slopes}")


if __name__ == "__main__":
    main()

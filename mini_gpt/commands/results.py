"""The files and tables in which suites and sweeps write their results."""

import csv
import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mini_gpt.insight import curves
from mini_gpt.runtime import files
from mini_gpt.training.monitor import EventFile

Row = Mapping[str, Any]
Contents = dict[str, str | Figure]  # text, or a figure that is written as PNG, by the ending of the file's name


def write(directory: Path, stem: str, contents: Contents) -> list[Path]:
    """Write text, or figures as PNG, to DIRECTORY/STEM and the ending of each, in order. Return the paths.

    An ending such as "/maps.png" is a file in a folder. Each file is replaced as a whole.
    """
    paths = []
    for ending, content in contents.items():
        path = directory / f"{stem}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Figure):
            curves.save(content, path)
        else:
            files.write_text(path, content)
        paths.append(path)
    return paths


def csv_text(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def json_text(result: Row) -> str:
    """Return the result as JSON. Raise ValueError for non-finite numbers."""
    return json.dumps(result, indent=2, allow_nan=False) + "\n"


def write_tensorboard(
    directory: Path, scalars: Iterable[tuple[str, float, int]], figures: Mapping[str, Figure], step: int
) -> None:
    """Write scalars (name, value, step), and the figures at `step`, as a TensorBoard run in place of the old one."""
    shutil.rmtree(directory, ignore_errors=True)
    with EventFile(directory) as events:
        for scalar in scalars:
            events.scalar(*scalar)
        for name, figure in figures.items():
            events.figure(name, figure, step)


def table(rows: Sequence[Row]) -> str:
    """Return the rows in aligned columns; the column "reason" is listed below them instead, each reason once."""
    columns = [name for name in rows[0] if name != "reason"]
    cells = [columns, *([_shown(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    reasons = dict.fromkeys(row["reason"] for row in rows if row.get("reason"))
    return "\n".join([*lines, *(f"undefined: {reason}" for reason in reasons)])


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [list(rows[0]), *(list(map(str, row.values())) for row in rows)]
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def listing(result: Row) -> str:
    """Return one line for each field."""
    width = max(map(len, result))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in result.items())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

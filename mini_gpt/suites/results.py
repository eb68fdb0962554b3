"""Write the results of suites and sweeps as files and tables."""

import csv
import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tensorboardX.utils import figure_to_image

from mini_gpt.insight import curves
from mini_gpt.runtime import files
from mini_gpt.training.writers import EventFile

Row = Mapping[str, Any]
Contents = dict[str, str | Figure]  # a text or figure for each ending of a file name


def write(directory: Path, stem: str, contents: Contents) -> list[Path]:
    """Write each text or figure to DIRECTORY/STEM plus its ending, in order. Return the paths.

    The ending "/maps.png" is a file in the folder STEM. Each file is replaced atomically.
    """
    paths = []
    for ending, content in contents.items():
        path = directory / f"{stem}{ending}"
        files.make_directory(path.parent)
        if isinstance(content, Figure):
            curves.save(content, path)
        else:
            files.write_text(path, content)
        paths.append(path)
    return paths


def csv_text(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def json_text(result: Row) -> str:
    """Return the result as JSON with its checksum. Raise ValueError for non-finite numbers."""
    return json.dumps(files.with_checksum(result), indent=2, allow_nan=False) + "\n"


def write_tensorboard(
    directory: Path, scalars: Iterable[tuple[str, float, int]], figures: Mapping[str, Figure], step: int
) -> None:
    """Replace a TensorBoard run by scalars (name, value, step) and figures at `step`."""
    shutil.rmtree(directory, ignore_errors=True)
    with files.clear_write_errors(directory), EventFile(directory) as events:
        for scalar in scalars:
            events.scalar(*scalar)
        for name, figure in figures.items():
            events.image(name, figure_to_image(figure, close=False).transpose(1, 2, 0), step)


def table(rows: Sequence[Row]) -> str:
    """Return the rows in aligned columns. Each value of "reason" is below the rows once; several have numbers."""
    columns = [name for name in rows[0] if name != "reason"]
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row.get("reason")))
    numbers = {reason: f" ({number})" if len(reasons) > 1 else "" for number, reason in enumerate(reasons, start=1)}
    numbered = [{**row, "status": row["status"] + numbers[row["reason"]]} if row.get("reason") else row for row in rows]
    cells = [columns, *([_shown(row[name]) for name in columns] for row in numbered)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([*lines, *(f"undefined{number}: {reason}" for reason, number in numbers.items())])


def markdown_table(rows: Sequence[Row]) -> str:
    lines = [list(rows[0]), *(list(map(str, row.values())) for row in rows)]
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def listing(result: Row) -> str:
    """Return one aligned line for each field."""
    width = max(map(len, result))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in result.items())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None else str(value)

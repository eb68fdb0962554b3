"""Tables and a figure of a sweep, with statistics over the seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from mini_gpt.commands import results as result_files
from mini_gpt.commands.suites.base import Result, Row, Suite
from mini_gpt.insight import curves
from mini_gpt.insight.curves import Curve
from mini_gpt.runtime.errors import shown

Combination = tuple[tuple[str, str], ...]  # (field, value) of each varied field


def check(suite: Suite, result: Result) -> None:
    """Raise ValueError, KeyError, TypeError or OverflowError if a result on disk does not fit the tables."""
    rows = suite.compared_rows(result)
    for row in rows:
        suite.label(row)
        values = [row[value] for value in suite.values]
        numbers = [row["length"], *(value for value in values if value is not None)]
        is_text = isinstance(row["reason"], str | None)
        if not is_text or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ValueError(f"found the row {shown(row)}")
    if not rows or type(result.get("train_length")) not in (int, type(None)):
        raise ValueError("it has no rows, or no valid train_length")


def gather(suite: Suite, fields: Sequence[str], results: Mapping[Combination, list[Result]]) -> list[Row]:
    """Return a row of statistics for each combination, label of the suite and length.

    If a value is undefined for a seed, its statistics are None, and "reasons" maps its name to the reason.
    The standard deviation has the divisor n - 1, and is None for a single seed.
    """
    measured = [
        row | dict(combination) | {"measured": suite.label(row)}  # the combination replaces columns of the same name
        for combination, seed_results in results.items()
        for result in seed_results
        for row in suite.compared_rows(result)
    ]
    columns, table = [*fields, "measured", "length"], []
    for key, rows in _groups(measured, columns).items():
        spreads: Row = {}
        reasons: dict[str, str] = {}
        for value in suite.values:
            numbers = [row[value] for row in rows]
            if None in numbers:
                reasons[value] = rows[numbers.index(None)]["reason"] or f"these runs have no {value}"
            spreads |= _spread(value, [] if None in numbers else numbers)
        seeds = len(rows) if len(reasons) < len(suite.values) else 0
        table.append(dict(zip(columns, key, strict=True)) | {"seeds": seeds} | spreads | {"reasons": reasons})
    return table


def _spread(value: str, numbers: list[float]) -> Row:
    return {
        f"{value}_mean": statistics.mean(numbers) if numbers else None,
        f"{value}_standard_deviation": statistics.stdev(numbers) if len(numbers) > 1 else None,
        f"{value}_lowest": min(numbers, default=None),
        f"{value}_highest": max(numbers, default=None),
    }


def csv_rows(table: list[Row]) -> list[Row]:
    """Return the rows with only the first reason of each."""
    rows = [row | {"reason": next(iter(row["reasons"].values()), None)} for row in table]
    return [{name: cell for name, cell in row.items() if name != "reasons"} for row in rows]


def markdown(suite: Suite, fields: Sequence[str], table: list[Row]) -> str:
    """Return a Markdown table for each measured value and label: one row per combination, one column per length."""
    parts = []
    for value in suite.values:
        for label, labelled in _groups(table, ["measured"]).items():
            lengths, rows = sorted({row["length"] for row in labelled}), []
            for combined in _groups(labelled, fields).values():
                cells = {row["length"]: _shown(row, value) for row in combined}
                seeds = max(0 if value in row["reasons"] else row["seeds"] for row in combined)
                row = {field: combined[0][field] for field in fields} | {"seeds": seeds}
                rows.append(row | {str(length): cells.get(length, "–") for length in lengths})
            parts += [", ".join(filter(None, [f"**{value}**", *label])), result_files.markdown_table(rows)]
    parts.append("± is the standard deviation over the seeds.")
    reasons = dict.fromkeys(reason for row in table for reason in row["reasons"].values())
    return "\n\n".join([*parts, *(f"undefined: {reason}" for reason in reasons)]) + "\n"


def _shown(row: Row, value: str) -> str:
    if value in row["reasons"]:
        return "undefined"
    deviation = row[f"{value}_standard_deviation"]
    return f"{row[f'{value}_mean']:.4f}" + (f" ± {deviation:.4f}" if deviation is not None else "")


def figure(suite: Suite, fields: Sequence[str], table: list[Row], trained: int | None) -> Figure:
    """Plot the mean of the first value over the seeds, and its range, against the length."""
    value = suite.values[0]
    panels: dict[str, list[Curve]] = {}
    for (label,), labelled in _groups(table, ["measured"]).items():
        for values, rows in _groups(labelled, fields).items():
            points = sorted((row for row in rows if value not in row["reasons"]), key=lambda row: row["length"])
            y, low, high = ([row[f"{value}_{part}"] for row in points] for part in ("mean", "lowest", "highest"))
            curve = Curve(", ".join(values), [row["length"] for row in points], y, low, high)
            panels.setdefault(label or suite.name, []).append(curve)
    title = f"{', '.join(fields)}: mean, and range over the seeds"
    return curves.panels_figure(panels, title=title, x=suite.x_label, y=suite.y_label, trained=trained)


def _groups(table: list[Row], columns: Sequence[str]) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for row in table:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups

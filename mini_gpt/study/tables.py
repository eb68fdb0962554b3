"""Tables of a study: the spread of each metric over the seeds, by condition and length."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_gpt.study import statistics
from mini_gpt.study.statistics import Spread
from mini_gpt.suites import results as result_files
from mini_gpt.suites.base import Row, Suite


def gather(suite: Suite, rows: Mapping[str, list[Row]], conditions: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row of statistics for each condition, label of the suite and length.

    rows: {condition: rows of all its seeds}.
    conditions: {condition: its fields}. If a value is undefined for a seed, its statistics are None, and "reasons" maps
      its name to the reason.
    """
    table = []
    for condition, found in rows.items():
        fields = {name: str(cell) for name, cell in conditions[condition].items()}
        same: dict[tuple[str, int], list[Row]] = {}
        for row in found:
            same.setdefault((suite.label(row), row["length"]), []).append(row)
        for (label, length), of_seeds in same.items():
            spreads, reasons = _spreads(suite, of_seeds)
            start = {"condition": condition, **fields, "measured": label, "length": length}
            count = len(of_seeds) if len(reasons) < len(suite.values) else 0  # 0: all values are undefined
            table.append(start | {"seeds": count} | spreads | {"reasons": reasons})
    return table


def _spreads(suite: Suite, rows: list[Row]) -> tuple[Row, dict[str, str]]:
    spreads: Row = {}
    reasons: dict[str, str] = {}
    for value in suite.values:
        numbers: list[Any] = [row.get(value) for row in rows]  # a metric can be newer than a result
        if None in numbers:
            reasons[value] = rows[numbers.index(None)]["reason"] or f"these runs have no {value}"
            spreads |= {f"{value}_{name}": None for name in Spread._fields}
        else:
            spreads |= {f"{value}_{name}": cell for name, cell in statistics.spread(numbers)._asdict().items()}
    return spreads, reasons


def csv_rows(table: list[Row]) -> list[Row]:
    """Return the rows with the same columns, and with only the first reason of each."""
    rows = [row | {"reason": next(iter(row["reasons"].values()), None)} for row in table]
    columns = dict.fromkeys(name for row in rows for name in row if name != "reasons")
    return [{name: row.get(name) for name in columns} for row in rows]


def by_length(table: list[Row], values: Sequence[str]) -> dict[str, list[Row]]:
    """Return a table for each value and label, by its title: one row per condition, one column per length."""
    found = {}
    for value in values:
        for label, labelled in groups(table, "measured").items():
            lengths, rows = sorted({row["length"] for row in labelled}), []
            for condition, combined in groups(labelled, "condition").items():
                cells = {row["length"]: _shown(row, value) for row in combined}
                seeds = max(0 if value in row["reasons"] else row["seeds"] for row in combined)
                row = {"condition": condition, "seeds": seeds}
                rows.append(row | {str(length): cells.get(length, "–") for length in lengths})
            found[", ".join(filter(None, [value, label]))] = rows
    return found


def markdown(table: list[Row], values: Sequence[str]) -> str:
    parts = []
    for title, rows in by_length(table, values).items():
        value, *label = title.split(", ", 1)
        parts += [", ".join([f"**{value}**", *label]), result_files.markdown_table(rows)]
    parts.append("± is the standard deviation over the seeds.")
    reasons = dict.fromkeys(reason for row in table for reason in row["reasons"].values())
    return "\n\n".join([*parts, *(f"undefined: {reason}" for reason in reasons)]) + "\n"


def _shown(row: Row, value: str) -> str:
    if value in row["reasons"]:
        return "undefined"
    deviation = row[f"{value}_standard_deviation"]
    return f"{row[f'{value}_mean']:.4f}" + (f" ± {deviation:.4f}" if deviation is not None else "")


def groups(table: Sequence[Row], column: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in table:
        found.setdefault(row[column], []).append(row)
    return found

"""A study's figures and tables for a paper: PDF and SVG without titles, and LaTeX for the package booktabs."""

from collections.abc import Sequence
from pathlib import Path

from mini_gpt import suites
from mini_gpt.study import tables
from mini_gpt.study.report import Report
from mini_gpt.suites import SUITES
from mini_gpt.suites import results as result_files
from mini_gpt.suites.base import Row

LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
LATEX |= {"<": "$<$", ">": "$>$", "−": "$-$", "±": r"$\pm$"}


def write(report: Report) -> list[Path]:
    """Write the files to the folder `paper` of the study's directory, and return their paths."""
    contents: result_files.Contents = {}
    for stem, figure in report.figures().items():
        figure.suptitle("")
        if len(figure.axes) == 1:  # of several panels, the titles tell which is which
            figure.axes[0].set_title("")
        contents |= {f"{stem}.pdf": figure, f"{stem}.svg": figure}
    for name, table in report.tables.items():
        parts = tables.by_length(table, SUITES[name].values)
        text = "\n".join(f"% {title}; mean and standard deviation\n{latex(rows)}" for title, rows in parts.items())
        contents[f"{suites.file_stem(name, report.plan.suites[name])}.tex"] = text
    if report.rows:
        contents["comparisons.tex"] = latex([_verdict(row) for row in report.rows])
    return result_files.write(report.workdir / "paper", "", contents)


def latex(rows: Sequence[Row]) -> str:
    """Return a `tabular` with the rules of booktabs."""
    lines = [
        " & ".join(_escaped(cell) for cell in cells) + r" \\" for cells in (rows[0], *(row.values() for row in rows))
    ]
    head = [rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def _escaped(cell: object) -> str:
    return "".join(LATEX.get(character, character) for character in str(cell))


def _verdict(row: Row) -> Row:
    numbers = [row[name] for name in ("difference", "interval_low", "interval_high")]
    mean, low, high = ("–" if number is None else f"{number:+.4f}".replace("-", "−") for number in numbers)
    claim = {"claim": f"{row['first']} {row['claim']} than {row['second']}"}
    claim |= {"metric": ", ".join(filter(None, [row["metric"], row["label"]]))}
    claim |= {"length": row["length"], "difference": f"{mean} ({low} to {high})", "p (Holm)": f"{row['p_holm']:.3g}"}
    return claim | {"seeds": row["seeds"], "verdict": row["verdict"]}

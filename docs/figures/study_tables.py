"""Write the tables and verdicts of studies into the pages of the docs.

    python -m docs.figures.study_tables --take=runs/studies/heads    # copy the results of a study to docs/studies/
    python -m docs.figures.study_tables                              # write them into the pages

A page has `<!-- study NAME: KIND -->`, then what is generated, then `<!-- /study -->`. KIND is one of:

standing                                            whether the plan was frozen
verdicts                                            a table of all comparisons
verdict CONDITION CONDITION [LENGTH [METRIC]]       one verdict with its difference
table SUITE METRIC [LABEL]                          means and deviations, by condition and length
rise CONDITION LENGTH LENGTH SUITE METRIC [LABEL]   the difference of the means at two lengths, second minus first
holds CONDITION LENGTH [SUITE METRIC [LABEL]]       the largest length, divided by the trained LENGTH, at which most
                                                    seeds hold, and how many of them hold there; by default in the
                                                    exact match of tasks, or else the loss in blocks
orders STUDY LENGTH                                 the losses in blocks here and in STUDY, with ranks, and the
                                                    pairs whose order changed in all seeds
holding                                             a table of `holds` for the encodings of several studies, HOLDING
at CONDITION CONDITION LENGTH FIRST LAST            the difference of the losses with FIRST..LAST tokens of context in
                                                    blocks of LENGTH, first minus second condition: mean ± deviation
"""

import argparse
import csv
import json
import math
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from mini_gpt.runtime import files
from mini_gpt.suites.results import csv_text, markdown_table

DOCS = Path(__file__).parents[1]
BY_POSITION, COMPARISONS, SEEDS, STANDING = "by_position", "comparisons", "seeds", "standing"
# A seed that has learned holds at a length if, there and at all lengths from the trained one to it, its loss is at most
# this much (nats) above that at the trained length; or if its exact match is at least that much.
MOST_RISE, LEAST_MATCH = 0.05, 0.9
# The columns of the table "holding": {heading: {study: trained length}}. The first study that has an encoding is taken.
HOLDING = {
    "text, trained on 64 characters": {"positions": 64, "text_64": 64},
    "text, on 256 characters": {"text_256": 256},
    "the same, tuned": {"text_256_tuned": 256},
    "copying, on 10 letters": {"copying": 10},
    "adding, on 3 digits": {"addition": 3},
}
CONDITIONS = ("none", "learned", "abacus", "coupled", "sinusoidal", "rope", "alibi", "t5", "hard_alibi", "kerple")
CONDITIONS += ("fire", "pope", "fox", "cope", "rnope-swa")
LABELS = {"abacus": "`learned`, abacus ids", "coupled": "`learned`, coupled ids", "rnope-swa": "RNoPE-SWA"}
GROUP, FARTHEST = 4, 128  # tokens: a row of by_position.csv is a mean over GROUP positions of a block
MARKED = re.compile(r"(<!-- study (\S+): (.+?) -->)(.*?)(<!-- /study -->)", re.DOTALL)
Rows = list[dict[str, str]]


def generated(name: str, kind: str) -> str:
    """Return the text of one mark. Raise KeyError or ValueError if the study does not have it."""
    word, *arguments = kind.split(" ")
    if word == "standing":
        (one,) = _rows(name, STANDING)
        return one["standing"]
    if word == "verdicts":
        return f"\n{_verdicts(_rows(name, COMPARISONS))}\n"
    if word == "verdict":
        found = [
            row
            for row in _rows(name, COMPARISONS)
            if [row[column] for column in ("first", "second", "length", "metric")][: len(arguments)] == arguments
        ]
        (one,) = found
        return f"{one['verdict']}, {_difference(one)}"
    if word == "table":
        suite, metric, *label = arguments
        return f"\n{_table(_rows(name, suite), metric, ' '.join(label))}\n"
    if word == "rise":
        condition, first, second, suite, metric, *label = arguments
        rows = [row for row in _rows(name, suite) if row["measured"] == " ".join(label)]
        mean = {row["length"]: row[f"{metric}_mean"] for row in rows if row["condition"] == condition}
        return _signed(float(mean[second]) - float(mean[first]))
    if word == "holds":
        condition, trained, *measured = arguments
        return _holds(*_of_condition(_rows(name, SEEDS), condition, measured), int(trained))
    if word == "holding":
        return f"\n{_holding()}\n"
    if word == "orders":
        other, length = arguments
        return f"\n{_orders(other, name, length)}\n"
    if word == "at":
        first, second, length, *places = arguments
        return _difference_at(
            _rows(name, BY_POSITION), (first, second), length, range(int(places[0]), int(places[1]) + 1)
        )
    raise ValueError(f"{kind}: must start with standing, verdicts, verdict, table, rise, holds, holding, orders or at")


def write_page(text: str) -> str:
    """Return the text of a page with all generated parts written anew."""
    return MARKED.sub(lambda mark: f"{mark[1]}{generated(mark[2], mark[3])}{mark[5]}", text)


def take(study: Path) -> None:
    """Copy to docs/studies/ a study's tables, the figures that pages show, and whether its plan was frozen.

    A table of all studies is one file, with a column for the study.
    """
    name = json.loads((study / "study.json").read_text(encoding="utf-8"))["name"]
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    for path in study.glob("*.png"):
        if f"studies/{name}/{path.name}" in pages:
            (DOCS / "studies" / name).mkdir(exist_ok=True)
            shutil.copyfile(path, DOCS / "studies" / name / path.name)
    for path in study.glob("*.csv"):
        if path.name != "runs.csv":
            _write(name, path.stem, _read(path))
    standing = re.search(
        r"^(Confirmatory|Descriptive|Exploratory): .*$", (study / "report.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    _write(name, STANDING, [{"standing": standing[0]}] if standing else [])
    _write(name, SEEDS, _of_seeds(study))
    _write(name, BY_POSITION, _by_position(study))


def _write(name: str, table: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Put the rows of a study into a table of all studies, instead of those it has there."""
    path = DOCS / "studies" / f"{table}.csv"
    others = [row for row in _read(path) if row["study"] != name] if path.exists() else []
    if new := [*others, *({"study": name} | row for row in rows)]:
        files.write_text(path, csv_text(sorted(new, key=lambda row: row["study"])))


def _of_seeds(study: Path) -> list[dict[str, object]]:
    """Return the loss and the exact match of each run, by length."""
    rows = _read(study / "runs.csv")
    metrics = [metric for metric in ("nll", "exact_match") if metric in rows[0]]
    named = ("condition", "seed", "suite", "learned", "measured", "length")
    short = lambda value: f"{float(value):.5f}" if value else ""
    return [{name: row[name] for name in named} | {metric: short(row[metric]) for metric in metrics} for row in rows]


def _by_position(study: Path) -> list[dict[str, object]]:
    """Return the mean loss of each run over GROUP positions at a time, in blocks of up to FARTHEST tokens."""
    rows: list[dict[str, object]] = []
    for condition, seed in dict.fromkeys((row["condition"], row["seed"]) for row in _read(study / "runs.csv")):
        path = study / files.plain_name(f"{condition},seed={seed}") / "eval" / "extrapolation.json"
        if not path.exists():
            continue
        for length, nll in json.loads(path.read_text(encoding="utf-8"))["by_position"].items():
            for start in range(0, len(nll) if int(length) <= FARTHEST else 0, GROUP):
                mean = round(statistics.fmean(nll[start : start + GROUP]), 6)
                rows.append({"condition": condition, "seed": seed, "length": length, "context": start + 1, "nll": mean})
    return rows


def _of_condition(rows: Rows, condition: str, measured: list[str]) -> tuple[Rows, str]:
    """Return the rows of a condition, and the metric. measured: suite, metric, label; or [] for the default."""
    is_of_tasks = any(row["suite"] == "tasks" for row in rows)
    default = ["tasks", "exact_match"] if is_of_tasks else ["extrapolation", "nll", "blocks"]
    suite, metric, *label = measured or default
    rows = [row for row in rows if (row["suite"], row["measured"]) == (suite, " ".join(label))]
    return [row for row in rows if row["condition"] == condition], metric


def _holding() -> str:
    studies = {name: _rows(name, SEEDS) for column in HOLDING.values() for name in column}
    table = []
    for condition in CONDITIONS:
        cells = {"encoding": LABELS.get(condition, f"`{condition}`")}
        for heading, column in HOLDING.items():
            found = [(*_of_condition(studies[name], condition, []), trained) for name, trained in column.items()]
            cells[heading] = next((_holds(*one) for one in found if one[0]), "–")
        table.append(cells)
    return markdown_table(table)


def _holds(rows: Rows, metric: str, trained: int) -> str:
    """Return such as `4× (7 of 8)`; `≥ 8×` for the largest measured length; `not learned` without a majority at 1×."""
    if not rows:
        raise ValueError("no such condition, suite or label")
    if any(row["learned"] == "" for row in rows):
        raise ValueError("the study does not say when a run has learned (fit)")
    of_seed: dict[str, dict[int, float]] = {}
    for row in rows:
        of_seed.setdefault(row["seed"], {})[int(row["length"])] = float(row[metric] or "nan")
    lengths = sorted({int(row["length"]) for row in rows if int(row["length"]) >= trained})
    found, holding = "not learned", {row["seed"] for row in rows if row["learned"] == "True"}
    for length in lengths:
        holding = {seed for seed in holding if _holds_at(of_seed[seed], length, trained, metric)}
        if 2 * len(holding) > len(of_seed):
            largest = "≥ " if length == lengths[-1] else ""
            found = f"{largest}{length / trained:g}× ({len(holding)} of {len(of_seed)})"
    return found


def _holds_at(values: dict[int, float], length: int, trained: int, metric: str) -> bool:
    value, before = values.get(length, math.nan), values.get(trained, math.nan)
    return value <= before + MOST_RISE if metric == "nll" else value >= LEAST_MATCH


def _orders(earlier: str, later: str, length: str) -> str:
    """Return a table with a row for each condition of two studies with the same seeds, the lowest later loss first.

    A condition passes those that had a lower loss in all seeds of the earlier study, and have a higher one in all seeds
    of the later.
    """
    losses: list[dict[str, list[float]]] = []
    for name in (earlier, later):
        found: dict[str, list[float]] = {}
        for row in sorted(_rows(name, SEEDS), key=lambda row: int(row["seed"])):
            if (row["suite"], row["measured"], row["length"]) == ("extrapolation", "blocks", length) and row["nll"]:
                found.setdefault(row["condition"], []).append(float(row["nll"]))
        losses.append({name: found[name] for name in sorted(found, key=lambda name: statistics.fmean(found[name]))})
    below = [{(a, b) for a in of for b in of if all(x < y for x, y in zip(of[a], of[b], strict=True))} for of in losses]
    return markdown_table(
        [
            {"": condition}
            | {
                f"`{name}`": f"{statistics.fmean(of[condition]):.3f} ({[*of].index(condition) + 1})"
                for name, of in zip((earlier, later), losses, strict=True)
            }
            | {"passes": ", ".join(b for b in losses[0] if (b, condition) in below[0] and (condition, b) in below[1])}
            for condition in losses[1]
        ]
    )


def _difference_at(rows: Rows, pair: tuple[str, str], length: str, contexts: range) -> str:
    if (contexts.start - 1) % GROUP or len(contexts) % GROUP:
        raise ValueError(f"{contexts}: must be whole groups of {GROUP} tokens of context, the first from 1 on")
    of_seed: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row["length"] == length and int(row["context"]) in contexts and row["condition"] in pair:
            of_seed.setdefault(row["seed"], ([], []))[pair.index(row["condition"])].append(float(row["nll"]))
    differences = [statistics.fmean(first) - statistics.fmean(second) for first, second in of_seed.values()]
    return f"{_signed(statistics.fmean(differences))} ± {statistics.stdev(differences):.3f}"


def _rows(name: str, table: str) -> Rows:
    return [row for row in _read(DOCS / "studies" / f"{table}.csv") if row["study"] == name]


def _read(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _verdicts(rows: Rows) -> str:
    several = len({(row["suite"], row["metric"], row["label"]) for row in rows}) > 1
    return markdown_table(
        [
            {
                "claim": f"{row['first']} {row['claim']} than {row['second']}",
                **({"measured": f"{row['metric']} {row['label']}".strip()} if several else {}),
                "length": row["length"],
                "difference": _difference(row),
                "p (Holm)": f"{float(row['p_holm']):.3g}",
                "seeds": row["seeds"],
                "verdict": ": ".join(filter(None, [row["verdict"], row.get("reason", "")])),
            }
            for row in rows
        ]
    )


def _difference(row: dict[str, str]) -> str:
    if not row["difference"]:
        return "–"
    names = ("difference", "interval_low", "interval_high")
    difference, low, high = (_signed(float(row[name])) if row[name] else "" for name in names)
    return f"{difference} ({low} to {high})" if low else difference


def _signed(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−")


def _table(rows: Rows, metric: str, label: str) -> str:
    chosen = [row for row in rows if row["measured"] == label]
    if not chosen:
        raise ValueError(f"no rows with the label {label!r}")
    lengths = sorted({row["length"] for row in chosen}, key=int)
    table = []
    for condition in dict.fromkeys(row["condition"] for row in chosen):
        cells = {row["length"]: _cell(row, metric) for row in chosen if row["condition"] == condition}
        table.append({"": condition} | {f"{int(length):,}": cells.get(length, "–") for length in lengths})
    return markdown_table(table)


def _cell(row: dict[str, str], metric: str) -> str:
    mean, deviation = row[f"{metric}_mean"], row[f"{metric}_standard_deviation"]
    spread = f" ± {float(deviation):.3f}" if deviation else ""  # one seed has none
    return f"{float(mean):.3f}{spread}" if mean else "undefined"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, action="append", default=[], help="directory of a study; repeatable")
    for study in parser.parse_args().take:
        take(study)
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if (new := write_page(text)) != text:
            files.write_text(page, new)
            print(page)


if __name__ == "__main__":
    main()

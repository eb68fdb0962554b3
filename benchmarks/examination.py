"""Examine `--suite=diagnose` on the runs with a hidden fault, and write docs/results/examination.csv.

python -m benchmarks.examination --runs=55
python -m benchmarks.examination --runs=45 --first=100 --out=docs/results/examination_new_seeds.csv

Trains the runs of `python -m docs.tutorials.find_the_fault` with the seeds 0, 1, ..., or from another seed on, in a
temporary directory, and diagnoses each. Seeds that are in the file are not trained again; the next command continues.
The table is printed at the end. A run takes about half a minute on two CPU cores.
"""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from scipy.stats import binomtest

from docs.tutorials import find_the_fault
from mini_gpt.commands import command_line
from mini_gpt.insight.diagnosis import mistakes, probe
from mini_gpt.runtime import files
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.suites.diagnose import Diagnose
from mini_gpt.suites.results import csv_text
from mini_gpt.training.run import Run

OUT = Path("docs/results/examination.csv")
HEADER = ("fault", "runs", "found", "blamed rightly", "blamed wrongly")
Row = Mapping[str, str | int | float]


def examine(seed: int) -> Row:
    """Train and diagnose the run of a seed.

    blamed: the fault that diagnose names, "none" if it finds nothing, "unknown" if it finds something without a cause.
    lower_with: for a run without a fault, the mistake that lowers its loss if the search is made nevertheless.
    """
    fault, mistake = find_the_fault.draw(seed)
    with tempfile.TemporaryDirectory() as directory:
        find_the_fault.train(seed, Path(directory, "run"))
        run = Run(Path(directory, "run"))
        result = Diagnose().measure(run, SuiteOptions())
        windows_BM = probe.windows(run.store.tokens("validation"), run.config.context_length + 1, None)
        lower = None if mistake else mistakes.search(run.model, windows_BM, lambda: 0)
    jax.clear_caches()
    values = {row["check"]: row["value"] for row in result["rows"]}
    return {
        "seed": seed,
        "fault": fault,
        "mistake": str(mistake or ""),
        "found": ";".join(result["found"]),
        "blamed": blamed(result["found"]),
        "loss_minus_recorded": values["recorded loss"],
        "gain": next((values[name] for name in values if name.startswith("trained ")), ""),
        "lower_with": str(lower or ""),
    }


def blamed(found: Sequence[str]) -> str:
    """Return the fault that findings of diagnose name; "none" without findings, "unknown" if they name no fault."""
    named = [fault for fault in find_the_fault.FAULTS if find_the_fault.checks(fault) & {*found}]
    return named[0] if named else "unknown" if found else "none"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table: for each fault, how often it was found and blamed, with 95% intervals.

    The intervals are exact (Clopper and Pearson 1934).
    """
    lines = [HEADER, ("---", *["---:"] * 4)]
    groups = [(fault, [row for row in rows if row["fault"] == fault]) for fault in find_the_fault.FAULTS]
    groups.append(("all faults", [row for row in rows if row["fault"] != "none"]))
    for fault, group in groups:
        found = sum(bool(row["found"]) for row in group)
        right = sum(row["blamed"] == row["fault"] for row in group)
        wrong = sum(row["blamed"] not in (row["fault"], "none", "unknown") for row in group)
        lines.append((fault, str(len(group)), *(share(count, len(group)) for count in (found, right, wrong))))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def share(count: int, total: int) -> str:
    """Return a count with the 95% interval of its share, such as "5 (48–100%)"."""
    if not total:
        return "0"
    low, high = binomtest(count, total).proportion_ci(method="exact")
    return f"{count} ({100 * low:.0f}–{100 * high:.0f}%)"


@command_line.command
def main() -> None:
    parser = command_line.parser(__doc__, prog="python -m benchmarks.examination")
    parser.add_argument("--runs", type=int, default=48, help="the number of runs in the file at the end")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=OUT, help="the file")
    flags = parser.parse_args()
    command_line.set_up()
    rows: list[Row] = [*csv.DictReader(flags.out.open())] if flags.out.exists() else []
    for seed in range(flags.first + len(rows), flags.first + flags.runs):
        rows.append(examine(seed))
        files.write_text(flags.out, csv_text(rows))
    print(table(rows))


if __name__ == "__main__":
    main()

"""The examination of diagnose: its table, and the one of the docs."""

import csv

import pytest
from scipy.stats import beta

from benchmarks import examination
from docs.tutorials import find_the_fault
from tests.conftest import REPOSITORY


def test_shares_have_exact_intervals():
    low, high = beta.ppf(0.025, 3, 8), beta.ppf(0.975, 4, 7)  # 3 of 10
    assert examination.share(3, 10) == f"3 ({100 * low:.0f}–{100 * high:.0f}%)"
    assert examination.share(0, 4) == f"0 (0–{100 * (1 - 0.025**0.25):.0f}%)" and examination.share(0, 0) == "0"


def test_the_table_counts_findings_and_blame():
    found = [("scale", "trained scale;recorded loss", "scale"), ("scale", "recorded loss", "unknown")]
    found += [("scale", "trained base", "base"), ("none", "", "none"), ("none", "loss", "unknown")]
    rows = [dict(zip(("fault", "found", "blamed"), row, strict=True)) for row in found]
    lines = [line.strip("| ").split(" | ") for line in examination.table(rows).splitlines()]
    counts = {line[0]: [cell.split()[0] for cell in line[1:]] for line in lines[2:]}
    assert counts["scale"] == counts["all faults"] == ["3", "3", "1", "1"]
    assert counts["none"] == ["2", "1", "1", "0"] and counts["norm"] == ["0"] * 4


@pytest.mark.parametrize("file, first", [("examination.csv", 0), ("examination_new_seeds.csv", 100)])
def test_the_files_have_the_runs_of_the_seeds(file, first):
    rows = [*csv.DictReader((REPOSITORY / examination.OUT).with_name(file).open(encoding="utf-8"))]
    drawn = [find_the_fault.draw(seed) for seed in range(first, first + len(rows))]
    assert [(row["fault"], row["mistake"]) for row in rows] == [(fault, str(each or "")) for fault, each in drawn]
    assert [int(row["seed"]) for row in rows] == [*range(first, first + len(rows))] and len(rows) >= 20
    if first:
        assert examination.table(rows) in (REPOSITORY / "docs/results/inside.md").read_text(encoding="utf-8")

"""benchmarks/heads.py puts the losses of the study beside times that were measured in turns."""

from benchmarks import heads


def test_the_table_has_the_loss_of_the_study_and_the_time_of_the_benchmark():
    page = (heads.LOSSES.parents[2] / "results" / "studies.md").read_text(encoding="utf-8")
    times = [{"median": 2.04, "quartiles": [2, 3]}, {"median": 3.06, "quartiles": [3, 4]}]
    found = heads.table({"milliseconds_per_step": times, "ratio": {"median": 1.504}}).splitlines()
    assert found[2:4] == ["| 1 | 64 | 2.048 | 2.0 |", "| 8 | 8 | 1.962 | 3.1 |"]
    assert found[-1] == "8 heads take 1.50 times as long as 1."
    assert all(" | ".join(row.split(" | ")[:3]) in page for row in found[2:4])

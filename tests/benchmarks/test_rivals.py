"""Comparisons of speed: processes that take turns, rivals, and growth with size."""

import sys

import numpy as np
import pytest

from benchmarks import growth, rivals, tasks, turns
from benchmarks.growth import Point
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY

# benchmarks/turns.py: processes that measure in turns.


SERVE = """
from benchmarks import turns
counts = []
{}
finish = lambda: {{"n": len(counts), "peak": turns.peak_resident_bytes()}}
turns.serve({{"start": 0}}, lambda: counts.append(1) or {}, finish)
"""


def worker(name, measured, before=""):
    return turns.Worker(name, [sys.executable, "-c", SERVE.format(before, measured)], REPOSITORY)


def test_a_worker_measures_when_it_is_asked():
    with worker("x", "len(counts) + 0.5", "print('noise')") as asked:
        assert asked.about == {"start": 0}
        assert [asked.measure(), asked.measure()] == [1.5, 2.5]
        assert asked.finish()["n"] == 2


def test_a_worker_that_ends_says_why(capfd):
    with pytest.raises(UserError, match="x: ZeroDivisionError: division by zero"):
        worker("x", "1", "1 / 0")
    with worker("y", "1 / 0") as ended, pytest.raises(UserError, match="y: ZeroDivisionError: division by zero"):
        ended.measure()
    with pytest.raises(UserError, match="z: ended by SIGABRT"):
        worker("z", "1", "import os; os.abort()")
    assert capfd.readouterr().err.count("Traceback") == 2, "what it wrote is shown once"


def test_workers_alternate_and_change_their_order(monkeypatch):
    asked, measure = [], turns.Worker.measure
    monkeypatch.setattr(turns.Worker, "measure", lambda worker: asked.append(worker.name) or measure(worker))
    with worker("a", "len(counts)") as a, worker("b", "10 * len(counts)") as b:
        assert turns.alternate({"a": a, "b": b}, 3) == {"a": [1, 2, 3], "b": [10, 20, 30]}
    assert asked == ["a", "b", "b", "a", "a", "b"] and a.process.returncode is not None


# benchmarks/rivals.py compares processes that take turns, and refuses a program that does other work.


TRAINED = {"parameters": 1000, "vocabulary": 65, "losses": [4.2, 3.3]}
SCORED = {"parameters": 1000, "losses": [10.9]}
DECODED = {"parameters": 1000, "written": [5, 6]}


def test_a_ratio_compares_times_of_the_same_round():
    # The machine is ten times slower in the last round. The ratio of the medians would be 4 / 4.
    times = {"mini_gpt": [2, 4, 40], "A": [4, 8, 80], "B": [1, 4, 50]}
    found = rivals.summary(times)
    assert found["A"]["ratio"] == {"lower": 0.5, "median": 0.5, "upper": 0.5}
    assert found["B"]["ratio"]["median"] == 1 and found["B"]["milliseconds"]["median"] == 4
    assert rivals.best_rival(found) == "B"
    *_, a, b = rivals.table(found).splitlines()
    assert a == "| A | 8.0 (4.0 to 80.0) | 0.50 (0.50 to 0.50) |"
    assert b.startswith("| **B**, the best rival | 4.0 (1.0 to 50.0) | 1.00 (0.80 to 2.00) |")


@pytest.mark.parametrize(
    ("task", "about", "problem"),
    [
        ("training", TRAINED, None),
        ("training", TRAINED | {"parameters": 1020}, "X: found 1020 parameters; mini_gpt has 1000"),
        ("training", TRAINED | {"losses": [9.0, 4.3]}, "X: found losses 9.000 to 4.300; must fall from about 4.174"),
        ("scoring", SCORED, None),
        ("scoring", SCORED | {"losses": [10.91]}, "X: found a loss of 10.9100; mini_gpt has 10.9000"),
        ("decoding", DECODED, None),
        ("decoding", DECODED | {"written": [5, 7]}, "X: its tokens differ from those of mini_gpt"),
    ],
)
def test_a_program_that_does_other_work_is_named(task, about, problem):
    ours = {"training": TRAINED, "scoring": SCORED, "decoding": DECODED}[task]
    found = rivals.problems({"task": task, "dtype": "float32"}, {"mini_gpt": ours, "X": about})
    assert found == ([] if problem is None else [problem])


def test_tokens_may_differ_in_bfloat16():
    abouts = {"mini_gpt": DECODED, "X": DECODED | {"written": [5, 7]}}
    assert rivals.problems({"task": "decoding", "dtype": "bfloat16"}, abouts) == []


def test_training_measures_whole_steps():
    losses = iter([4.0, 3.0, 2.0, 1.0, 0.5])
    measure, about = tasks.training(losses, {"warmup": 2, "steps": 2}, {"parameters": 7})
    assert about == {"parameters": 7, "losses": [4.0, 3.0]}
    assert measure() > 0 and next(losses) == 0.5


# benchmarks/growth.py measures each point once, and plots the points that it has.


def row(axis, value, program, milliseconds, peak=2e9, temporary=""):
    found = dict.fromkeys(growth.COLUMNS, "") | {"axis": axis, "value": str(value), "program": program}
    return found | {"milliseconds": str(milliseconds), "peak_bytes": str(peak), "temporary_bytes": str(temporary)}


def test_all_lengths_have_the_same_tokens_in_a_step():
    sizes = [point.size for point in growth.points() if point.axis == "length"]
    assert {size["length"] * size["batch"] for size in sizes} == {16_384}
    assert {(size["layers"], size["width"], size["heads"]) for size in sizes} == {(4, 128, 4)}
    assert Point("width", 1024, "mini_gpt").size["heads"] == 32


def test_exponents_are_slopes_between_neighbours():
    assert np.allclose(growth.exponents([64, 256, 1024], [3, 3, 48]), [0, 2])


def test_labels_keep_a_distance_their_order_and_their_mean():
    assert np.allclose(growth.spaced([0.5, 0.1, 0.52, 0.9], 0.1), [0.46, 0.1, 0.56, 0.9])
    # Moved apart, the first two would touch the third.
    assert np.allclose(growth.spaced([0.5, 0.5, 0.58], 0.1), np.mean([0.5, 0.5, 0.58]) + np.array([-0.1, 0, 0.1]))


def test_curves_have_the_measured_points_in_order():
    rows = [row("layers", 24, "nanoGPT", 90), row("layers", 3, "nanoGPT", 20), row("layers", 6, "nanoGPT", "")]
    found = growth.lines(
        {Point(r["axis"], int(r["value"]), r["program"]): r for r in rows}, "layers", "milliseconds", 1
    )
    assert list(found) == ["nanoGPT"] and found["nanoGPT"][:3] == ("nanoGPT", [3, 24], [20, 90])


def test_measured_points_are_kept_and_missing_ones_measured(monkeypatch, tmp_path, capsys):
    (tmp_path / "input.txt").write_text("text")
    asked = []

    def measure(point, text):
        asked.append(point)
        return row(*point, 10 + point.value, temporary=1e8)

    monkeypatch.setattr(growth, "measure", measure)
    monkeypatch.setattr(rivals, "check_installed", lambda names: None)
    command = ["growth", f"--text={tmp_path / 'input.txt'}", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", command)
    growth.main()
    assert asked == list(growth.points())
    slopes = "0.13 0.22 0.36"  # log2 of 12 / 11, 14 / 12, 18 / 14
    assert f"devices, mini_gpt: exponents of the time between neighbouring points: {slopes}" in capsys.readouterr().out
    growth.main()
    assert len(asked) == len(list(growth.points())) and (tmp_path / "growth.png").stat().st_size > 10_000

"""benchmarks/growth.py measures each point once, and plots the points that it has."""

import sys

import numpy as np

from benchmarks import growth, rivals
from benchmarks.growth import Point


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

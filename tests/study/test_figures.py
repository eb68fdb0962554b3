"""Figures of a study: the labels of paired differences, and lines that can be told apart."""

from mini_gpt.insight import curves
from mini_gpt.insight.curves import Curve
from mini_gpt.study import figures


def labels(*where):
    row = {"first": "a", "second": "b", "metric": "nll", "differences": [0.1, 0.2], "difference": 0.15, "seeds": 2}
    row |= {"interval_low": None, "interval_high": None, "smallest_effect": 0.0, "verdict": "undecided"}
    rows = [row | {"suite": suite, "label": label, "length": length} for suite, label, length in where]
    (axes,) = figures.differences(rows, 0.05)["nll"].axes
    return [tick.get_text() for tick in axes.get_yticklabels()]


def test_differences_name_the_suite_and_the_windows_only_if_there_are_several():
    assert labels(("text", "blocks", 64), ("text", "blocks", 128)) == ["a − b, 64", "a − b, 128"]
    several = labels(("text", "blocks", 64), ("text", "sliding", 64), ("loss", "", 64))
    assert several == ["a − b, text, blocks, 64", "a − b, text, sliding, 64", "a − b, loss, 64"]


def test_curves_differ_without_colour_and_one_of_one_length_is_seen():
    drawn = [Curve("short", [64], [2.0], [1.9], [2.1]), *(Curve(str(n), [64, 128], [2.0, 3.0]) for n in range(11))]
    (axes,) = curves.panels_figure({"blocks": drawn}, x="length", y="loss", trained=None).axes
    lines = [line for line in axes.lines if line.get_label()[0] != "_"]
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == len(drawn)
    assert lines[0].get_zorder() > max(line.get_zorder() for line in lines[1:])
    assert lines[0].get_markersize() > 2 * lines[1].get_markersize()

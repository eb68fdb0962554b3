"""Figures of a study: the labels of paired differences."""

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

"""Plots against length: tick labels do not overlap, and a legend lists the curves of all panels."""

from matplotlib.colors import to_hex

from mini_gpt.insight.curves import Curve, label_heads, new_figure, panels_figure, tick_labels, token_label


def test_labels_that_would_overlap_are_left_out():
    octaves = [64, 128, 256, 512, 1024]
    assert tick_labels(octaves, True) == ["64", "128", "256", "512", "1024"]
    assert tick_labels([4, 10, 14, 15, 16, 20], True) == ["4", "10", "14", "", "16", "20"]
    assert tick_labels([100, 101, 102, 103, 200], False) == ["100", "", "", "", "200"]
    assert tick_labels([7], False) == ["7"] and tick_labels([], False) == []


def test_one_legend_lists_the_curves_of_all_panels():
    first, second = Curve("first", [1, 2], [3.0, 4.0]), Curve("second", [1, 2], [5.0, 6.0])
    figure = panels_figure({"left": [first], "right": [first, second]}, x="length", y="loss", trained=None)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]


def test_curves_of_the_same_colour_differ_in_style():
    lines = [Curve(str(number), [1, 2], [number, number]) for number in range(14)]
    (axes,) = panels_figure({"": lines}, x="x", y="y", trained=None).axes
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in axes.get_lines()}) == 14


def test_labels_of_tokens_show_white_space():
    labels = {"  a b ": "··a b·", "   ": "···", "\n\t": "⏎⇥", " \n": "·⏎", "": "∅"}
    assert {text: token_label(text) for text in labels} == labels


def test_layers_go_downwards_from_layer_0():
    _, axes = new_figure((3, 3))
    axes.imshow([[0, 1], [2, 3], [4, 5]], origin="lower")
    label_heads(axes, 3, 2, "")
    assert axes.transData.transform((0, 0))[1] > axes.transData.transform((0, 2))[1]

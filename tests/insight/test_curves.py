"""Tick labels of plots against length do not overlap."""

from mini_gpt.insight.curves import tick_labels


def test_labels_that_would_overlap_are_left_out():
    octaves = [64, 128, 256, 512, 1024]
    assert tick_labels(octaves, True) == ["64", "128", "256", "512", "1024"]
    assert tick_labels([4, 10, 14, 15, 16, 20], True) == ["4", "10", "14", "", "16", "20"]
    assert tick_labels([100, 101, 102, 103, 200], False) == ["100", "", "", "", "200"]
    assert tick_labels([7], False) == ["7"] and tick_labels([], False) == []

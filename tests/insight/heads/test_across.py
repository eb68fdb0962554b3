"""Figures of heads over runs and tasks."""

import itertools

import numpy as np
import pytest

from mini_gpt.insight.heads import across


def head(layer, number, label, **strengths):
    kinds = {kind.replace("_", " "): {"strength": strength, "queries": 9} for kind, strength in strengths.items()}
    return {"layer": layer, "head": number, "label": label, "kinds": kinds}


HEADS = [
    head(0, 0, "previous token", previous_token=0.8, induction=0.0),
    head(0, 1, "previous token", previous_token=0.6, induction=0.1),
    head(1, 0, "induction", previous_token=0.2, induction=0.7),
    head(1, 1, "mixed", previous_token=0.0, induction=0.1),
]


def test_bars_count_labels_by_layer_and_the_map_has_mean_strengths():
    bars, _, below, *_ = across.by_depth_figure({"a": HEADS, "b": HEADS[::-1]}).axes
    counts = {container.get_label(): [bar.get_height() for bar in container] for container in bars.containers}
    assert counts == {"previous token": [2, 0], "induction": [0, 1], "mixed": [0, 1]}
    assert [label.get_text() for label in below.get_yticklabels()] == ["previous token", "induction"]
    np.testing.assert_allclose(below.get_images()[0].get_array(), [[0.7, 0.1], [0.05, 0.4]])


def test_labels_look_different():
    labels = [*map(str, range(20)), "mixed", "global"]
    bars = across.by_depth_figure({"a": [head(0, 0, label) for label in labels]}).axes[0].containers
    looks = [(*bar[0].get_facecolor(), bar[0].get_hatch() is None) for bar in bars]
    assert all(np.abs(np.subtract(a, b)).max() > 0.04 for a, b in itertools.combinations(looks, 2))


def test_importance_has_a_column_for_each_task_and_one_scale():
    tasks = {"copy": np.array([[0.5, 0.1], [0.2, 0.0]]), "reverse": np.array([[-0.1, 0.3], [1.5, np.nan]])}
    drawn = across.importance_figure(tasks)
    assert {image.get_clim() for axes in drawn.axes[:2] for image in axes.get_images()} == {(-1.5, 1.5)}
    assert drawn.axes[1].get_title() == "reverse\nrank correlation -0.50"
    assert across.importance_rows(tasks)[2:] == [
        {"layer": 1, "head": 0, "copy": 0.2, "reverse": 1.5},
        {"layer": 1, "head": 1, "copy": 0.0, "reverse": None},
    ]


def test_runs_of_other_depths_have_rows_for_all_heads():
    rows = across.importance_rows({"deep": np.ones((3, 4)), "flat": np.ones((2, 4))})
    assert len(rows) == 12 and [row["flat"] for row in rows] == [1.0] * 8 + [None] * 4


def test_equal_values_have_their_mean_rank():
    first, second = np.array([[1, 2, 2, 5]]), np.array([[3, 1, 2, 9]])
    ranks = np.array([1, 2.5, 2.5, 4]), np.array([3, 1, 2, 4])
    assert across.rank_correlation(first, second) == pytest.approx(np.corrcoef(*ranks)[0, 1])

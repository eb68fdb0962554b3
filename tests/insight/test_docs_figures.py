"""In the figures of the docs, each curve shows the losses of its own run."""

import numpy as np
import pytest

from docs.figures import copying, sums, toy_heads


@pytest.mark.slow
@pytest.mark.parametrize("script, panels", [(sums, 8), (toy_heads, 6)])
def test_illustrations_are_drawn(script, panels):
    assert len([axes for axes in script.draw().axes if axes.get_title()]) == panels


@pytest.mark.parametrize(
    "changed, expected", [(0, [1, 2, 12, 0, 0, 6]), (2, [3, 4, 8, 6, 7, 8]), (4, [5, 0, 10, 6, 24, 10])]
)
def test_effects_are_summed_by_the_place_of_the_changed_letter(changed, expected):
    """The effects are 1, 2, …: of a word of five letters, of =, and of the letters that were copied."""
    effects_L = np.arange(1.0, 5 + 1 + changed + 1)
    assert copying.by_place(effects_L, changed, 5).tolist() == expected

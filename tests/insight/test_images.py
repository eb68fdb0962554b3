"""The pixels of an image encode the values of its array; labels and the colour bar stand beside the maps."""

import re

import numpy as np
import pytest

from mini_gpt.insight import colours, images
from tests.conftest import REPOSITORY

SIZE, GAP = images.SMALLEST, images.GAP


def plot_of(pixels, width, height):
    """Return the pixels of the maps, without the labels at the left and at the top and what is below."""
    left = next(x for x in range(pixels.shape[1]) if is_map(pixels, slice(None), x))
    top = next(y for y in range(pixels.shape[0]) if is_map(pixels, y, slice(left, None)))
    return pixels[top : top + height, left : left + width]


def is_map(pixels, y, x):
    """Return whether a row or a column has other colours than grey."""
    part = pixels[y, x].astype(int)
    return bool((np.ptp(part, axis=-1) > 8).any())


def test_a_grid_shows_the_square_root_of_each_weight():
    weights_NHLS = np.random.default_rng(0).uniform(0.2, 1, (2, 3, 4, 4))
    weights_NHLS[1, 2, 3, 0] = 0.25
    pixels = images.map_grid(weights_NHLS)
    grid = plot_of(pixels, 3 * SIZE + 2 * GAP, 2 * SIZE + GAP)
    assert pixels.dtype == np.uint8 and pixels.shape[0] > 2 * SIZE + GAP and pixels.shape[1] > 3 * SIZE + 2 * GAP
    square = grid[SIZE + GAP :, 2 * (SIZE + GAP) :][3 * SIZE // 4 :, : SIZE // 4]
    assert (square == images.WEIGHTS_X3[round(0.5 * 255)]).all()
    assert (grid[SIZE] == images.PAPER).all() and (grid[:, SIZE] == images.PAPER).all()


def test_masked_pairs_are_hatched_and_zero_is_paper():
    weights_NHLS = np.full((1, 1, 2, 2), 1.0)
    weights_NHLS[0, 0, 0, 1], weights_NHLS[0, 0, 1, 0] = np.nan, 0
    pixels = images.map_grid(weights_NHLS)
    (y, x) = np.argwhere((pixels == images.WEIGHTS_X3[255]).all(-1))[0]  # the corner of the first cell
    half = SIZE // 2
    masked, zero = pixels[y : y + half, x + half : x + SIZE], pixels[y + half : y + SIZE, x : x + half]
    assert {tuple(pixel) for pixel in masked.reshape(-1, 3)} == {(205,) * 3, (images.PAPER,) * 3}
    assert (zero == images.WEIGHTS_X3[0]).all()


def test_similarity_is_the_cosine_of_positions():
    table_PD = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    step = SIZE // 4
    shown = plot_of(images.similarity(table_PD), SIZE, SIZE)[::step, ::step]
    levels = [[255, 255, 128, 0], [255, 255, 128, 0], [128, 128, 255, 128], [0, 0, 128, 255]]
    assert (shown == images.SIGNED_X3[np.array(levels)]).all()
    long = plot_of(images.similarity(np.ones((1000, 2))), 250, 250)
    assert (long == images.SIGNED_X3[255]).all(), "a long table shows every fourth position"


def stops(name):
    """Return the colours of a ramp for light paper in the pages' script."""
    script = (REPOSITORY / "mini_gpt/pages/common/colours.js").read_text(encoding="utf-8")
    line = re.search(rf"const {name} = \{{\s*light: \[(.*?)\]", script, re.DOTALL)[1]
    return tuple(re.findall(r"#[0-9a-f]{6}", line))


def test_figures_have_the_colours_of_the_pages():
    assert (stops("RAMPS"), stops("SIGNED")) == (images.WEIGHTS, images.SIGNED)


@pytest.mark.parametrize("name", ["WEIGHTS", "SIGNED"])
def test_images_have_the_colours_of_figures(name):
    of_figures = getattr(colours, name)(np.arange(256))[:, :3] * 255
    np.testing.assert_array_equal(images.rgb(getattr(images, name)), of_figures.astype(np.uint8))

"""The pixels of an image encode the values of its array."""

import numpy as np

from mini_gpt.insight import images


def test_a_grid_shows_the_square_root_of_each_weight():
    weights_NHLS = np.random.default_rng(0).random((2, 3, 4, 4))
    weights_NHLS[1, 2, 3, 0] = 0.25
    pixels = images.map_grid(weights_NHLS)
    size = images.SMALLEST
    assert pixels.dtype == np.uint8 and pixels.shape == (2 * size + images.GAP, 3 * size + 2 * images.GAP, 3)
    square = pixels[size + images.GAP :, 2 * (size + images.GAP) :][3 * size // 4 :, : size // 4]
    assert (square == images.COLOURS_X3[round(0.5 * 255)]).all()
    assert (pixels[size] == images.PAPER).all() and (pixels[:, size] == images.PAPER).all()


def test_similarity_is_the_cosine_of_positions():
    table_PD = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    pixels, step = images.similarity(table_PD), images.SMALLEST // 4
    shown = pixels[::step, ::step]
    levels = [[255, 255, 128, 0], [255, 255, 128, 0], [128, 128, 255, 128], [0, 0, 128, 255]]
    assert (shown == images.DIVERGING_X3[np.array(levels)]).all()
    assert images.similarity(np.ones((1000, 2))).shape == (250, 250, 3), "a long table shows every fourth position"
    assert (images.similarity(np.zeros((2, 2))) == images.DIVERGING_X3[128]).all()


def test_nan_is_drawn_as_zero():
    assert (images.map_grid(np.full((1, 1, 2, 2), np.nan)) == images.COLOURS_X3[0]).all()

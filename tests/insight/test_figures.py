"""Plots of positional encodings show the values that the encodings compute."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from mini_gpt.config import loading
from mini_gpt.insight import figures
from mini_gpt.model.positions.biases import Alibi
from mini_gpt.model.positions.rotary import Rope


@pytest.fixture
def config():
    return loading.load("configs/tiny.py", {}).model


def lines(axes):
    return {line.get_label(): np.array(line.get_xydata()) for line in axes.get_lines()}


def test_rope_scores_depend_on_the_offset_alone(config):
    score = lines(figures.rope(config).axes[2])
    ropes, waves = ([xy[:, 1] for name, xy in score.items() if name.startswith(kind)] for kind in ("RoPE", "sinus"))
    assert len(ropes) == len(waves) == 3
    for other in ropes[1:]:
        np.testing.assert_allclose(ropes[0], other, atol=2e-4)
    assert all(np.abs(waves[0] - other).max() > 0.1 for other in waves[1:])


def test_each_pair_has_its_wavelength(config):
    waves = next(iter(lines(figures.sinusoids(config).axes[2]).values()))
    expected = [2 * math.pi * 10_000 ** (2 * pair / 128) for pair in range(64)]
    np.testing.assert_allclose(waves, np.stack([np.arange(0, 128, 2), expected], axis=1), rtol=1e-6)
    assert waves[-1, 1] == pytest.approx(54_410, rel=1e-3)


def test_similarity_and_biases_come_from_the_encodings(config):
    _, inside = figures.similarity(config).axes
    shown = lines(inside)["RoPE: score of equal vectors"]
    x = np.ones((1, 1, 1, config.head_width), np.float32) / math.sqrt(config.head_width)
    encoding = Rope(config, rngs=nnx.Rngs(0))
    for distance in (0, 1, 17, 100):
        a, b = (np.asarray(encoding.rotate(x, np.array([[position]])))[0, 0, 0] for position in (5, 5 + distance))
        assert shown[distance, 1] == pytest.approx(a @ b, abs=1e-4)
    alibi = figures.biases(config).axes[0]
    for slope, xy in zip(Alibi(config, rngs=nnx.Rngs(0)).slopes, lines(alibi).values(), strict=True):
        np.testing.assert_allclose(xy[:, 1], -slope * xy[:, 0], rtol=1e-6)
    table = np.random.default_rng(0).random((32, 4))
    t5 = lines(figures.biases(config, table).axes[1])
    assert [xy[3, 1] for xy in t5.values()] == pytest.approx(table[3].tolist()), "the first buckets hold one distance"


def test_the_four_terms_add_up():
    x_LD, p_LD = np.random.default_rng(0).normal(size=(2, 6, 8))
    axes = figures.sums(x_LD, p_LD, list("abcdef"), title="").axes
    name = lambda title: title.split(" (rms")[0].split(": ")[0]
    shown = {name(a.get_title()): np.asarray(a.get_images()[0].get_array()) for a in axes if a.get_title()}
    np.testing.assert_allclose(shown["X + P"], shown["X"] + shown["P"])
    total = sum(shown[term] for term in ("xᵀy", "xᵀp′", "pᵀy", "pᵀp′"))
    np.testing.assert_allclose(total, (x_LD + p_LD) @ (x_LD + p_LD).T)
    assert len({image.norm.vmax for a in axes[:3] for image in a.get_images()}) == 1, "one scale"
    weights = shown["softmax of (x+p)ᵀ(y+p′)/√d"]
    np.testing.assert_allclose(weights, jax.nn.softmax(total / math.sqrt(8), axis=-1), rtol=1e-4, atol=1e-6)

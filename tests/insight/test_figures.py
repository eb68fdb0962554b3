"""Figures of encodings, lengths and attention maps, and the colours of images: they show the values of the model."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from docs.figures import copying, sums, toy_heads
from mini_gpt import suites
from mini_gpt.config import loading
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.insight import attention, colours, examples, figures, images, maps, uncertainty
from mini_gpt.insight.curves import Curve, label_heads, new_figure, panels_figure, tick_labels, token_label
from mini_gpt.insight.maps import Panel
from mini_gpt.model.positions.biases import Alibi
from mini_gpt.model.positions.rotary import Rope
from mini_gpt.runtime.errors import UserError
from mini_gpt.suites import base
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.conftest import REPOSITORY
from tests.insight.test_maps import PAIRS, exact_weights
from tests.random_models import random_model

# Plots of positional encodings show the values that the encodings compute.


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


# Plots against length: tick labels do not overlap, and a legend lists the curves of all panels.


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


# In the figures of the docs, each curve shows the losses of its own run.


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


# The pixels of an image encode the values of its array; labels and the colour bar stand beside the maps.

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


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=16)
    expected = values.std(ddof=1) / 4
    assert uncertainty.of_ratio(values, np.ones(16)) == pytest.approx(expected)
    assert uncertainty.of_ratio(np.repeat(values, 4), np.ones(64)) == pytest.approx(expected), "groups of neighbours"
    assert uncertainty.jackknife([1.0]) is uncertainty.jackknife([1.0, None]) is None


# Figures of attention maps show the weights of the model, the tokens along both axes, and the true alignment.

TOKENIZER = CharacterTokenizer(tasks.ALPHABET)
ALIGNMENT = (((0, 2), (1, 3)), ((2, 3), (0, 1)))


@pytest.fixture
def panel(small):
    config = small(**PAIRS | {"model__encoder_layers": 1})
    pair = examples.of_problem(("abc", "cab"), config, TOKENIZER, ALIGNMENT)
    return Panel("mine", random_model(config, TOKENIZER.token_bytes, noise=0.3), TOKENIZER, pair)


def labels(axes):
    return [[label.get_text() for label in ticks] for ticks in (axes.get_yticklabels(), axes.get_xticklabels())]


def shown(axes):
    return np.asarray(axes.get_images()[0].get_array())


def frames(axes):
    """Return the frames as (x, y, width, height)."""
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in patches]


def test_a_pair_has_the_tokens_that_are_read_and_written(panel):
    source, inputs, written, alignment = panel.text
    separator = len(TOKENIZER.token_bytes) - 1
    assert source[0] == inputs[0] == written[-1] == separator
    assert [TOKENIZER.decode(part) for part in (source[1:], inputs[1:], written[:-1])] == ["abc", "cab", "cab"]
    cells = examples.cells(alignment, (4, 4)).astype(int).tolist()
    assert cells == [[0, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    longer = examples.of_problem(("abc", "c" * 30), panel.model.config, TOKENIZER)
    assert len(longer.written) == 31 and longer.alignment == ()
    aligned = dataclasses.replace(panel.model.config.data, corpus="task:reverse_words")
    known = examples.of_problem(("ab c", "c ab"), dataclasses.replace(panel.model.config, data=aligned), TOKENIZER)
    assert known.alignment == [((0, 2), (2, 4)), ((3, 4), (0, 1))]


def test_the_figure_has_a_row_for_each_kind_of_attention(panel):
    pair = panel.text
    expected = exact_weights(panel.model, pair.inputs, pair.source)
    *axes, bar = maps.figure([panel, panel]).axes
    axes = np.array(axes).reshape(6, 2)
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "0.01", "0.1", "0.25", "0.5", "1"]
    texts = {"encoder": (["∅", *"abc"], ["∅", *"abc"]), "decoder": (["∅", *"cab"], ["∅", *"cab"])}
    texts["cross"] = ([*"cab", "∅"], ["∅", *"abc"])
    for row, line in enumerate(axes):
        kind = attention.KINDS[row % 3]
        assert [a.get_visible() for a in line] == [True, kind != "encoder"]
        assert line[0].get_ylabel().startswith("mine\nposition=sinusoidal\n" + kind)
        for layer, weights_HLS in enumerate(expected[kind]):
            np.testing.assert_allclose(shown(line[layer]), weights_HLS.mean(axis=0), atol=1e-4)
            hidden = np.ma.getmaskarray(line[layer].get_images()[0].get_array())
            later = np.triu(np.ones((4, 4), bool), 1) if kind == "decoder" else np.zeros((4, 4), bool)
            assert (hidden == later).all() and (line[layer].patch.get_hatch() is not None) == later.any()
            rows, columns = labels(line[layer])
            assert (rows, columns) == (texts[kind][0] if layer == 0 else [], texts[kind][1])
            marked = [(0.5, 0.5, 2, 2), (2.5, -0.5, 1, 1)] if kind == "cross" else []
            assert frames(line[layer]) == marked


def test_cross_attention_has_a_map_for_each_head(panel):
    pair = panel.text._replace(alignment=())
    expected = exact_weights(panel.model, pair.inputs, pair.source)["cross"]
    axes = np.array(maps.cross_figure(panel._replace(text=pair)).axes[:-1]).reshape(2, 4)
    for layer, head in np.ndindex(2, 4):
        np.testing.assert_allclose(shown(axes[layer, head]), expected[layer, head], atol=1e-4)
        assert axes[layer, head].get_title() == f"head {layer}.{head}" and frames(axes[layer, head]) == []


FEW = {"train__steps": 1, "eval__tokens": 64}


@pytest.mark.slow
def test_the_suite_draws_a_problem_or_a_pair_of_your_own(small, tmp_path):
    loop.train(small(**PAIRS | FEW | {"model__position": "learned"}), tmp_path / "run", conclude=False)
    run = Run(tmp_path / "run")
    suites.evaluate(run, "figures", SuiteOptions())
    written = {path.stem for path in (run.workdir / "eval" / "figures").iterdir()}
    assert written == {"maps", "cross", "similarity", "sums"}
    question, answer = tasks.problem("task:reverse", "validation", 0, 0, shortest=3, longest=3)
    pair = base.example(run, SuiteOptions())
    assert run.tokenizer.decode(pair.source) == question and run.tokenizer.decode(pair.written) == answer
    own = base.example(run, SuiteOptions(text="ab=c=d"))
    assert run.tokenizer.decode(own.source) == "ab=c" and run.tokenizer.decode(own.written) == "d"
    with pytest.raises(UserError, match=r"^--text: found 'ab'; must be SOURCE=TARGET for a model with an encoder"):
        base.example(run, SuiteOptions(text="ab"))
    with pytest.raises(UserError, match=r"^model\.max_positions: the learned table has 9 positions; found"):
        base.example(run, SuiteOptions(text=f"{'a' * 10}=b"))


@pytest.mark.slow
def test_heads_side_by_side_are_those_of_the_lowest_entropy(small):
    model = random_model(small(model__num_layers=2), TOKENIZER.token_bytes, noise=0.3)
    tokens = np.arange(12, dtype=np.int32) % 5
    drawn = maps.heads_figure(Panel("mine", model, TOKENIZER, tokens))
    weights_NHLS = np.stack([layer.weights_BHLS[0] for layer in attention.attention_maps(model, tokens[None])])
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy_NHL = -np.where(weights_NHLS > 0, weights_NHLS * np.log(weights_NHLS), 0).sum(-1)
    relative_NH = (entropy_NHL / np.log(np.maximum(np.arange(1, 13), 2))).mean(-1)
    places = [divmod(place, 4) for place in sorted(np.argsort(relative_NH, axis=None)[:6].tolist())]
    axes = [axes for axes in drawn.axes if axes.get_title()]
    assert [a.get_title() for a in axes] == [f"head {n}.{h}, entropy {relative_NH[n, h]:.2f}" for n, h in places]
    for a, place in zip(axes, places, strict=True):
        np.testing.assert_allclose(np.ma.filled(shown(a), 0), weights_NHLS[place], atol=1e-5)
    assert labels(axes[0])[1] == [token_label(character) for character in TOKENIZER.decode(tokens)]

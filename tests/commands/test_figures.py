"""The toy's numbers are the attention's own, figures hold what the encodings compute, and all of them are drawn."""

import math

import numpy as np
import pytest
from flax import nnx

from mini_gpt.commands import figures, suites
from mini_gpt.commands.suite_options import Request
from mini_gpt.insight import positions as position_figures
from mini_gpt.insight import toy
from mini_gpt.model.positions import Alibi, Rope
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in


def softmax(x):
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


@pytest.mark.parametrize("preset", toy.PRESETS)
def test_A12_the_toys_numbers_are_those_of_the_formula(preset):
    logits_HLS, weights_HLS = toy.maps(preset, temperature=0.5)
    w_q, w_k = toy.PRESETS[preset]
    for head in range(2):
        half = slice(2 * head, 2 * head + 2)
        expected = (toy.X_LD @ w_q)[:, half] @ (toy.X_LD @ w_k)[:, half].T / math.sqrt(2) / 0.5
        np.testing.assert_allclose(logits_HLS[head], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(weights_HLS[head], softmax(expected), rtol=1e-5, atol=1e-6)


def test_A12_negating_head_2s_keys_inverts_its_logits_and_leaves_head_1():
    plain, negated = (toy.maps(name)[0] for name in ("identity", "head 2 negated"))
    np.testing.assert_array_equal(plain[0], negated[0])
    np.testing.assert_allclose(plain[1], -negated[1], rtol=1e-6)


def test_B6_permuting_the_words_permutes_the_map():
    order = (2, 0, 3, 1)
    plain, permuted = toy.maps("random")[1], toy.maps("random", order=order)[1]
    np.testing.assert_allclose(permuted, plain[:, order][:, :, order], rtol=1e-5)


def lines(axes):
    return {line.get_label(): np.array(line.get_xydata()) for line in axes.get_lines()}


def test_B5_the_rope_figure_shows_one_curve_for_any_place_and_three_for_sinusoids():
    score = lines(figures.rope().axes[2])
    ropes, waves = ([xy[:, 1] for name, xy in score.items() if name.startswith(kind)] for kind in ("RoPE", "sinus"))
    assert len(ropes) == len(waves) == 3
    for other in ropes[1:]:
        np.testing.assert_allclose(ropes[0], other, atol=2e-4)
    assert all(np.abs(waves[0] - other).max() > 0.1 for other in waves[1:])


def test_B2_the_wavelengths_are_those_of_each_pair():
    waves = next(iter(lines(figures.sinusoids().axes[2]).values()))
    expected = [2 * math.pi * 10_000 ** (2 * pair / 128) for pair in range(64)]
    np.testing.assert_allclose(waves, np.stack([np.arange(0, 128, 2), expected], axis=1), rtol=1e-6)
    assert waves[-1, 1] == pytest.approx(54_410, rel=1e-3)


def test_B1_similarity_and_biases_are_the_encodings_own():
    config = figures._model(model__position="rope")
    _, inside = position_figures.similarity(config).axes
    shown = lines(inside)["RoPE: score of equal vectors"]
    x = np.ones((1, 1, 1, config.head_width), np.float32) / math.sqrt(config.head_width)
    encoding = Rope(config, rngs=nnx.Rngs(0))
    for distance in (0, 1, 17, 100):
        turned = [np.asarray(encoding.rotate(x, np.array([[place]])))[0, 0, 0] for place in (5, 5 + distance)]
        assert shown[distance, 1] == pytest.approx(turned[0] @ turned[1], abs=1e-4)
    alibi = position_figures.biases(config).axes[0]
    slopes = Alibi(config, rngs=nnx.Rngs(0)).slopes
    for slope, xy in zip(slopes, lines(alibi).values(), strict=True):
        np.testing.assert_allclose(xy[:, 1], -slope * xy[:, 0], rtol=1e-6)
    table = np.random.default_rng(0).random((32, 4))
    t5 = lines(position_figures.biases(config, table).axes[1])
    assert [xy[3, 1] for xy in t5.values()] == pytest.approx(table[3].tolist()), "the first buckets hold one distance"


def _name(axes):
    return axes.get_title().split(" (rms")[0].split(": ")[0]


def test_B12_the_four_terms_add_up():
    draw = np.random.default_rng(0)
    x_LD, p_LD = draw.normal(size=(2, 6, 8))
    axes = position_figures.sums(x_LD, p_LD, list("abcdef"), title="").axes
    shown = {_name(a): np.asarray(a.get_images()[0].get_array()) for a in axes if a.get_title()}
    np.testing.assert_allclose(shown["X + P"], shown["X"] + shown["P"])
    total = sum(shown[name] for name in ("xᵀy", "xᵀp′", "pᵀy", "pᵀp′"))
    np.testing.assert_allclose(total, (x_LD + p_LD) @ (x_LD + p_LD).T)
    assert len({image.norm.vmax for a in axes[:3] for image in a.get_images()}) == 1, "one scale"
    weights = shown["softmax of (x+p)ᵀ(y+p′)/√d"]
    np.testing.assert_allclose(weights, softmax(total / math.sqrt(8)), rtol=1e-4, atol=1e-6)


OF_RUN = {
    "learned": {"maps", "similarity", "sums"},
    "sinusoidal": {"maps", "similarity", "sums", "sinusoids"},
    "rope": {"maps", "similarity", "rope"},
    "t5": {"maps", "similarity", "biases"},
}


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal", "t5"])
def test_A14_the_figures_of_a_run(small, tmp_path, monkeypatch, position):
    loop.train(small(train__steps=1, model__num_layers=2, model__position=position), tmp_path / "run", conclude=False)
    suites.evaluate(Run(tmp_path / "run"), "figures", Request())
    written = {path.stem for path in (tmp_path / "run" / "eval" / "figures").iterdir()}
    assert written == OF_RUN[position]
    if position == "rope":
        runs = [f"{tmp_path}/run"] * 2
        assert type_in(monkeypatch, "mini_gpt.commands.figures", "--maps", *runs, f"--out={tmp_path}/both") is None
        assert (tmp_path / "both" / "maps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_figure_is_drawn_and_a_wrong_name_is_refused(tmp_path, monkeypatch, capsys):
    assert type_in(monkeypatch, "mini_gpt.commands.figures", f"--out={tmp_path}/out") is None
    assert {path.stem for path in (tmp_path / "out").iterdir()} == set(figures.DRAWN)
    line = type_in(monkeypatch, "mini_gpt.commands.figures", "--only=ropes", f"--out={tmp_path}/other")
    assert line.startswith("error: --only: found 'ropes'; must be of sinusoids, ") and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_what_trains_draws_the_losses_of_its_trainings(monkeypatch):
    few = {"train.steps": 10, "eval.every": 10, "model.num_layers": 1, "model.d_model": 32, "context_length": 16}
    few |= {"train.batch_size": 8, "eval.tokens": 256}
    trained = []

    def train(fields, real=figures._trained):
        trained.append((fields, real(fields | few)))
        return trained[-1][1]

    monkeypatch.setattr(figures, "_trained", train)
    monkeypatch.setattr(figures, "HEAD_COUNTS", (1, 4))
    lines = figures.post_ln().axes[0].get_lines()
    for line, (fields, rows) in zip(lines, trained, strict=True):
        warmup = fields["optimizer.warmup_steps"]
        warmed = "100 steps of" if warmup else "no"
        assert line.get_label() == f"{fields['model.norm_placement']}-LN, {warmed} warm-up"
        assert line.get_linestyle() == ("-" if warmup else ":")
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        assert line.get_xdata().tolist() == [1, 5, 10]
        assert line.get_ydata()[-1] == pytest.approx((3 * losses[0] + losses[1] + losses[2]) / 5)
    assert len({rows[-1]["train/loss"] for _, rows in trained}) == 4
    trained.clear()
    (line,) = figures.head_count().axes[0].get_lines()
    assert [fields["model.num_heads"] for fields, _ in trained] == line.get_xdata().tolist() == [1, 4]
    assert line.get_ydata().tolist() == [rows[-1]["validation/loss"] for _, rows in trained]

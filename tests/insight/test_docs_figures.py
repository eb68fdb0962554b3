"""In the figures of the docs, each curve shows the losses of its own run."""

import numpy as np
import pytest

from docs.figures import copying, head_count, post_ln, residual, sums, toy_heads, training


@pytest.mark.slow
@pytest.mark.parametrize("script, panels", [(sums, 8), (toy_heads, 6)])
def test_illustrations_are_drawn(script, panels):
    assert len([axes for axes in script.draw().axes if axes.get_title()]) == panels


@pytest.mark.slow
def test_training_figures_show_the_losses_of_their_runs(monkeypatch):
    few = {"train.steps": 10, "eval.every": 10, "model.num_layers": 1, "model.d_model": 32, "context_length": 16}
    few |= {"train.batch_size": 8, "eval.tokens": 256}
    trained = []

    def train(fields, real=training.train):
        trained.append((fields, real(fields | few)))
        return trained[-1][1]

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(head_count, "HEAD_COUNTS", (1, 4))
    lines = post_ln.draw().axes[0].get_lines()
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
    (line,) = head_count.draw().axes[0].get_lines()
    assert [fields["model.num_heads"] for fields, _ in trained] == line.get_xdata().tolist() == [1, 4]
    assert line.get_ydata().tolist() == [rows[-1]["validation/loss"] for _, rows in trained]
    trained.clear()
    assert len(residual.draw().axes[0].get_lines()) == 4
    assert [(fields["model.num_layers"], fields["model.residual"]) for fields, _ in trained] == [
        (2, True), (2, False), (8, True), (8, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changed, expected", [(0, [1, 2, 12, 0, 0, 6]), (2, [3, 4, 8, 6, 7, 8]), (4, [5, 0, 10, 6, 24, 10])]
)
def test_effects_are_summed_by_the_place_of_the_changed_letter(changed, expected):
    """The effects are 1, 2, …: of a word of five letters, of =, and of the letters that were copied."""
    effects_L = np.arange(1.0, 5 + 1 + changed + 1)
    assert copying.by_place(effects_L, changed, 5).tolist() == expected

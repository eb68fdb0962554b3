"""The summary at the end of a training says if the validation loss has risen."""

import json

import pytest

from mini_gpt.training import conclusion


def said(directory, losses):
    rows = [{"step": 100 * number, "validation/loss": loss} for number, loss in enumerate(losses, 1)]
    lines = [json.dumps(row) for row in [{"step": 1, "train/loss": 5.0}, *rows]]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return conclusion.risen_loss(directory)


def test_a_rise_above_the_lowest_loss_is_named_with_its_step(tmp_path):
    found = said(tmp_path, [3.0, 2.8, 4.1])
    assert "lowest at step 200 (2.8000), and is now 4.1000: --checkpoint=best uses that step" in found


@pytest.mark.parametrize("losses", [[3.0, 2.0], [2.8, 2.85], [2.0], []])
def test_other_runs_have_no_such_sentence(tmp_path, losses):
    assert said(tmp_path, losses) is None


def test_a_run_without_metrics_has_no_such_sentence(tmp_path):
    assert conclusion.risen_loss(tmp_path) is None

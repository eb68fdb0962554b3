"""The commands write the figures that exist for an encoding or a run."""

import pytest

from mini_gpt import suites
from mini_gpt.commands import figures
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in

OF_RUN = {
    "learned": {"maps", "heads", "similarity", "sums"},
    "sinusoidal": {"maps", "heads", "similarity", "sums", "sinusoids"},
    "rope": {"maps", "heads", "similarity", "rope"},
    "t5": {"maps", "heads", "similarity", "biases"},
}


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal", "t5"])
def test_a_run_has_the_figures_of_its_encoding(small, tmp_path, position):
    fields = {"model__position": position, "model__sinusoidal__columns": 8 if position == "sinusoidal" else None}
    loop.train(small(train__steps=1, model__num_layers=2, **fields), tmp_path / "run", conclude=False)
    suites.evaluate(Run(tmp_path / "run"), "figures", SuiteOptions())
    assert {path.stem for path in (tmp_path / "run" / "eval" / "figures").iterdir()} == OF_RUN[position]


@pytest.mark.slow
def test_every_figure_is_drawn_and_a_wrong_name_is_refused(tmp_path, monkeypatch):
    assert type_in(monkeypatch, "mini_gpt.commands.figures", f"--out={tmp_path}/out") is None
    assert {path.stem for path in (tmp_path / "out").iterdir()} == set(figures.ENCODINGS)
    line = type_in(monkeypatch, "mini_gpt.commands.figures", "--only=ropes", f"--out={tmp_path}/other")
    assert line.startswith("error: --only: found 'ropes'; must be one of sinusoids, ")
    assert not (tmp_path / "other").exists()

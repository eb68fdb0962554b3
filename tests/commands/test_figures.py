"""The commands write the figures that exist for an encoding or a run."""

import numpy as np
import pytest

from mini_gpt import suites
from mini_gpt.commands import figures
from mini_gpt.runtime.errors import UserError
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
def test_a_run_has_the_figures_of_its_encoding(small, tmp_path, monkeypatch, position):
    fields = {"model__position": position, "model__sinusoidal__columns": 8 if position == "sinusoidal" else None}
    loop.train(small(train__steps=1, model__num_layers=2, **fields), tmp_path / "run", conclude=False)
    suites.evaluate(Run(tmp_path / "run"), "figures", SuiteOptions())
    assert {path.stem for path in (tmp_path / "run" / "eval" / "figures").iterdir()} == OF_RUN[position]
    if position == "rope":
        runs = [f"{tmp_path}/run"] * 2
        assert type_in(monkeypatch, "mini_gpt.commands.figures", "--maps", *runs, f"--out={tmp_path}/both") is None
        assert (tmp_path / "both" / "maps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_with_different_layers_and_tokenizers_are_compared(small, tmp_path):
    for name, fields in {"one": {"model__num_layers": 2}, "two": {"data__tokenizer": "characters"}}.items():
        loop.train(small(train__steps=1, **fields), tmp_path / name, conclude=False)
    axes = figures.maps([tmp_path / "one", tmp_path / "two"]).axes
    assert [a.get_visible() for a in axes] == [True, True, True, False, True]  # the last is the colour bar
    labels = ["".join(label.get_text() for label in axes[line].get_xticklabels()) for line in (0, 2)]
    as_bytes = "".join(c if c not in "öß" else "".join(f"\\x{byte:x}" for byte in c.encode()) for c in labels[1])
    assert labels[0] == as_bytes, "one has tokens of bytes"
    assert np.asarray(axes[0].get_images()[0].get_array()).shape == (32, 32)


@pytest.mark.slow
def test_a_run_that_cannot_read_the_text_is_named(small, tmp_path):
    task = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__path": None, "data__task_length": 4}
    for name, fields in {"text": {}, "task": task}.items():
        loop.train(small(train__steps=1, **fields), tmp_path / name, conclude=False)
    with pytest.raises(UserError, match=r"--maps: .*/task can't read the text of .*/text: tokenizer: found character"):
        figures.maps([tmp_path / "text", tmp_path / "task"])


@pytest.mark.slow
def test_every_figure_is_drawn_and_a_wrong_name_is_refused(tmp_path, monkeypatch):
    assert type_in(monkeypatch, "mini_gpt.commands.figures", f"--out={tmp_path}/out") is None
    assert {path.stem for path in (tmp_path / "out").iterdir()} == set(figures.ENCODINGS)
    line = type_in(monkeypatch, "mini_gpt.commands.figures", "--only=ropes", f"--out={tmp_path}/other")
    assert line.startswith("error: --only: found 'ropes'; must be one of sinusoids, ")
    assert not (tmp_path / "other").exists()

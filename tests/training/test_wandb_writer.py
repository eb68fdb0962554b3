"""train.logger=wandb gets the rows of metrics.jsonl; a resumed run continues the same run there."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from mini_gpt.config import fields
from mini_gpt.config.schema import Config
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import new_runs
from mini_gpt.study.definition import Plan, Study
from mini_gpt.training import loop, run_directory, writers
from mini_gpt.training.writers import Row
from tests.training.interruption import rows


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


class FakeWandb:
    class Error(Exception):
        pass

    def __init__(self):
        self.asked, self.run, self.fails = [], FakeRun(), False

    def init(self, **options):
        if self.fails:
            raise self.Error("No API key configured.\nUse `wandb login`")
        self.asked.append(options)
        self.run = FakeRun()
        return self.run

    Image = staticmethod(lambda pixels: ("image", pixels.shape))
    Html = staticmethod(lambda text: ("page", text))


@pytest.fixture
def fake(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: object())
    return fake


@pytest.mark.slow
def test_rows_are_those_of_the_file_and_a_resumed_run_keeps_its_id(small, tmp_path, fake):
    run = tmp_path / "my run"
    loop.train(small(train__logger="wandb", train__steps=4, optimizer__schedule="constant"), run, conclude=False)
    first, sent = fake.asked[0], fake.run
    assert [{name: row[name] for name in row if name != "step"} for row in sent.logged] == [
        {name: row[name] for name in row if name != "step"} for row in rows(run)
    ]
    assert [row["step"] for row in sent.logged] == [1, 2, 3, 4] and sent.finished
    assert first["id"] == run_directory.identity(run) and first["name"] == "my run" and first["resume"] == "allow"
    assert first["config"]["model.position"] == "rope" and first["dir"] == str(run)
    loop.train(small(train__logger="wandb", train__steps=6, optimizer__schedule="constant"), run, conclude=False)
    assert [row["step"] for row in fake.run.logged] == [5, 6] and fake.asked[1]["id"] == first["id"]
    loop.train(small(train__steps=7, optimizer__schedule="constant"), run, conclude=False)  # without the logger
    assert len(fake.asked) == 2 and rows(run)[-1]["step"] == 7


def test_images_and_texts_are_sent_as_such(small, tmp_path, fake):
    (tmp_path / "run.json").write_text('{"identity": "a"}')
    writer = next(writers.make(tmp_path, small(train__logger="wandb"), start=0))
    writer.write(Row(3, {"train/loss": 1.5}, {"maps": np.zeros((2, 3, 3), np.uint8)}, {"sample": "a < b"}))
    expected = {"step": 3, "train/loss": 1.5, "maps": ("image", (2, 3, 3)), "sample": ("page", "<pre>a &lt; b</pre>")}
    assert fake.run.logged == [expected]


def test_a_missing_package_is_refused_before_anything_is_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train.logger: found wandb, which is not installed; pip install wandb"):
        loop.train(small(train__logger="wandb"), tmp_path / "run")
    study = Study("?", "configs/default.py", {"a": {}}, [0], {"perplexity": {}}, [], {"train.logger": "wandb"})
    with pytest.raises(UserError, match=r"train.logger: found wandb, which is not installed"):
        new_runs.check(Plan("s", study), tmp_path / "study")
    assert not [*tmp_path.iterdir()]


def test_a_refusal_of_the_service_is_one_line(small, tmp_path, fake):
    fake.fails = True
    config = small(train__logger="wandb")
    with pytest.raises(UserError) as raised:
        next(writers.make(tmp_path, config, start=0))
    said = str(raised.value)
    remedy = "`wandb login` gives access, and WANDB_MODE=offline needs none"
    assert said == f"train.logger: wandb: No API key configured; {remedy}"


def test_each_value_of_the_field_has_a_writer():
    none, *services = fields.choices(fields.specs(Config)["train.logger"].hint)
    assert none == "none" and all(find_spec(f"mini_gpt.training.{name}_writer") for name in services)


@pytest.mark.slow
def test_the_real_package_writes_files_offline(small, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    loop.train(small(train__logger="wandb", train__steps=2, eval__every=2), run, conclude=False)
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert run_directory.identity(run) in file.name
    content = file.read_bytes()
    assert b"train/loss" in content and b"validation/loss" in content
    assert json.dumps(rows(run)[0]["train/loss"]).encode() in content

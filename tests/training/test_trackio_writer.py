"""train.logger=trackio gets the rows of metrics.jsonl; a resumed run continues the same run there."""

import json
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop, run_directory, writers
from mini_gpt.training.writers import Row
from tests.conftest import REPOSITORY
from tests.training.interruption import rows


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, values, step):
        self.logged.append({"step": step, **values})


class FakeTrackio:
    fails = False

    def __init__(self):
        self.asked = []

    def init(self, **options):
        if self.fails:
            raise ValueError("Invalid project name: '//'.\nUse letters")
        print("* Created new run")
        self.asked.append(options)
        self.run = FakeRun()
        return self.run

    def finish(self):
        print("* Run finished")
        self.run.finished = True

    Image = staticmethod(lambda pixels: ("image", pixels.shape))
    Html = staticmethod(lambda text: ("page", text))


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: object())
    return fake


@pytest.mark.slow
def test_rows_are_those_of_the_file_and_a_resumed_run_keeps_its_name(small, tmp_path, fake, capsys):
    run = tmp_path / "my run"
    loop.train(small(train__logger="trackio", train__steps=4, optimizer__schedule="constant"), run, conclude=False)
    first, sent = fake.asked[0], fake.run
    assert sent.logged == rows(run) and sent.finished
    assert first["name"] == f"my run {run_directory.identity(run)}" and first["resume"] == "allow"
    assert first["config"]["model.position"] == "rope" and first["project"] == "mini_gpt"
    loop.train(small(train__logger="trackio", train__steps=6, optimizer__schedule="constant"), run, conclude=False)
    assert [row["step"] for row in fake.run.logged] == [5, 6] and fake.asked[1]["name"] == first["name"]
    assert capsys.readouterr().out == ""


def test_images_and_texts_are_sent_as_such(small, tmp_path, fake):
    (tmp_path / "run.json").write_text('{"identity": "a"}')
    writer = next(writers.make(tmp_path, small(train__logger="trackio"), start=0))
    writer.write(Row(3, {"train/loss": 1.5}, {"maps": np.zeros((2, 3, 3), np.uint8)}, {"sample": "a < b"}))
    expected = {"step": 3, "train/loss": 1.5, "maps": ("image", (2, 3, 3)), "sample": ("page", "<pre>a &lt; b</pre>")}
    assert fake.run.logged == [expected]


def test_a_refusal_of_the_service_is_one_line(small, tmp_path, fake):
    fake.fails = True
    with pytest.raises(UserError) as raised:
        next(writers.make(tmp_path, small(train__logger="trackio"), start=0))
    remedy = "without TRACKIO_… variables it needs no access"
    assert str(raised.value) == f"train.logger: trackio: Invalid project name: '//'; {remedy}"


@pytest.mark.slow
def test_the_real_package_writes_its_database_offline(small, tmp_path, monkeypatch):
    """In processes of their own, because Trackio reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run, config = tmp_path / "run", small(eval__sample_tokens=4)
    for steps in (2, 4):
        flags = ["--config.train.logger=trackio", f"--config.train.steps={steps}", f"--workdir={run}"]
        flags += ["--config.optimizer.schedule=constant", "--config.eval.every=2", "--config.train.log_every=1"]
        flags += ["--config.model.d_model=32", "--config.data.corpus=text", f"--config.data.path={config.data.path}"]
        command = [sys.executable, "train.py", "--config=configs/tiny.py", *flags, "--config.eval.tokens=256"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Trackio" not in done.stdout
    with sqlite3.connect(tmp_path / "trackio" / "mini_gpt.db") as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {name for name, _, _ in found} == {f"run {run_directory.identity(run)}"}
    logged = {step: json.loads(metrics) for _, step, metrics in found}
    assert list(logged) == [1, 2, 3, 4] and "sample" in logged[2]
    for row in rows(run):
        for name in row.keys() - {"step"}:
            assert logged[row["step"]][name] == row[name]

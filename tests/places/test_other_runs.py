"""Flags that name another run, such as --init_from: a run in a bucket gives the same results as the same run here."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mini_gpt.commands import hugging_face
from mini_gpt.commands.mirror import Mirror
from mini_gpt.runtime.buckets import Place
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import run_directory
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL

ADDRESS = "s3://bucket/runs/source"


def clear(place):
    for name in place.files():
        place.delete(name)


@pytest.fixture
def source(server, trained, tmp_path):
    """Return a run that is also at ADDRESS."""
    run = trained()
    clear(Place(ADDRESS))
    staged = Mirror(Place(ADDRESS), "train")
    shutil.copytree(run, staged.local)
    staged.copy()
    return run


def checksums(run):
    (last,) = sorted((run / "checkpoints").iterdir(), key=lambda path: int(path.name))[-1:]
    return json.loads((last / "format" / "metadata").read_text())["checksums"]


@pytest.mark.slow
def test_a_run_starts_with_the_weights_of_a_run_in_a_bucket(source, corpus_files, monkeypatch, tmp_path):
    fields = SMALL | {"train.steps": 4, "data.path": corpus_files}
    train = ["train.py", "--config=configs/default.py", *(f"--config.{name}={value}" for name, value in fields.items())]
    for init_from in (source, ADDRESS):
        workdir = tmp_path / f"from {str(init_from)[:2]}"
        assert type_in(monkeypatch, *train, f"--workdir={workdir}", f"--init_from={init_from}") is None
    assert checksums(tmp_path / "from s3") == checksums(tmp_path / f"from {str(source)[:2]}") != checksums(source)
    assert run_directory.initial_run(workdir).workdir == ADDRESS
    other = f"--cache_dir={tmp_path / 'of another machine'}"
    assert type_in(monkeypatch, *train, other, f"--workdir={workdir}", f"--init_from={ADDRESS}/") is None
    said = type_in(monkeypatch, *train, f"--workdir={workdir}", f"--init_from={source}")
    assert said.startswith(
        f"error: --init_from: found {source}; the run in {workdir} was started from {ADDRESS}; leave"
    )
    missing = f"error: {ADDRESS}/none holds no run; give the address of one"
    assert type_in(monkeypatch, *train, f"--workdir={workdir}", f"--init_from={ADDRESS}/none") == missing


@pytest.mark.slow
def test_runs_in_a_bucket_are_shown_and_compared_beside_others(source, monkeypatch, tmp_path, capsys, caplog):
    for beside in (shutil.copytree(source, tmp_path / "other" / "source"), ADDRESS):
        assert type_in(monkeypatch, "eval.py", f"--workdir={source}", "--suite=play", f"--beside={beside}") is None
    pages = [path.read_text() for path in (source / "eval").glob("play,beside=source-*.html")]
    assert len(pages) == 2 and pages[0] == pages[1]
    compare = ("mini_gpt.commands.hugging_face", "compare", "--prompt=the cat sat")
    assert type_in(monkeypatch, *compare, f"--left={ADDRESS}", f"--right={source}") is None
    assert type_in(monkeypatch, *compare, f"--left={ADDRESS}", f"--right={ADDRESS}") is None
    assert capsys.readouterr().out.count("Equal within the relative tolerance") == 2
    # A model of Transformers.
    exported = "s3://bucket/exported model"
    clear(Place(exported))
    export = ("mini_gpt.commands.hugging_face", "export", f"--workdir={source}", f"--output={exported}")
    assert type_in(monkeypatch, *export) is None
    imported = f"s3://bucket/{tmp_path.name}"
    copy_back = ("mini_gpt.commands.hugging_face", "import", f"--input={exported}", f"--workdir={imported}")
    with caplog.at_level("INFO", "mini_gpt"):
        assert type_in(monkeypatch, *copy_back, "--config=configs/tiny.py") is None
    config, init_from = re.search(r"train.py --config=(\S+) --init_from=(\S+)", caplog.text).groups()
    assert Path(config).is_file() and init_from == imported
    monkeypatch.setattr(hugging_face.comparing, "compare", lambda left, right, *_: (sorted(right.iterdir()), True))
    assert type_in(monkeypatch, *compare, f"--left={source}", f"--right={exported}") is None
    assert "model.safetensors" in capsys.readouterr().out


def test_an_export_that_is_cut_off_has_no_config(tmp_path, monkeypatch):
    output, upload, sent = Place(f"file://{tmp_path}/bucket/model"), Place.upload, []

    def stop(self, path, name):
        sent.append(name)
        return upload(self, path, name) if len(sent) < 2 else pytest.fail("stopped")

    def export():
        with hugging_face.writing(output) as local:
            local.mkdir()
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                (local / name).touch()

    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception):
        patch.setattr(Place, "upload", stop)
        export()
    assert list(output.files()) == ["model.safetensors"]
    with pytest.raises(UserError, match=r"bucket/model: holds files, but no config\.json, which an export writes last"):
        export()
    clear(output)
    export()
    with pytest.raises(UserError, match="holds files already; name a new folder"):
        export()

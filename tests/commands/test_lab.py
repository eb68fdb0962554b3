"""The command that writes the lab page."""

import sys

import pytest

from mini_gpt.commands import lab


def run(monkeypatch, *arguments):
    """Run the command; return its error line, or None."""
    monkeypatch.setattr(sys, "argv", ["lab", *arguments])
    try:
        lab.main()
    except SystemExit as stop:
        return str(stop.code)
    return None


def test_the_page_is_written_and_overwritten(monkeypatch, tmp_path, capsys):
    path = tmp_path / "new" / "page.html"
    for _ in range(2):
        assert run(monkeypatch, f"--out={path}") is None
        assert capsys.readouterr().out == f"Written to {path}: open it in a browser.\n"
        page = path.read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and "The cat sat on the mat" in page and "src=" not in page
        path.write_text("old")


@pytest.mark.parametrize(
    "name, said", [("directory", "found a directory; name a file"), ("file/page.html", "file: File exists")]
)
def test_a_path_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, name, said):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")
    error = run(monkeypatch, f"--out={tmp_path / name}")
    assert error.startswith("error: ") and said in error and "\n" not in error


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--head=0.1"], "--workdir: found None; must be the run of --head"),
        (["--workdir=missing", "--head=1"], "missing/config.json: not found"),
    ],
)
def test_a_head_needs_a_run_and_a_layer(monkeypatch, tmp_path, arguments, said):
    assert said in run(monkeypatch, *arguments, f"--out={tmp_path / 'page.html'}")
    assert not (tmp_path / "page.html").exists()

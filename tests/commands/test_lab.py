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
    "arguments, said",
    [
        (["--out={}"], "found a directory; name a file"),
        (["--head=0.1"], "--workdir: found None; must be the run of --head"),
        (["--text="], "--workdir: found None; must be the run of --head"),
        (["--workdir=missing", "--head=1"], "missing/config.json: not found"),
    ],
)
def test_wrong_flags_are_one_line(monkeypatch, tmp_path, arguments, said):
    assert said in run(monkeypatch, *(argument.format(tmp_path) for argument in arguments))

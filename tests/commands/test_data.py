"""python -m mini_gpt.data look: what a run would see."""

import json
import re

import pytest

from mini_gpt.commands import data
from tests.conftest import make_text


def look(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["look", "look", "--config=configs/tiny.py", *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(data.command_line, "set_up", lambda *_: None)  # it would change the log of other tests
    data.main()
    return capsys.readouterr().out


@pytest.fixture
def records(tmp_path):
    lines = [json.dumps({"text": make_text(n, 20 + n), "body": f"[body] {n}"}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return ["--config.data.corpus=text", f"--config.data.path={tmp_path}/*.jsonl"]


def test_look_prints_the_counts_of_the_splits_and_the_first_documents(records, monkeypatch, capsys):
    printed = look(monkeypatch, capsys, *records, "--documents=2", "--config.train.steps=7")
    found = re.findall(r"(train|validation|test) +([\d,]+) +([\d,]+) +([\d,]+) +([\d.]+)", printed)
    counts = {split: [int(number.replace(",", "")) for number in numbers] for split, *numbers, _ in found}
    texts = [make_text(n, 20 + n) for n in range(200)]
    assert sum(documents for documents, _, _ in counts.values()) == 200
    assert sum(size for _, size, _ in counts.values()) == sum(len(text.encode()) for text in texts)
    assert all(tokens == size + documents - 1 for documents, size, tokens in counts.values())  # of bytes, separators
    assert "7 steps of 16 × 128 tokens:" in printed and "data.split=documents; cached in" in printed
    assert f"document 1, {len(texts[0]):,} characters:\n  {' '.join(texts[0].split())[:60]}" in printed
    assert "document 2" in printed and "document 3" not in printed


def test_look_says_that_training_would_fail(records, monkeypatch, capsys):
    printed = look(monkeypatch, capsys, *records, "--config.data.text_field=body", "--config.context_length=9999")
    assert re.search(r"training would end with: data\.corpus: the train split has \d+ tokens", printed)
    assert "document 1, 8 characters:\n  [body] 0\n" in printed


def test_look_refuses_a_task(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"data\.corpus: a task makes its problems itself"):
        look(monkeypatch, capsys, "--config.data.corpus=task:reverse", "--config.data.tokenizer=characters")

"""sample.py with runs that do not continue a text: targets of sources, and filled masks."""

import json
import re

import numpy as np
import pytest

from mini_gpt.generation import decoding as generation
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in


@pytest.mark.slow
def test_a_model_with_an_encoder_writes_the_target_of_a_source(trained, monkeypatch, capsys, caplog, tmp_path):
    fields = {"data__corpus": "task:reverse", "data__tokenizer": "characters", "data__task_length": 3}
    run = trained(**fields, model__encoder_layers=1, context_length=8, source_length=9)
    command = ["sample.py", f"--workdir={run}"]
    greedy = [*command, "--temperature=0"]
    assert type_in(monkeypatch, *greedy, "--source=abc") is None
    written = capsys.readouterr().out
    (tmp_path / "source.txt").write_text("abc\n")
    assert type_in(monkeypatch, *greedy, f"--prompt_file={tmp_path}/source.txt") is None
    assert capsys.readouterr().out == written and not written.startswith("abc")
    assert type_in(monkeypatch, *greedy, "--source=abc", "--json") is None
    line = json.loads(capsys.readouterr().out)
    assert line["source"] == "abc" and line["text"] == written[:-1] and len(line["tokens"]) <= 8
    assert type_in(monkeypatch, *command, "--source=abc", "--json", "--beams=3") is None
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rank"] for line in lines] == [0, 1, 2] and all(line["log_probability"] < 0 for line in lines)
    assert [line["score"] for line in lines] == sorted((line["score"] for line in lines), reverse=True)
    assert type_in(monkeypatch, *command, "--source=abc", "--beams=3") is None
    assert capsys.readouterr().out == lines[0]["text"] + "\n"
    assert (
        type_in(monkeypatch, *command, "--source=" + 12 * "a") is None
        and "12 tokens are more than the 9" in caplog.text
    )
    for arguments, message in {
        ("--prompt=abc",): "--prompt: found 'abc'; the model has an encoder; use --source",
        ("--source=abc", "--beams=0"): "--beams: found 0; must be in 1..1024",
        ("--source=abc", "--beams=2", "--length_penalty=-1"): "--length_penalty: found -1.0; must be in 0..10",
        ("--source=abc", "--beams=2", "--seed=1"): "--seed: found 1; is not used by --beams",
        ("--source=abc", "--beams=2", "--stop=a"): "--stop: found ['a']; is not used by --beams",
        ("--source=abc", "--length_penalty=1"): "--length_penalty: found 1.0; is only for --beams",
    }.items():
        assert type_in(monkeypatch, *command, *arguments) == f"error: {message}"


@pytest.mark.slow
def test_a_file_of_sources_has_a_target_for_each_line(trained, monkeypatch, capsys, tmp_path):
    """Sources of different lengths, also an empty one, have the targets that they have alone."""
    fields = {"data__corpus": "task:reverse", "data__tokenizer": "characters", "data__task_length": 3}
    run = trained(**fields, model__encoder_layers=1, context_length=8, source_length=9)
    command = ["sample.py", f"--workdir={run}"]
    sources = ["abc", "z", "", "hello", "ab"]
    (tmp_path / "sources.txt").write_text("abc\nz \n\nhello\nab\n")
    monkeypatch.setattr(generation, "ROWS", 2)
    for more in (["--temperature=0"], ["--beams=2"]):
        alone = []
        for source in sources:
            assert type_in(monkeypatch, *command, *more, "--json", f"--source={source}") is None
            alone.append(json.loads(capsys.readouterr().out.splitlines()[0]))
        assert type_in(monkeypatch, *command, *more, f"--source_file={tmp_path}/sources.txt") is None
        assert capsys.readouterr().out.split("\n") == [*(" ".join(one["text"].splitlines()) for one in alone), ""]
        assert type_in(monkeypatch, *command, *more, "--json", f"--source_file={tmp_path}/sources.txt") is None
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        best = [line for line in lines if line.get("rank", 0) == 0]
        assert [(line["source"], line["tokens"]) for line in best] == [(one["source"], one["tokens"]) for one in alone]
    several = "--samples: found 2; must be 1 with --source_file, which prints a line for each source"
    assert type_in(monkeypatch, *command, "--source_file=a", "--samples=2") == f"error: {several}"


MASKED = {"model__causal": False, "train__objective": "masked"}


@pytest.mark.slow
def test_masks_are_filled_with_the_most_likely_tokens(trained, monkeypatch, capsys):
    workdir = trained(**MASKED)
    command, text = ["sample.py", f"--workdir={workdir}", "--top=3"], "the [MASK]at s[MASK]t"
    assert type_in(monkeypatch, *command, f"--fill={text}", "--json") is None
    line = json.loads(capsys.readouterr().out)
    tokens = np.array([*b"the ", 256 + 1, *b"at s", 256 + 1, *b"t"])
    logits_BLV = np.asarray(Run(workdir).model.logits(np.repeat(tokens[None], 8, axis=0)), np.float64)
    assert line["fill"] == text and len(line["masks"]) == 2
    for place, best in zip((4, 9), line["masks"], strict=True):
        exponentials = np.exp(logits_BLV[0, place, :257])
        likeliest = np.argsort(-exponentials)[:3]
        assert [one["token"] for one in best] == likeliest.tolist()
        expected = exponentials[likeliest] / exponentials.sum()
        assert [one["probability"] for one in best] == pytest.approx(expected, rel=1e-5)
    first, second = (best[0]["text"] for best in line["masks"])
    assert line["text"] == f"the {first}at s{second}t"

    assert type_in(monkeypatch, *command, f"--fill={text}") is None
    shown = capsys.readouterr().out.splitlines()
    assert [shown[0], shown[4], shown[8:]] == ["--- mask 1 of 2", "--- mask 2 of 2", ["--- text", line["text"]]]
    expected = [f"{one['probability']:.4f}" for best in line["masks"] for one in best]
    assert [row.split()[0] for row in shown[1:4] + shown[5:8]] == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fill=abc"], r"text: found 'abc'; must contain \[MASK\] at least once"),
        (["--fill=[MASK]", "--top=0"], r"top: found 0; must be in 1\.\.257"),
        (["--fill=[MASK]", "--top=258"], r"top: found 258; must be in 1\.\.257"),
        (["--fill=[MASK]", "--temperature=0"], r"--temperature: found 0\.0; is not supported with --fill"),
        (["--fill=[MASK]", "--beams=2"], "--beams: found 2; is not supported with --fill"),
        (["--fill=[MASK]", "--stop=a"], r"--stop: found \['a'\]; is not supported with --fill"),
        (
            ["--fill=[MASK]" + 32 * "a"],
            "model.max_positions: the learned table has 32 positions; found a length of 33.*",
        ),
        (["--prompt=a"], "--prompt: found 'a'; the run has train.objective=masked; use --fill"),
        (["--source=a"], "--source: found 'a'; the run has train.objective=masked; use --fill"),
        (["--prompt_file=/a"], "--prompt_file: found '/a'; the run has train.objective=masked; use --fill"),
        (["--interactive"], "--interactive: found True; the run has train.objective=masked; use --fill"),
        (["--prompt=a", "--top=4"], "--top: found 4; is only for --fill"),
    ],
    ids=str,
)
def test_flags_that_do_not_fit_a_masked_run_are_refused(trained, monkeypatch, arguments, message):
    workdir = trained(model__position="learned", **MASKED)
    assert re.fullmatch(f"error: {message}", type_in(monkeypatch, "sample.py", f"--workdir={workdir}", *arguments))

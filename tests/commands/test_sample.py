"""sample.py: streamed text, JSON, and one-line errors."""

import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from mini_gpt.commands.generate import request
from mini_gpt.config import loading
from mini_gpt.data import tasks
from mini_gpt.data.tokenizers import CharacterTokenizer
from mini_gpt.generation import chat
from mini_gpt.generation import decoding as generation
from mini_gpt.generation.sampling import Sampling
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.generation.test_chat import CHATML, tokenizer


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory, corpus_files):
    """Return a function from `model.position` to the directory of a run of two steps."""
    made = {}

    def make(small, position):
        if position not in made:
            made[position] = tmp_path_factory.mktemp(position)
            loop.train(small(train__steps=2, model__position=position), made[position], conclude=False)
        return made[position]

    return make


@pytest.fixture
def sample(monkeypatch, small, workdirs):
    def typed(*arguments, position="rope"):
        return type_in(monkeypatch, "sample.py", f"--workdir={workdirs(small, position)}", *arguments)

    return typed


@pytest.mark.slow
def test_the_text_equals_that_of_generate(sample, small, workdirs, capsys):
    assert sample("--prompt=the cat", "--length=20", "--temperature=0.7", "--top_k=9", "--seed=3") is None
    run = Run(workdirs(small, "rope"))
    sampling = Sampling(temperature=0.7, top_k=9)
    prompts = [run.tokenizer.encode("the cat")]
    (drawn,) = generation.generate(run.model, prompts, length=20, sampling=sampling, seed=3)
    assert capsys.readouterr().out == "the cat" + run.tokenizer.decode(drawn) + "\n"


@pytest.mark.slow
def test_json_has_an_object_for_each_text(sample, capsys):
    arguments = ["--length=30", "--json", "--samples=2", "--temperature=5", "--top_k=0", "--stop=e", "--seed=1"]
    assert sample("--prompt=the", *arguments) is None
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["sample"], line["prompt"], line["seed"]) for line in lines] == [(0, "the", 1), (1, "the", 1)]
    assert lines[0]["text"] != lines[1]["text"]
    for line in lines:
        assert "e" not in line["text"] and line["ended_by"] in ("e", "length", "end of document")
        assert bytes(line["tokens"]).decode(errors="replace").removesuffix("e") == line["text"]
    assert sample("--prompt=the", *arguments) is None
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines, "with the same seed"


@pytest.mark.slow
def test_prompts_come_from_a_flag_a_file_or_stdin(sample, capsys, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("größe")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sample("--prompt_file=~/prompt.txt", "--length=3") is None  # the shell does not expand this `~`
    assert capsys.readouterr().out.startswith("größe")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert sample("--interactive", "--length=3") is None
    captured = capsys.readouterr()
    assert captured.out.startswith("one") and "\ntwo" in captured.out and captured.err == ""
    assert sample("--prompt=a", "--length=3", "--samples=3") is None
    assert re.findall(r"^--- (\d) of 3\na", capsys.readouterr().out, re.MULTILINE) == ["1", "2", "3"]


def test_invalid_text_and_ctrl_c_do_not_end_interactive_mode(sample, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("caf\udce9\none\ntwo\n"))
    stream, asked = generation.stream, []

    def stopped_once(*arguments, **options):
        asked.append(arguments)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return stream(*arguments, **options)

    monkeypatch.setattr(generation, "stream", stopped_once)
    assert sample("--interactive", "--length=3") is None
    captured = capsys.readouterr()
    assert "'caf\\udce9': found text that is not UTF-8" in captured.err and "Traceback" not in captured.err
    assert "one" not in captured.out and captured.out.startswith("two") and len(asked) == 2


@pytest.fixture
def streamed(monkeypatch):
    """Replace the model by one that writes the given bytes. Return the arguments of all calls."""
    calls = []

    def replace(tokens):
        def stream(model, prompts, *, length, sampling, seed, sources):
            calls.append((list(prompts[0]), seed))
            for token in tokens[:length]:
                yield np.full((len(prompts), 1), token)

        monkeypatch.setattr(generation, "stream", stream)
        return calls

    return replace


def test_escapes_of_a_stop_text_and_json_on_an_ascii_terminal(sample, streamed, monkeypatch):
    streamed("é\nx".encode())
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii", "replace")
    monkeypatch.setattr("sys.stdout", terminal)
    assert sample("--prompt=größe", "--json", "--stop=\\n") is None
    terminal.seek(0)
    found = json.loads(terminal.read())
    assert (found["prompt"], found["text"], found["ended_by"]) == ("größe", "é", "\n")


@pytest.mark.slow
def test_each_prompt_of_interactive_mode_has_a_seed_of_its_own(sample, streamed, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\na\n\n"))
    calls = streamed(b"xyz")
    assert sample("--interactive", "--seed=7", "--json") is None
    assert calls == [([97], 7), ([97], 8), ([256], 9)], "an empty prompt is a separator"
    assert [json.loads(line)["seed"] for line in capsys.readouterr().out.splitlines()] == [7, 8, 9]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\na\n"))
    assert sample("--interactive", "--seed=2147483647") is None
    assert [seed for _, seed in calls[3:]] == [2**31 - 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_how_to_leave(sample, streamed, monkeypatch, caplog, terminal):
    streamed(b"")
    caplog.set_level("INFO", "mini_gpt")
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)

    def leave(prompt):
        assert prompt == ("> " if terminal else "")
        raise EOFError

    monkeypatch.setattr("builtins.input", leave)
    assert sample("--interactive") is None
    assert ("Ctrl-D" in caplog.text) == terminal


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--prompt="], ["--prompt_file=/dev/null"]])
def test_an_empty_prompt_starts_a_document(sample, small, workdirs, capsys, arguments):
    assert sample(*arguments, "--length=9", "--temperature=0", "--json") is None
    run = Run(workdirs(small, "rope"))
    (drawn,) = generation.generate(run.model, [[256]], length=9, sampling=Sampling(temperature=0))
    assert json.loads(capsys.readouterr().out)["tokens"] == [*drawn, 256][: [*drawn, 256].index(256)]


@pytest.mark.slow
def test_the_prompt_is_printed_without_new_tokens(sample, capsys):
    for samples, shown in ((1, "the cat\n"), (2, "--- 1 of 2\nthe cat\n--- 2 of 2\nthe cat\n")):
        assert sample("--prompt=the cat", "--length=0", f"--samples={samples}") is None
        assert capsys.readouterr().out == shown


@pytest.mark.slow
def test_a_task_ends_with_its_answer(trained, streamed, monkeypatch, capsys):
    task = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 4}
    run, tokenizer = trained(**task), CharacterTokenizer(tasks.ALPHABET)
    streamed(tokenizer.encode("ab\ncd=cd\n"))
    command = ["sample.py", f"--workdir={run}", "--prompt=ab="]
    assert type_in(monkeypatch, *command) is None and capsys.readouterr().out == "ab=ab\n"
    assert type_in(monkeypatch, *command, "--stop=b", "--json") is None
    assert json.loads(capsys.readouterr().out)["text"] == "a"
    assert type_in(monkeypatch, *command, "--json") is None
    assert json.loads(capsys.readouterr().out)["ended_by"] == "\n"


def test_a_model_without_an_encoder_takes_no_source(sample):
    assert sample("--source=abc") == "error: --source: found 'abc'; the model has no encoder; use --prompt"
    assert sample("--source_file=a") == "error: --source_file: found 'a'; the model has no encoder; use --prompt"


@pytest.mark.slow
def test_beams_continue_a_prompt(sample, capsys):
    assert sample("--prompt=the", "--beams=2", "--length=3", "--json") is None
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["the", "the"] and lines[0]["score"] >= lines[1]["score"]


def test_the_default_length_fills_the_trained_context(sample, capsys, caplog, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"the\r\n")
    assert sample(f"--prompt_file={tmp_path}/prompt.txt", "--json", "--temperature=0") is None
    written = json.loads(capsys.readouterr().out)
    assert written["prompt"] == "the\r\n" and "more than" not in caplog.text
    assert len(written["tokens"]) == 32 - 5 or written["ended_by"] == "end of document"


@pytest.mark.slow
def test_positions_limit_the_length_or_a_warning_is_logged(sample, capsys, caplog):
    assert sample("--prompt=the cat", "--length=99", "--json", "--temperature=0", position="learned") is None
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 32 - 7
    assert "the model has 32 positions; the text ends after 25 new tokens" in caplog.text
    caplog.clear()
    assert sample("--prompt=the cat", "--length=99") is None
    assert "106 tokens are more than the 32 that the model was trained on" in caplog.text
    long = "a" * 33
    line = sample(f"--prompt={long}", position="learned")
    assert line == "error: --prompt: found 33 tokens; must be fewer than the model's 32 positions"


@pytest.mark.parametrize("isolated", [True, False])
def test_documents_of_a_chat_must_not_be_isolated(isolated):
    made = tokenizer(CHATML)
    config = loading.load("configs/tiny.py", {"data.isolate_documents": isolated, "data.tokenizer": "bytes"})
    run, flags = SimpleNamespace(config=config, tokenizer=made), SimpleNamespace(chat=True, length=9, source_file=None)
    if isolated:
        with pytest.raises(UserError, match=r"--chat: the run has data\.isolate_documents=True, but the ch"):
            request.make(run, ["the cat"], flags, seed=0)
    else:
        asked = request.make(run, ["the cat"] * 2, flags, seed=0)
        assert (
            asked.shown == "" and [row.tolist() for row in asked.prompts] == [chat.encode("the cat", made).tolist()] * 2
        )


BAD = [
    (["--prompt=a", "--temperature=-1"], r"temperature: found -1\.0; must be 0, or at least 1e-06, and finite"),
    (["--prompt=a", "--top_p=0"], r"top_p: found 0\.0; must be in \(0, 1\]"),
    (["--prompt=a", "--top_p=1.5"], r"top_p: found 1\.5; must be in \(0, 1\]"),
    (["--prompt=a", "--length=-3"], "--length: found -3; must be in 0..1000000"),
    (["--prompt=a", "--samples=0"], r"--samples: found 0; must be in 1..65536"),
    (["--prompt=a", "--length=1000000000"], r"--length: found 1000000000; must be in 0..1000000"),
    (["--prompt=a", "--seed=2147483648"], r"--seed: found 2147483648; must be in 0..2147483647"),
    (["--prompt=a", "--stop="], r"--stop: found ''; must have at least one character"),
    (["--prompt_file=/nowhere.txt"], r"--prompt_file: /nowhere\.txt: No such file or directory"),
    (["--prompt_file=/dev/zero"], r"--prompt_file: found /dev/zero with more than 16,777,216 bytes; give a .*"),
    (["--prompt=a", "--chat"], "--chat: the run has no chat template; only runs of an imported model with .*"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=str)
def test_bad_flags_end_in_one_line(sample, arguments, message):
    assert re.fullmatch(f"error: {message}", sample(*arguments))


@pytest.mark.slow
def test_invalid_and_unknown_characters_are_refused(sample, monkeypatch, small, tmp_path):
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    line = sample(f"--prompt_file={tmp_path}/bytes")
    assert line == f"error: --prompt_file: {tmp_path}/bytes is not UTF-8: invalid start byte at byte 2"
    loop.train(small(train__steps=1, data__tokenizer="characters"), tmp_path / "run", conclude=False)
    line = type_in(monkeypatch, "sample.py", f"--workdir={tmp_path}/run", "--prompt=the☃")
    assert line.startswith("error: tokenizer: found character '☃', which its corpus lacks")


def test_a_causal_run_fills_no_masks(sample):
    line = sample("--fill=[MASK]")
    assert line == "error: --fill: found '[MASK]'; the run does not have train.objective=masked; use --prompt"

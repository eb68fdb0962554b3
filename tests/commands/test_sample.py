"""sample.py: streamed text, JSON, targets of sources, filled masks, and one-line errors."""

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


@pytest.mark.slow
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
    (["--prompt=a", "--temperature=-1"], r"temperature: found -1\.0"),
    (["--prompt=a", "--top_p=1.5"], r"top_p: found 1\.5"),
    (["--prompt=a", "--length=-3"], "--length: found -3"),
    (["--prompt=a", "--samples=0"], r"--samples: found 0"),
    (["--prompt=a", "--seed=2147483648"], r"--seed: found 2147483648"),
    (["--prompt=a", "--stop="], r"--stop: found ''"),
    (["--prompt_file=/nowhere.txt"], r"--prompt_file: /nowhere\.txt: No such file or directory"),
    (["--prompt=a", "--chat"], "--chat: the run has no chat template"),
    (["--source=abc"], "--source: found 'abc'; the model has no encoder; use --prompt"),
    (["--fill=[MASK]"], r"--fill: found '\[MASK\]'; the run does not have train.objective=masked"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=str)
def test_bad_flags_end_in_one_line(sample, arguments, message):
    assert re.match(f"error: {message}", sample(*arguments))


@pytest.mark.slow
def test_invalid_and_unknown_characters_are_refused(sample, monkeypatch, small, tmp_path):
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    line = sample(f"--prompt_file={tmp_path}/bytes")
    assert line == f"error: --prompt_file: {tmp_path}/bytes is not UTF-8: invalid start byte at byte 2"
    loop.train(small(train__steps=1, data__tokenizer="characters"), tmp_path / "run", conclude=False)
    line = type_in(monkeypatch, "sample.py", f"--workdir={tmp_path}/run", "--prompt=the☃")
    assert line.startswith("error: tokenizer: found character '☃', which its corpus lacks")


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
        ("--prompt=abc",): "--prompt: found 'abc'; the model has an encoder",
        ("--source=abc", "--beams=0"): "--beams: found 0",
        ("--source=abc", "--beams=2", "--length_penalty=-1"): "--length_penalty: found -1.0",
        ("--source=abc", "--beams=2", "--seed=1"): "--seed: found 1; is not used by --beams",
        ("--source=abc", "--length_penalty=1"): "--length_penalty: found 1.0; is only for --beams",
        ("--source_file=a", "--samples=2"): "--samples: found 2; must be 1 with --source_file",
    }.items():
        assert type_in(monkeypatch, *command, *arguments).startswith(f"error: {message}")


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
        (["--fill=abc"], r"text: found 'abc'"),
        (["--fill=[MASK]", "--top=258"], r"top: found 258"),
        (["--fill=[MASK]", "--temperature=0"], r"--temperature: found 0\.0; is not supported with --fill"),
        (["--fill=[MASK]" + 32 * "a"], "model.max_positions: the learned table has 32 positions"),
        (["--prompt=a"], "--prompt: found 'a'; the run has train.objective=masked"),
        (["--prompt=a", "--top=4"], "--top: found 4; is only for --fill"),
    ],
    ids=str,
)
def test_flags_that_do_not_fit_a_masked_run_are_refused(trained, monkeypatch, arguments, message):
    workdir = trained(model__position="learned", **MASKED)
    assert re.match(f"error: {message}", type_in(monkeypatch, "sample.py", f"--workdir={workdir}", *arguments))

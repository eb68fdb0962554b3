"""The suites of eval.py: the files that they write, the numbers in them, checksums, and the memory budget."""

import csv
import json
import math
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mini_gpt import suites
from mini_gpt.evaluation import memory, perplexity
from mini_gpt.evaluation.loaded import LoadedModel
from mini_gpt.hugging_face import importing
from mini_gpt.insight import curves
from mini_gpt.runtime import files
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import tuning
from mini_gpt.suites import results
from mini_gpt.suites.base import SuiteOptions
from mini_gpt.training import loop
from mini_gpt.training.run import Run
from tests.commands.test_command_line import type_in
from tests.conftest import REPOSITORY

# The suites of eval.py: the files that they write, and the numbers in them.

ROW = ["length", "protocol", "stride", "nll", "perplexity", "bits_per_byte", "tokens_scored", "status", "reason"]
ROW += ["first_target", "sample_nll", "items"]


TASK = {"data__corpus": "task:copy", "data__tokenizer": "characters", "data__task_length": 6, "context_length": 14}


@pytest.mark.slow
def test_extrapolation_writes_json_csv_png_and_tensorboard(monkeypatch, trained, capsys):
    workdir = trained(model__position="learned")
    arguments = [f"--workdir={workdir}", "--suite=extrapolation,perplexity", "--lengths=16,1x,2x", "--strides=8,0.5x"]
    assert type_in(monkeypatch, "eval.py", *arguments) is None
    result = json.loads((workdir / "eval" / "extrapolation.json").read_text())
    assert (result["checkpoint_step"], result["train_length"], result["split"]) == (8, 32, "validation")
    assert (result["overrides"], result["request"]) == ({}, {"lengths": "16,1x,2x", "strides": "8,0.5x"})
    assert all(list(row) == ROW for row in result["rows"])
    windowings = [(row["length"], row["protocol"], row["stride"], row["status"]) for row in result["rows"]]
    assert windowings == [
        (16, "blocks", 16, "ok"), (16, "sliding", 8, "ok"),
        (32, "blocks", 32, "ok"), (32, "sliding", 8, "ok"), (32, "sliding", 16, "ok"),
        (64, "blocks", 64, "undefined"), (64, "sliding", 8, "undefined"), (64, "sliding", 16, "undefined"),
    ]  # fmt: skip
    targets = {(row["tokens_scored"], row["first_target"]) for row in result["rows"] if row["status"] == "ok"}
    blocks, sliding = sorted(targets, key=lambda each: each[1])
    assert blocks[1] == 1 and sliding[1] == 64 - 8 + 1 and sliding[0] == blocks[0] - 64 + 8, "a split under 16k tokens"
    plain = json.loads((workdir / "eval" / "perplexity.json").read_text())
    assert result["rows"][2]["nll"] == pytest.approx(plain["nll"], rel=1e-6)
    assert result["rows"][2]["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-6)
    assert {length: len(nll) for length, nll in result["by_position"].items()} == {"16": 16, "32": 32}

    with (workdir / "eval" / "extrapolation.csv").open() as file:
        table = list(csv.DictReader(file))
    shown = [name for name in ROW if name != "items"]
    assert [[row[name] for name in shown] for row in table] == [
        ["" if row[name] is None else str(row[name]) for name in shown] for row in result["rows"]
    ]
    assert (workdir / "eval" / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(workdir / "tensorboard" / "extrapolation"), {"scalars": 0, "images": 0})
    events.Reload()
    curves = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for row in result["rows"]:
        label = "blocks" if row["protocol"] == "blocks" else f"sliding_stride_{row['stride']}"
        found = curves[f"extrapolation/{label}/nll"].get(row["length"])
        assert found == (None if row["nll"] is None else pytest.approx(row["nll"]))
    by_position = curves["extrapolation/by_position/blocks_of_32"]
    np.testing.assert_allclose([by_position[i + 1] for i in range(32)], result["by_position"]["32"], rtol=1e-6)
    assert events.Tags()["images"] == ["extrapolation"]
    output = capsys.readouterr().out
    assert len(re.findall(r"^ *\d+ +(?:blocks|sliding) ", output, re.M)) == 8
    assert output.count("undefined: model.max_positions: the learned table has 32 positions") == 1
    assert "sample_nll compares all rows" in output


def test_positions_count_from_one_in_tensorboard():
    scalars = suites.SUITES["extrapolation"].scalars({"rows": [], "by_position": {"2": [0.5, 0.25]}})
    name = "extrapolation/by_position/blocks_of_2"
    assert [*scalars] == [(name, 0.5, 1), (name, 0.25, 2)]


def test_suites_that_ignore_an_option_are_named(caplog):
    suites.check(["perplexity", "extrapolation", "heads"], SuiteOptions(lengths="1x"))
    assert [record.getMessage() for record in caplog.records] == ["--lengths: not used by --suite=perplexity,heads"]
    caplog.clear()
    suites.check(["extrapolation", "tasks"], SuiteOptions(lengths="1x"))
    assert caplog.records == []


@pytest.mark.slow
def test_overrides_have_results_of_their_own(monkeypatch, trained):
    workdir = trained(model__position="rope", model__num_layers=2)
    asked = [f"--workdir={workdir}", "--suite=extrapolation", "--lengths=2x", "--strides=1x"]
    assert type_in(monkeypatch, "eval.py", *asked) is None
    plain = (workdir / "eval" / "extrapolation.json").read_text()
    losses = [json.loads(plain)["rows"][0]["nll"]]
    for fields in (
        {"model.rope.scaling": "linear", "model.rope.factor": "4"},
        {"model.rope.base": "500", "model.rope.fraction": "0.5"},
        {"model.position": "('rope', 'none')", "model.attention_window": "8"},
        {"model.random_positions": "200"},
    ):
        typed = [f"{field}={value}" for field, value in fields.items()]
        assert type_in(monkeypatch, "eval.py", *asked, *[f"--config.{each}" for each in typed]) is None
        name = files.plain_name(",".join(["extrapolation", *sorted(typed)]))
        result = json.loads((workdir / "eval" / f"{name}.json").read_text())
        assert (result["overrides"], result["train_length"]) == (fields, 32)
        losses.append(result["rows"][0]["nll"])
    assert (workdir / "eval" / "extrapolation.json").read_text() == plain
    assert len(set(losses)) == 5


@pytest.mark.slow
def test_tasks_writes_json_csv_and_png(monkeypatch, trained, capsys):
    workdir = trained(**TASK, model__position="learned")
    assert type_in(monkeypatch, "eval.py", f"--workdir={workdir}", "--suite=tasks", "--lengths=0.5x,6,12") is None
    result = json.loads((workdir / "eval" / "tasks.json").read_text())
    assert (result["task"], result["train_length"], result["split"]) == ("task:copy", 6, "validation")
    assert [(row["length"], row["status"]) for row in result["rows"]] == [(3, "ok"), (6, "ok"), (12, "undefined")]
    assert [row["answer_tokens"] for row in result["rows"]] == [512 * 3, 512 * 6, 0]
    assert 0 <= result["rows"][0]["exact_match"] <= result["rows"][0]["token_accuracy"] < 1
    assert (workdir / "eval" / "tasks.png").exists() and (workdir / "eval" / "tasks.csv").exists()
    assert "undefined: model.max_positions" in capsys.readouterr().out


BAD = [
    (["--suite=extrapolation", "--lengths=far"], r"--lengths: found 'far'"),
    (
        ["--suite=extrapolation", "--lengths=1x,2x,1000x"],
        r"--lengths: found 32000; the validation split",
    ),
    (["--suite=extrapolatoin"], r"--suite: found 'extrapolatoin'; .*; did you mean extrap"),
    (["--lengths=1x"], r"--lengths is not supported by --suite=perplexity"),
    (["--suite=perplexity,tasks"], r"--suite=tasks needs a run of data\.corpus=task:NAME, and this one has text"),
    (["--suite=extrapolation", "--config.model.ropes=1"], r"model\.ropes: no such config field"),
    (["--config.model.position=rope", "--config.model.rope.factor=4"], r"model\.rope\.factor: needs model\.rope"),
    ([f"--config.data.path={'x' * 230}"], r"data\.path: 'x+… matches no file"),
]
BAD_OF_TASK = [
    (["--suite=extrapolation"], "--suite=extrapolation needs text, and data.corpus is task:copy; use --suite=tasks"),
    (["--suite=diagnose"], "--suite=diagnose needs text, and data.corpus is task:copy; use --suite=tasks"),
    (["--suite=tasks", "--config.data.corpus=task:copi"], "data.corpus: .*found 'task:copi'"),
    (["--suite=tasks", "--lengths=1"], "--lengths: found 1; task:copy has problems of length 2 to 100000"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fields, bad", [({"model__position": "alibi"}, BAD), (TASK, BAD_OF_TASK)])
def test_bad_options_end_in_one_line_and_write_nothing(monkeypatch, trained, fields, bad):
    workdir = trained(**fields)
    before = sorted(workdir.rglob("*"))
    for arguments, message in bad:
        assert re.match(f"error: {message}", type_in(monkeypatch, "eval.py", f"--workdir={workdir}", *arguments))
        assert sorted(workdir.rglob("*")) == before


@pytest.mark.slow
def test_an_interrupted_suite_writes_nothing(trained, monkeypatch):
    workdir = trained(model__position="rope")
    calls = []

    def stop(*args, **kwargs):
        calls.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(curves, "extrapolation_figure", stop)
    with pytest.raises(KeyboardInterrupt):
        suites.evaluate(Run(workdir), "extrapolation", SuiteOptions(lengths="1x"))
    assert calls and not (workdir / "eval").exists()


def test_a_non_finite_loss_writes_nothing(trained, monkeypatch):
    workdir = trained(model__position="rope")
    monkeypatch.setattr(LoadedModel, "nll", lambda model, inputs_BL, targets_BL: np.full(targets_BL.shape, np.nan))
    with pytest.raises(
        UserError, match=r"the model of step 8 gives non-finite numbers; see --suite=diagnose"
    ) as raised:
        suites.evaluate(Run(workdir), "perplexity", SuiteOptions())
    assert tuning.DIVERGED.search(str(raised.value)), "studies know it"
    assert not (workdir / "eval").exists()


def test_tokens_limit_a_suite(trained):
    run = Run(trained(model__position="rope"))
    every, some = (suites.evaluate(run, "perplexity", SuiteOptions(tokens=tokens)) for tokens in (None, 256))
    assert every["tokens_scored"] > some["tokens_scored"] == 256 and some["request"] == {"tokens": 256}
    end = perplexity.score_split(run.model, run.store.tokens("validation")[-257:], run.tokenizer.token_bytes)
    assert some["nll"] == pytest.approx(end.nll) and some["nll_error"] > 0 and "nll_error" not in every


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, value, error",
    [
        ("heads", lambda result: result["heads"][0]["kinds"]["previous token"]["queries"], None),
        ("lens", lambda result: result["rows"][0]["nll"], lambda result: result["rows"][0]["nll_error"]),
        ("diagnose", lambda result: rows_of(result)["loss"]["value"], lambda result: rows_of(result)["loss"]["error"]),
        ("extrapolation", lambda result: result["rows"][-1]["tokens_scored"], lambda r: r["rows"][-1]["nll_error"]),
        ("pruning", lambda result: result["ablation"][0][0], None),
    ],
)
def test_tokens_limit_each_suite(trained, suite, value, error):
    run = Run(trained(model__num_layers=2, model__position="alibi"))
    every, some = (suites.evaluate(run, suite, SuiteOptions(tokens=tokens)) for tokens in (None, 128))
    assert value(every) != value(some) and math.isfinite(value(some))
    assert error is None or 0 < error(some) < 1


def rows_of(result):
    return {row["check"]: row for row in result["rows"]}


@pytest.mark.slow
def test_batch_tokens_do_not_depend_on_the_context_length(trained):
    workdir = trained(model__position="rope", train__steps=2)
    assert Run(workdir).model.batch_tokens == 8 * 32
    assert Run(workdir, overrides={"context_length": "128"}).model.batch_tokens == 8 * 32
    assert Run(workdir, overrides={"context_length": "128", "train.batch_size": "16"}).model.batch_tokens == 16 * 32


@pytest.mark.slow
def test_random_positions_do_not_depend_on_the_batch_size(small, tmp_path):
    loop.train(small(model__position="rope", model__random_positions=300), tmp_path / "run", conclude=False)
    results = []
    for fields in ({"train.batch_size": "8"}, {"train.batch_size": "2"}):
        run = Run(tmp_path / "run", overrides=fields)
        results.append(suites.evaluate(run, "extrapolation", SuiteOptions(lengths="1x,4x", strides="0.5x"))["rows"])
    for left, right in zip(*results, strict=True):
        assert left["nll"] == pytest.approx(right["nll"], rel=1e-5) and math.isfinite(left["nll"])


@pytest.mark.slow
def test_the_titles_of_figures_name_the_run_and_the_text(trained, monkeypatch):
    run, found = Run(trained(model__position="alibi")), []
    run.workdir = run.workdir.rename(run.workdir.with_name("ten $ and $"))
    monkeypatch.setattr(suites.results, "write", lambda *given: found.append(given[-1][".png"]) or [])
    titles = {
        ("pruning", None, None): "importance of the heads",
        ("lens", "$1 and 2" * 9, None): f"logit lens on “{('$1 and 2' * 9)[:40]}…”",
        ("patching", "a cat", "a dog"): "activations of “a cat”, put into the pass on “a dog”",
    }
    for step, name in ((8, "ten $ and $, step 8"), (0, "ten $ and $")):  # an imported model is at step 0
        run.step = step
        for (suite, text, other), title in titles.items():
            suites.evaluate(run, suite, SuiteOptions(text=text, other=other))
            assert found[-1].get_suptitle() == f"{name}: {title}".replace("$", r"\$")


# The files of results: JSON with a checksum.

RESULT = {"nll": 1.25, "by_position": {64: [0.5, 2.0], 256: [1e-9]}, "rows": [{"length": 8, "label": "é", "x": None}]}


def test_any_altered_number_of_a_result_is_found(tmp_path):
    path, text = tmp_path / "result.json", results.json_text(RESULT)
    path.write_text(text)
    assert files.read_with_checksum(path, must=True) == json.loads(json.dumps(RESULT))
    content = text[: text.index('"sha256"')]
    for digit in re.finditer(r"\d", content):
        other = "3" if digit[0] != "3" else "4"
        path.write_text(text[: digit.start()] + other + text[digit.end() :])
        with pytest.raises(ValueError, match="sha256 does not match"):
            files.read_with_checksum(path)
    path.write_text(json.dumps(RESULT))  # of an earlier version
    assert files.read_with_checksum(path)["nll"] == 1.25


def test_a_result_with_non_finite_numbers_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.json_text({"nll": float("nan")})


def test_reasons_below_a_table_are_those_of_their_rows():
    found = {2: "too short", 3: "no words", 4: "too short"}
    rows = [{"length": n, "status": "undefined" if n in found else "ok", "reason": found.get(n)} for n in range(1, 5)]
    assert results.table(rows).splitlines() == [
        "length         status",
        "     1             ok",
        "     2  undefined (1)",
        "     3  undefined (2)",
        "     4  undefined (1)",
        "undefined (1): too short",
        "undefined (2): no words",
    ]
    assert results.table(rows[:2]).splitlines()[2:] == ["     2  undefined", "undefined: too short"]


# Each suite keeps to the memory budget, also if the batches of training are far larger.

LAYERS, WIDTH, VOCAB, LENGTH = 4, 256, 20_000, 1024
OTHER = 3 * 2**29  # bytes of Python, JAX, compiled programs, parameters and figures
# Run a command, and print its peak memory in kilobytes.
MEASURE = "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
MEASURE += "print('PEAK', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"


def write_gpt2(directory):
    """Write a model of GPT-2's architecture with random weights, and a byte-level tokenizer of VOCAB tokens."""
    rng = np.random.default_rng(0)
    drawn = lambda *shape: 0.02 * rng.standard_normal(shape, dtype=np.float32)
    norm = lambda name: {f"{name}.weight": np.ones(WIDTH, np.float32), f"{name}.bias": np.zeros(WIDTH, np.float32)}
    tensors = {"wte.weight": drawn(VOCAB, WIDTH), "wpe.weight": drawn(LENGTH, WIDTH)} | norm("ln_f")
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(LAYERS):
        tensors |= norm(f"h.{layer}.ln_1") | norm(f"h.{layer}.ln_2")
        for name, (rows, columns) in sizes.items():
            tensors[f"h.{layer}.{name}.weight"] = drawn(rows * WIDTH, columns * WIDTH)
            tensors[f"h.{layer}.{name}.bias"] = np.zeros(columns * WIDTH, np.float32)
    directory.mkdir()
    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "n_positions": LENGTH}
    config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "vocab_size": VOCAB}
    (directory / "config.json").write_text(
        json.dumps(config | dict.fromkeys(["bos_token_id", "eos_token_id"], VOCAB - 1))
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters][: VOCAB - 1 - len(letters)]
    vocabulary = {token: number for number, token in enumerate(letters + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    write_gpt2(root / "gpt2")
    (root / "text").mkdir()
    drawn = random.Random(0)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(500)]
    for number in range(40):
        (root / "text" / f"{number}.txt").write_text(" ".join(drawn.choices(words, k=2_000)), encoding="utf-8")
    fields = {"data.corpus": "text", "data.path": f"{root}/text/*.txt"}
    fields |= {"train.batch_size": 128, "eval.tokens": 8_192, "model.dtype": "float32"}
    importing.import_run(root / "gpt2", root / "run", "configs/default.py", fields)
    return root / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, flags",
    [
        ("perplexity", []),
        ("extrapolation", ["--lengths=1x", "--strides=0.5x"]),
        ("needles", ["--lengths=1024"]),
        ("heads", []),
        ("pruning", ["--tokens=2048"]),
        ("figures", []),
        ("explorer", []),
        ("diagnose", []),
        ("lens", []),
        ("patching", [f"--text={'k k ' * 24}a", f"--other=g g {'k k ' * 23}a"]),
    ],
)
def test_a_suite_keeps_to_the_memory_budget(workdir, suite, flags):
    command = [sys.executable, "eval.py", f"--workdir={workdir}", f"--suite={suite}", *flags]
    command.append(f"--config.data.path={workdir.parent}/text/*.txt")
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak = 1024 * int(re.search(r"PEAK (\d+)", done.stdout)[1])
    assert peak < memory.BUDGET + OTHER, f"{peak / 2**30:.2f} GiB"

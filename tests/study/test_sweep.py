"""Sweeps train only missing runs, continue after failures, and write correct tables."""

import csv
import json
import os
import re
import statistics
import subprocess
import sys

import pytest

from mini_gpt.commands import results, sweep, sweep_tables
from mini_gpt.commands.suites import SUITES
from mini_gpt.commands.suites.base import SuiteOptions
from mini_gpt.runtime.errors import UserError
from mini_gpt.training import loop
from tests.commands import test_command_line as test_commands
from tests.conftest import REPOSITORY, SMALL
from tests.faults.test_commands import DAMAGED


def type_in(monkeypatch, *arguments):
    monkeypatch.setattr(sweep.jax, "clear_caches", lambda: None)  # keep the compiled programs for the next run
    return test_commands.type_in(monkeypatch, "mini_gpt.sweep", *arguments)


@pytest.fixture
def flags(corpus_files, tmp_path):
    """Return the flags of a sweep over small models, into tmp_path/sweep."""
    fields = SMALL | {
        "data.path": corpus_files,
        "data.cache_dir": tmp_path / "cache",
        "train.steps": 4,
        "seed": 3,
    }
    typed = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/default.py", f"--workdir={tmp_path}/sweep", *typed]


@pytest.fixture
def trainings(monkeypatch, caplog):
    """Return a list that collects the names of the trained runs, in order."""
    caplog.set_level("INFO", "mini_gpt")
    train, names = loop.train, []

    def watched(config, workdir, **options):
        names.append(workdir.name)
        return train(config, workdir, **options)

    monkeypatch.setattr(loop, "train", watched)
    return names


COPY = ["--suite=tasks", "--config.data.corpus=task:copy", "--config.data.tokenizer=characters"]
EXTRAPOLATION = ["--suite=extrapolation", "--lengths=1x,2x", "--strides=0.5x"]


@pytest.mark.slow
def test_a_sweep_trains_missing_runs_and_tabulates_them(monkeypatch, flags, trainings, tmp_path, capsys, caplog):
    vary = "--vary=model.position=learned,rope"
    assert type_in(monkeypatch, *flags, vary, "--seeds=2", *EXTRAPOLATION) is None
    assert "[4 of 4] model.position=rope,seed=4" in caplog.text and "blocks/*" not in caplog.text
    expected = [f"model.position={name},seed={seed}" for seed in (3, 4) for name in ("learned", "rope")]
    assert trainings == expected
    folder = tmp_path / "sweep"
    results = {name: json.loads((folder / name / "eval" / "extrapolation.json").read_text()) for name in expected}

    # Recompute the table from the results of the runs.
    with (folder / "extrapolation.csv").open() as file:
        table = {(row["model.position"], row["measured"], int(row["length"])): row for row in csv.DictReader(file)}
    assert len(table) == 2 * 2 * 2
    for (position, measured, length), row in table.items():
        mine = [
            found
            for seed in (3, 4)
            for found in results[f"model.position={position},seed={seed}"]["rows"]
            if found["length"] == length and measured.startswith(found["protocol"])
        ]
        assert len(mine) == 2
        if position == "learned" and length == 64:
            assert (row["seeds"], row["nll_mean"]) == ("0", "") and "the learned table has 32" in row["reason"]
            continue
        for value in ("nll", "perplexity", "bits_per_byte"):
            found = [each[value] for each in mine]
            assert found[0] != found[1]
            assert float(row[f"{value}_mean"]) == pytest.approx(sum(found) / 2)
            assert float(row[f"{value}_standard_deviation"]) == pytest.approx(abs(found[0] - found[1]) / 2**0.5)
            assert [float(row[f"{value}_{end}"]) for end in ("lowest", "highest")] == sorted(found)
    text = (folder / "extrapolation.md").read_text()
    assert text.startswith("extrapolation of the validation split") and text in capsys.readouterr().out
    nll = [results[f"model.position=rope,seed={seed}"]["rows"][0]["nll"] for seed in (3, 4)]
    shown = f"{statistics.mean(nll):.4f} ± {statistics.stdev(nll):.4f}"
    assert re.search(rf"\*\*nll\*\*, blocks\n\n.*\n.*\n\| learned .* undefined \|\n\| rope \| 2 \| {shown} \|", text)
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")

    # The same command trains nothing; one more seed trains only that seed; other lengths are only evaluated.
    trainings.clear()
    assert type_in(monkeypatch, *flags, vary, "--seeds=2", *EXTRAPOLATION) is None
    assert trainings == [] and (folder / "extrapolation.md").read_text() == text
    assert type_in(monkeypatch, *flags, vary, "--seeds=3", *EXTRAPOLATION) is None
    assert trainings == ["model.position=learned,seed=5", "model.position=rope,seed=5"]
    before = {name: (folder / name / "checkpoints" / "4").stat().st_mtime_ns for name in expected}
    assert type_in(monkeypatch, *flags, vary, "--suite=extrapolation", "--lengths=1x", "--strides=0.5x") is None
    assert "| 64 |" not in (folder / "extrapolation.md").read_text()
    assert before == {name: (folder / name / "checkpoints" / "4").stat().st_mtime_ns for name in expected}


@pytest.mark.slow
def test_a_sweep_continues_after_crashes_and_damage(monkeypatch, flags, trainings, tmp_path, caplog):
    train = loop.train

    def crash(config, workdir, **options):
        if config.model.d_ff == 48:
            raise RuntimeError("out of memory\nand more")
        return train(config, workdir, **options)

    monkeypatch.setattr(loop, "train", crash)
    arguments = [*flags, "--vary=model.d_ff=48,64", "--suite=perplexity"]
    assert type_in(monkeypatch, *arguments).startswith("error: 1 of 2 runs failed")
    assert "model.d_ff=48,seed=3: RuntimeError: out of memory" in caplog.text
    folder = tmp_path / "sweep"
    assert "\nfailed: model.d_ff=48,seed=3: RuntimeError: out of memory\n" in (folder / "perplexity.md").read_text()
    assert "| 64 | 1 |" in (folder / "perplexity.md").read_text() and (folder / "perplexity.png").exists()
    assert "±" not in (folder / "perplexity.md").read_text().split("± is")[0], "one seed has no spread"
    (folder / "model.d_ff=64,seed=3" / "eval" / "perplexity.json").write_text("{")
    monkeypatch.setattr(loop, "train", train)
    assert type_in(monkeypatch, *arguments) is None
    assert trainings == ["model.d_ff=64,seed=3", "model.d_ff=48,seed=3", "model.d_ff=64,seed=3"]
    other = [*flags, "--config.context_length=16", "--vary=model.d_ff=64", "--suite=perplexity"]
    assert type_in(monkeypatch, *other).startswith("error: 1 of 1 runs failed")
    assert "holds another run (context_length was 32, is 16" in caplog.text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--vary=model.positoin=rope"], r"error: model\.positoin: no such config field; did you mean model\.position"),
        (["--vary=model.position"], r"error: override: found 'model\.position'; must be FIELD=VALUE"),
        (["--vary=model.position=rope,"], r"error: --vary: found 'model\.position=rope,'; must be FIELD=VALUE,VALUE"),
        (["--vary=model.position=rope,rope"], r"error: --vary: .* with different values"),
        (["--vary=seed=1,2"], r"error: --vary: found seed; give the number of seeds with --seeds"),
        (["--vary=train.steps=2,3"], r"error: --vary: found train\.steps, which --config\.train\.steps sets as well"),
        (["--vary=model.position=rope", "--vary=model.position=none"], r"error: --vary: found model\.position twice"),
        (["--vary=model.position=rope", "--seeds=0"], r"error: --seeds: found 0; must be at least 1"),
        (["--vary=model.position=rope", "--suite=tusks"], r"error: --suite: found 'tusks'; .* did you mean tasks\?"),
        (["--vary=model.position=rope,roap"], r"error: model\.position: found 'roap'"),
        (["--vary=model.num_kv_heads=2,3", "--vary=model.dropout=0,0.1"], r"error: model\.num_kv_heads: found 3"),
        (["--config.train.batch_size=16", "--vary=mesh.fsdp=1,16"], r"error: mesh: "),
        ([*COPY, "--vary=data.task_length=5,500"], r"error: context_length: found 32; task:copy with data\.task_len"),
        (
            ["--vary=model.position=rope", "--suite=tasks"],
            r"error: --suite=tasks needs a run of data\.corpus=task:NAME",
        ),
        (
            ["--vary=model.position=rope", "--suite=extrapolation", "--lengths=far"],
            r"error: --lengths: found 'far'; must be a whole number",
        ),
        (["--vary=model.position=rope", "--lengths=1x"], r"error: --lengths is not supported by --suite=perplexity"),
    ],
)
def test_a_bad_sweep_ends_in_one_line_and_writes_nothing(monkeypatch, flags, tmp_path, arguments, message):
    assert re.match(message, type_in(monkeypatch, *flags, *arguments))
    assert not (tmp_path / "sweep").exists()


ROW = {"length": 32, "stride": 32, "protocol": "blocks", "status": "ok", "reason": None, "nll": 1.0}
ROW |= {"perplexity": 2.7, "bits_per_byte": None, "sample_nll": 1.0}
UNDEFINED = ROW | {"status": "undefined", "reason": "too long", "nll": None, "perplexity": None, "sample_nll": None}
WRONG_ROWS = [
    [],
    {},
    "rows",
    5,
    [5],
    ["row"],
    [[]],
    [ROW | {"length": "32"}],
    [ROW | {"length": None}],
    [ROW | {"nll": "1.0"}],
    [ROW | {"nll": [1.0]}],
    [ROW | {"nll": True}],
    [ROW | {"nll": float("nan")}],
    [ROW | {"nll": 10**400}],
    [ROW | {"reason": ["too long"]}],
    [{name: value for name, value in ROW.items() if name != "protocol"}],
    [{name: value for name, value in ROW.items() if name != "sample_nll"}],
]


def complete_result(small, tmp_path, monkeypatch, content):
    """Return what a sweep takes from a run's eval/extrapolation.json."""
    monkeypatch.setattr(sweep.workdirs, "check_corpus", lambda *_: None)
    (tmp_path / "run" / "eval").mkdir(parents=True, exist_ok=True)
    (tmp_path / "run" / "eval" / "extrapolation.json").write_bytes(content.encode(errors="surrogateescape"))
    one = sweep.Sweep("configs/default.py", {}, {}, 1, "extrapolation", SuiteOptions(), tmp_path)
    return one._complete_result(small(train__steps=4), tmp_path / "run")


def test_damaged_results_are_not_taken_into_tables(small, tmp_path, monkeypatch, caplog):
    right = {"checkpoint_step": 4, "request": {"lengths": None, "strides": None}, "train_length": 32}
    right |= {"rows": [ROW, UNDEFINED]}
    taken = lambda content: complete_result(small, tmp_path, monkeypatch, content)
    assert taken(json.dumps(right)) == right and not caplog.text
    damaged = [json.dumps(right | {"rows": rows}) for rows in WRONG_ROWS] + [*DAMAGED.values(), json.dumps(right)[:-9]]
    sealed = results.json_text(right)
    assert taken(sealed) == right and not caplog.text
    damaged += [sealed.replace('"nll": 1.0', '"nll": 1.5')]
    damaged += [json.dumps(right | {"train_length": length}) for length in ([32], "32", True)]
    for content in damaged:
        caplog.clear()
        assert taken(content) is None, content[:200]
        assert re.search(
            r"extrapolation\.json is damaged \(\w+: .{1,300}\): the run is measured again$", caplog.text.strip()
        )
    for other in ({"checkpoint_step": 3}, {"checkpoint_step": None}, {"request": {}}, {"request": []}):
        caplog.clear()
        assert taken(json.dumps(right | other)) is None and not caplog.text


@pytest.mark.slow
def test_results_of_another_text_are_refused(monkeypatch, flags, tmp_path, caplog):
    caplog.set_level("INFO", "mini_gpt")
    (tmp_path / "text").mkdir()
    for number in range(120):
        (tmp_path / "text" / f"{number}.txt").write_text(f"some text {number} " * 12)
    arguments = [
        *flags,
        f"--config.data.path={tmp_path}/text/*.txt",
        "--vary=model.position=rope",
        "--suite=perplexity",
    ]
    arguments = [argument for argument in arguments if "data.path" not in argument or str(tmp_path) in argument]
    assert type_in(monkeypatch, *arguments) is None
    (tmp_path / "text" / "0.txt").write_text("another text " * 12)
    assert type_in(monkeypatch, *arguments) == "error: 1 of 1 runs failed; the same command tries them again"
    assert "the text has changed" in caplog.text


def test_a_split_that_is_too_short_is_refused_before_training(monkeypatch, flags, trainings, tmp_path):
    arguments = [*flags, "--vary=model.position=rope,none", "--suite=extrapolation", "--lengths=1x,1000x"]
    assert type_in(monkeypatch, *arguments).startswith("error: --lengths: found 32000; the validation split")
    nothing = [f"--workdir={tmp_path}/other", "--config.data.split_fractions=(0.7,0.3,0)", "--split=test"]
    said = type_in(monkeypatch, *flags, *nothing, "--vary=model.position=rope")
    assert said.startswith("error: data.split_fractions: found (0.7, 0.3, 0.0); the test split is empty")
    assert trainings == []


@pytest.mark.parametrize(
    "varied, message",
    [
        (["context_length=32,100000"], r"data\.corpus: the train split has \d+ tokens; context_length=100000 needs"),
        (["model.attention=reference,cudnn"], r"model\.attention: found 'cudnn', which needs NVIDIA GPUs"),
        (["data.path=PATH,nothing/*.txt"], r"data\.path: 'nothing/\*\.txt' matches no file"),
    ],
)
def test_no_run_starts_if_a_varied_value_is_wrong(monkeypatch, flags, trainings, corpus_files, varied, message):
    values = [f"--vary={text.replace('PATH', corpus_files)}" for text in varied]
    flags = [flag for flag in flags if flag.split("=")[0].removeprefix("--config.") != varied[0].split("=")[0]]
    assert re.match(f"error: {message}", type_in(monkeypatch, *flags, *values))
    assert trainings == []


@pytest.mark.slow
def test_undefined_values_and_failed_runs_leave_a_table(monkeypatch, flags, tmp_path, caplog):
    caplog.set_level("INFO", "mini_gpt")
    masked = [*flags, "--config.model.causal=False", "--config.train.objective=masked", "--config.train.steps=2"]
    masked = [argument for argument in masked if argument != "--config.train.steps=4"]
    assert type_in(monkeypatch, *masked, "--vary=model.position=none", "--seeds=2") is None
    with (tmp_path / "sweep" / "perplexity.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["seeds"] == "2" and float(row["nll_mean"]) > 0 and row["bits_per_byte_mean"] == ""
    text = (tmp_path / "sweep" / "perplexity.md").read_text()
    assert "**nll**" in text and "| none | 0 | undefined |" in text and "these runs have no bits_per_byte" in text
    broken = [*flags, f"--workdir={tmp_path}/broken", "--vary=optimizer.learning_rate=1e-3,1e30", "--seeds=2"]
    assert type_in(monkeypatch, *broken).startswith("error: 2 of 4 runs failed")
    assert "learning_rate=1e30,seed=3: " in caplog.text and "found loss nan, gradient norm nan" in caplog.text
    assert "| 1e-3 | 2 |" in (tmp_path / "broken" / "perplexity.md").read_text()


@pytest.mark.slow
def test_a_config_may_be_valid_only_with_the_varied_values(monkeypatch, flags, tmp_path):
    arguments = [*flags, "--config.model.num_heads=3", "--vary=model.d_model=33,48", "--config.model.position=alibi"]
    arguments = [a for a in arguments if a not in ("--config.model.num_heads=4", "--config.model.d_model=32")]
    assert type_in(monkeypatch, *arguments) is None


def test_values_may_hold_commas_in_brackets():
    name, values = sweep.parse_vary("model.position=rope,('rope', 'none'),[rope,t5],alibi")
    assert (name, values) == ("model.position", ["rope", "('rope', 'none')", "[rope,t5]", "alibi"])
    with pytest.raises(UserError):
        sweep.parse_vary("nothing=1")


def test_the_default_directory_is_named_after_the_flags(monkeypatch):
    seen = []
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: seen.append(str(self.workdir)))
    plain = ["--config=configs/positions.py", "--vary=model.position=none,rope", "--vary=model.num_layers=1,2"]
    type_in(monkeypatch, *plain)
    type_in(monkeypatch, *plain, "--config.train.steps=5")
    assert seen == [
        "runs/sweeps/positions,model.position,model.num_layers",
        "runs/sweeps/positions,train.steps=5,model.position,model.num_layers",
    ]


@pytest.mark.slow
def test_a_sweep_over_tasks_from_the_shell(tmp_path):
    fields = {"train.steps": 3, "train.batch_size": 4, "optimizer.warmup_steps": 2, "model.num_layers": 1}
    fields |= {
        "mesh.data": 1,
        "model.d_model": 16,
        "eval.tokens": 64,
        "data.task_length": 4,
        "data.cache_dir": tmp_path / "cache",
    }
    typed = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "mini_gpt.sweep", "--config=configs/tasks.py:copy", "--suite=tasks", *typed]
    command += ["--vary=model.position=none,alibi", "--lengths=1x,2x", f"--workdir={tmp_path}/sweep"]
    alone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # one device
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    assert "[2 of 2] model.position=alibi,seed=0" in done.stderr and "**exact_match**" in done.stdout
    assert "| none | 1 | 0." in (tmp_path / "sweep" / "tasks.md").read_text()


def test_a_varied_field_keeps_its_value_in_the_tables():
    suite, combination = SUITES["perplexity"], (("context_length", "64"),)
    result = {"context_length": 64, "nll": 1.0, "bits_per_byte": 2.0}
    table = sweep_tables.gather(suite, ["context_length"], {combination: [result]})
    assert [row["context_length"] for row in table] == ["64"]
    sweep_tables.figure(suite, ["context_length"], table, None)

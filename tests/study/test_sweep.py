"""Sweeps train only missing runs, refuse what cannot run, ignore damaged results, and write correct tables."""

import csv
import json
import os
import re
import statistics
import subprocess
import sys

import pytest

from mini_gpt.commands import study
from mini_gpt.data import corpora
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import syntax
from tests.commands import test_command_line as test_commands
from tests.conftest import REPOSITORY


def type_in(monkeypatch, *arguments):
    return test_commands.type_in(monkeypatch, "mini_gpt.sweep", *arguments)


def without(flags, *names):
    """Return the flags without those of some config fields."""
    return [flag for flag in flags if flag.partition("=")[0].removeprefix("--config.") not in names]


COPY = [
    "--suite=tasks",
    "--config.data.path=None",
    "--config.data.corpus=task:copy",
    "--config.data.tokenizer=characters",
]
EXTRAPOLATION = ["--suite=extrapolation", "--lengths=1x,2x", "--strides=0.5x"]


@pytest.mark.slow
def test_a_sweep_trains_missing_runs_and_tabulates_them(monkeypatch, flags, real, tmp_path, capsys, caplog):
    vary = "--vary=model.position=learned,rope"
    assert type_in(monkeypatch, *flags, vary, "--seeds=2", *EXTRAPOLATION) is None
    assert re.search(r"\[4 of 4 complete\] (learned|rope),seed=4: complete, 0:", caplog.text)
    assert "blocks/*" not in caplog.text
    expected = [f"{name},seed={seed}" for seed in (3, 4) for name in ("learned", "rope")]
    assert real == expected
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
            for found in results[f"{position},seed={seed}"]["rows"]
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
    title, _, table_text = text.partition("\n\n")
    assert title == "extrapolation of the validation split" and "**nll**, blocks" in table_text
    assert len(capsys.readouterr().out.splitlines()) == 4
    nll = [results[f"rope,seed={seed}"]["rows"][0]["nll"] for seed in (3, 4)]
    shown = f"{statistics.mean(nll):.4f} ± {statistics.stdev(nll):.4f}"
    learned, rope = r"\| learned .* undefined \|", rf"\| rope \| 2 \| {shown} \|"
    assert re.search(rf"\*\*nll\*\*, blocks\n\n.*\n.*\n{learned}\n{rope}", text)
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")

    # The same command trains nothing; other lengths are only evaluated.
    real.clear()
    assert type_in(monkeypatch, *flags, vary, "--seeds=2", *EXTRAPOLATION) is None
    assert real == [] and (folder / "extrapolation.md").read_text() == text
    before = {name: (folder / name / "checkpoints" / "4").stat().st_mtime_ns for name in expected}
    assert type_in(monkeypatch, *flags, vary, "--suite=extrapolation", "--lengths=1x", "--strides=0.5x") is None
    assert real == expected[:2]
    assert "| 64 |" not in (folder / "extrapolation.md").read_text()
    assert before == {name: (folder / name / "checkpoints" / "4").stat().st_mtime_ns for name in expected}


def test_a_setting_without_effect_is_named_once(monkeypatch, flags, fake, caplog):
    rest = without(flags, "optimizer.warmup_steps")
    assert type_in(monkeypatch, *rest, "--vary=optimizer.warmup_steps=1,9", "--seeds=2") is None
    (one,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert one.startswith("optimizer.warmup_steps: found 9; the learning rate")
    assert one.endswith(" (conditions: warmup_steps=9)") and len(fake) == 4


def test_a_damaged_result_is_measured_again(monkeypatch, flags, fake, tmp_path, caplog):
    arguments = [*flags, "--vary=model.d_ff=64,96"]
    assert type_in(monkeypatch, *arguments) is None
    table = (tmp_path / "sweep" / "perplexity.md").read_text()
    assert "| d_ff=64 | 1 |" in table and "±" not in table.split("± is")[0], "one seed has no spread"
    (tmp_path / "sweep" / "d_ff=64,seed=3" / "eval" / "perplexity.json").write_text("{")
    fake.clear()
    assert type_in(monkeypatch, *arguments) is None
    assert fake == ["d_ff=64,seed=3"] and "perplexity.json is damaged" in caplog.text
    assert (tmp_path / "sweep" / "perplexity.md").read_text() == table


def test_the_directory_of_another_sweep_is_refused(monkeypatch, flags, fake, tmp_path):
    """Also if only the runs tell which sweep it holds."""
    assert type_in(monkeypatch, *flags, "--vary=model.d_ff=64") is None
    other = [*without(flags, "context_length"), "--config.context_length=16", "--vary=model.d_ff=64"]
    said = type_in(monkeypatch, *other)
    assert re.match(rf"error: --workdir: {tmp_path}/sweep holds the study default,\S+; name a new directory for ", said)
    (tmp_path / "sweep" / "study.json").unlink()
    said = type_in(monkeypatch, *other)
    assert "d_ff=64,seed=3 holds another run (context_length was 32, is 16" in said
    assert fake == ["d_ff=64,seed=3"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"error: --vary: give at least one, such as --vary=model\.position=rope,alibi"),
        (["--vary=model.positoin=rope"], r"error: model\.positoin: no such config field; did you mean model\.position"),
        (["--vary=model.position"], r"error: override: found 'model\.position'; must be FIELD=VALUE"),
        (["--vary=model.position=rope,"], r"error: --vary: found 'model\.position=rope,'; must be FIELD=VALUE,VALUE"),
        (["--vary=model.position=rope,rope"], r"error: --vary: .* with different values"),
        (["--vary=seed=1,2"], r"error: --vary: found seed; give the number of seeds with --seeds"),
        (
            ["--vary=train.steps=2,3"],
            r"error: conditions: steps=2: found 'train\.steps'; is given",
        ),
        (["--vary=model.position=rope", "--vary=model.position=none"], r"error: --vary: found model\.position twice"),
        (["--vary=model.position=rope", "--seeds=0"], r"error: --seeds: found 0; must be at least 1"),
        (["--vary=model.position=rope", "--suite=tusks"], r"error: --suite: found 'tusks'; .* did you mean tasks\?"),
        (["--vary=model.position=rope,roap"], r"error: model\.position: found 'roap'"),
        (["--vary=model.num_kv_heads=2,3", "--vary=model.dropout=0,0.1"], r"error: model\.num_kv_heads: found 3"),
        (["--config.train.batch_size=16", "--vary=mesh.fsdp=1,16"], r"error: mesh: "),
        ([*COPY, "--vary=data.task_length=5,500"], r"error: context_length: found 32; task:copy with data\.task_len"),
        (["--vary=model.position=rope", "--lengths=1x"], r"error: --lengths is not supported by --suite=perplexity"),
    ],
)
def test_a_bad_sweep_ends_in_one_line_and_writes_nothing(monkeypatch, flags, started, tmp_path, arguments, message):
    assert re.match(message, type_in(monkeypatch, *flags, *arguments))
    assert started == [] and not (tmp_path / "sweep").exists()


def test_results_of_another_text_are_refused(monkeypatch, flags, fake, small, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(120):
        (tmp_path / "text" / f"{number}.txt").write_text(f"some text {number} " * 12)
    path = f"{tmp_path}/text/*.txt"
    monkeypatch.setenv("FINGERPRINT", corpora.open_corpus(small(data__path=path).data).fingerprint)
    arguments = [*without(flags, "data.path"), f"--config.data.path={path}", "--vary=model.d_ff=64"]
    assert type_in(monkeypatch, *arguments) is None
    (tmp_path / "text" / "0.txt").write_text("another text " * 12)
    said = type_in(monkeypatch, *arguments)
    assert said.startswith("error: data.corpus: found ") and "d_ff=64,seed=3 was trained on" in said
    assert "the text has changed; restore it" in said and fake == ["d_ff=64,seed=3"]


def test_a_split_that_is_too_short_is_refused_before_training(monkeypatch, flags, started, tmp_path):
    arguments = [*flags, "--vary=model.position=rope,none", "--suite=extrapolation", "--lengths=1x,1000x"]
    assert type_in(monkeypatch, *arguments).startswith("error: --lengths: found 32000; the validation split")
    nothing = [f"--workdir={tmp_path}/other", "--config.data.split_fractions=(0.7,0.3,0)", "--split=test"]
    said = type_in(monkeypatch, *flags, *nothing, "--vary=model.position=rope")
    assert said.startswith("error: data.split_fractions: found (0.7, 0.3, 0.0); the test split is empty")
    assert started == []


@pytest.mark.parametrize(
    "varied, message",
    [
        (["context_length=32,100000"], r"data\.corpus: the train split has \d+ tokens; context_length=100000 needs"),
        (["model.attention=reference,cudnn"], r"model\.attention: found 'cudnn', which needs NVIDIA GPUs"),
        (["data.path=PATH,nothing/*.txt"], r"data\.path: 'nothing/\*\.txt' matches no file"),
    ],
)
def test_no_run_starts_if_a_varied_value_is_wrong(monkeypatch, flags, started, corpus_files, varied, message):
    values = [f"--vary={text.replace('PATH', corpus_files)}" for text in varied]
    assert re.match(f"error: {message}", type_in(monkeypatch, *without(flags, varied[0].split("=")[0]), *values))
    assert started == []


@pytest.mark.slow
def test_undefined_values_and_failed_runs_leave_a_table(monkeypatch, flags, real, tmp_path, caplog):
    masked = [
        *without(flags, "train.steps"),
        "--config.model.causal=False",
        "--config.train.objective=masked",
        "--config.train.steps=2",
    ]
    assert type_in(monkeypatch, *masked, "--vary=model.position=none", "--seeds=2") is None
    with (tmp_path / "sweep" / "perplexity.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["seeds"] == "2" and float(row["nll_mean"]) > 0 and row["bits_per_byte_mean"] == ""
    text = (tmp_path / "sweep" / "perplexity.md").read_text()
    assert "**nll**" in text and "| none | 0 | undefined |" in text and "these runs have no bits_per_byte" in text
    broken = [*flags, f"--workdir={tmp_path}/broken", "--vary=optimizer.learning_rate=1e-3,1e30", "--seeds=2"]
    assert type_in(monkeypatch, *broken).startswith("error: 2 of 4 runs failed")
    assert "learning_rate=1e30,seed=3: " in caplog.text and "found loss nan, gradient norm nan" in caplog.text
    assert "| learning_rate=1e-3 | 2 |" in (tmp_path / "broken" / "perplexity.md").read_text()


def test_a_config_may_be_valid_only_with_the_varied_values(monkeypatch, flags, fake):
    arguments = ["--config.model.num_heads=3", "--config.model.position=alibi", "--config.model.d_ff=64"]
    arguments += ["--vary=model.d_model=33,48"]
    assert type_in(monkeypatch, *without(flags, "model.num_heads", "model.d_model"), *arguments) is None
    assert fake == ["d_model=33,seed=3", "d_model=48,seed=3"]


def test_the_first_seed_may_have_any_form_of_a_number(monkeypatch, flags, fake):
    assert type_in(monkeypatch, *without(flags, "seed"), "--config.seed=0x1_0", "--vary=model.d_ff=64") is None
    assert fake == ["d_ff=64,seed=16"]


def test_values_may_hold_commas_in_brackets():
    name, values = syntax.parse_vary("model.position=rope,('rope', 'none'),[rope,t5],alibi")
    assert (name, values) == ("model.position", ["rope", "('rope', 'none')", "[rope,t5]", "alibi"])
    with pytest.raises(UserError):
        syntax.parse_vary("nothing=1")


@pytest.mark.parametrize(
    "varied, names",
    [
        (["model.position=rope,alibi,none,t5"], "rope alibi none t5"),
        (["train.steps=15,30"], "steps=15 steps=30"),
        (["model.use_bias=True,false"], "use_bias=True use_bias=false"),
        (["model.random_positions=None,2048"], "random_positions=None random_positions=2048"),
        (["model.position=t5,('rope','none')"], "t5 position=('rope','none')"),
        (["model.position=rope", "model.num_layers=4"], "rope num_layers=4"),
        (["train.batch_size=8", "eval.batch_size=16"], "train.batch_size=8 eval.batch_size=16"),
        (
            ["model.position=rope,none", "rope.scaling=none"],
            "model.position=rope model.position=none rope.scaling=none",
        ),
    ],
)
def test_values_have_short_names_that_differ(varied, names):
    vary = {text.partition("=")[0]: syntax.VALUES.split(text.partition("=")[2]) for text in varied}
    assert " ".join(syntax.short_names(vary).values()) == names


def test_contrasts_take_short_and_full_names(monkeypatch):
    seen = []
    monkeypatch.setitem(study.ACTIONS, "run", lambda plan, workdir, flags: seen.append(plan))
    line = ["--config=configs/positions.py", "--vary=model.position=none,rope", "--vary=model.num_layers=4"]
    full = "model.position={},model.num_layers=4"
    for first, second in [("none,num_layers=4", "rope,num_layers=4"), ("none,4", "rope,4")]:
        assert type_in(monkeypatch, *line, f"--contrast={first}<{second}") is None
    assert type_in(monkeypatch, *line, f"--contrast={full.format('none')}<{full.format('rope')}") is None
    names = ["none,num_layers=4", "rope,num_layers=4"]
    assert [[run.name for run in plan.runs] for plan in seen] == [[f"{name},seed=0" for name in names]] * 3
    assert [str(plan.comparisons[0]) for plan in seen] == [" lower than ".join(names)] * 3


def test_the_default_directory_is_named_after_the_flags(monkeypatch):
    seen = []
    monkeypatch.setitem(study.ACTIONS, "run", lambda plan, directory, flags: seen.append(str(directory)))
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
    }
    typed = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "mini_gpt.sweep", "--config=configs/tasks.py:copy", "--suite=tasks", *typed]
    command += ["--vary=model.position=none,alibi", "--lengths=1x,2x", f"--workdir={tmp_path}/sweep"]
    alone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # one device
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[2 of 2 complete\] (none|alibi),seed=0", done.stderr)
    assert f"Report: {tmp_path}/sweep/report.html" in done.stdout
    assert "| none | 1 | 0." in (tmp_path / "sweep" / "tasks.md").read_text()

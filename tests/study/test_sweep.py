"""Sweeps: what flags mean, what cannot run and is refused before training, and one sweep from the shell."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mini_gpt.commands import study
from mini_gpt.data import corpora
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import new_runs, syntax
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.results import Results
from tests.commands import test_command_line as test_commands
from tests.conftest import REPOSITORY


def type_in(monkeypatch, *arguments):
    return test_commands.type_in(monkeypatch, "mini_gpt.sweep", *arguments)


def plan_of(overrides, conditions, **suites):
    return Plan("s", Study("", "configs/default.py", conditions, [3], suites or {"perplexity": {}}, (), overrides))


def test_results_of_another_config_or_text_are_refused(run, overrides, monkeypatch, tmp_path):
    run(64)
    wide = {"d_ff=64": {"model.d_ff": 64}}
    with pytest.raises(UserError, match=r"d_ff=64,seed=3 holds another run \(context_length was 32, is 16"):
        Results(plan_of(overrides | {"context_length": 16}, wide), tmp_path / "sweep")
    other = SimpleNamespace(name="text", fingerprint="another")
    monkeypatch.setattr(corpora, "open_corpus", lambda data: other)
    with pytest.raises(UserError, match=r"data\.corpus: found .*d_ff=64,seed=3 was trained on"):
        Results(plan_of(overrides, wide), tmp_path / "sweep")


BAD = [
    ([], r"--vary: give at least one"),
    (["--vary=model.position"], r"override: found 'model\.position'"),
    (["--vary=model.position=rope,"], r"--vary: found 'model\.position=rope,'"),
    (["--vary=model.position=rope,rope"], r"--vary: .* with different values"),
    (["--vary=seed=1,2"], r"--vary: found seed"),
    (["--vary=model.position=rope", "--vary=model.position=none"], r"--vary: found model\.position twice"),
    (["--vary=model.position=rope", "--seeds=0"], r"--seeds: found 0"),
    (["--vary=model.position=rope,roap"], r"model\.position: found 'roap'"),
    (["--vary=model.position=rope", "--lengths=1x"], r"--lengths is not supported by --suite=perplexity"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_a_bad_sweep_ends_in_one_line_and_writes_nothing(monkeypatch, flags, started, tmp_path, arguments, message):
    assert re.match(f"error: {message}", type_in(monkeypatch, *flags, *arguments))
    assert started == [] and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "fields, suites, message",
    [
        ({}, {"extrapolation": {"lengths": "1x,1000x"}}, r"--lengths: found 32000; the validation split"),
        ({"data.split_fractions": "(0.7,0.3,0)"}, {"perplexity": {"split": "test"}}, r"data\.split_fractions: found"),
        ({"context_length": 100000}, {}, r"data\.corpus: the train split has \d+ tokens; context_length=100000 needs"),
        ({"model.attention": "cudnn"}, {}, r"model\.attention: found 'cudnn', which needs NVIDIA GPUs"),
        ({"data.path": "nothing/*.txt"}, {}, r"data\.path: 'nothing/\*\.txt' matches no file"),
    ],
)
def test_no_run_starts_if_one_condition_is_wrong(overrides, tmp_path, fields, suites, message):
    shared = {name: value for name, value in overrides.items() if name not in fields}
    right = {name: overrides[name] for name in fields if name in overrides}
    plan = plan_of(shared, {"right": right, "wrong": fields} if not suites else {"wrong": fields}, **suites)
    with pytest.raises(UserError, match=f"^({message})"):
        new_runs.check(plan, tmp_path)


@pytest.fixture
def planned(monkeypatch):
    """Return a function from flags to the plan and the directory of a sweep, which does not run."""

    def plan(*arguments):
        seen = []
        monkeypatch.setitem(study.ACTIONS, "run", lambda *given: seen.extend(given))
        assert type_in(monkeypatch, *arguments) is None
        return seen[:2]

    return plan


def test_a_config_may_be_valid_only_with_the_varied_values(planned):
    shared = ["--config.model.num_heads=3", "--config.model.position=alibi"]
    plan, _ = planned("--config=configs/tiny.py", *shared, "--vary=model.d_model=33,48")
    assert [run.name for run in plan.runs] == ["d_model=33,seed=0", "d_model=48,seed=0"]


def test_the_first_seed_may_have_any_form_of_a_number(planned):
    plan, _ = planned("--config=configs/tiny.py", "--config.seed=0x1_0", "--vary=model.d_ff=64")
    assert [run.name for run in plan.runs] == ["d_ff=64,seed=16"]


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


def test_contrasts_take_short_and_full_names(planned):
    line = ["--config=configs/positions.py", "--vary=model.position=none,rope", "--vary=model.num_layers=4"]
    full = "model.position={},model.num_layers=4"
    short = [("none,num_layers=4", "rope,num_layers=4"), ("none,4", "rope,4")]
    for first, second in (*short, map(full.format, ("none", "rope"))):
        plan, _ = planned(*line, f"--contrast={first}<{second}")
        assert str(plan.comparisons[0]) == "none,num_layers=4 lower than rope,num_layers=4"


def test_the_default_directory_is_named_after_the_flags(planned):
    plain = ["--config=configs/positions.py", "--vary=model.position=none,rope", "--vary=model.num_layers=1,2"]
    _, workdir = planned(*plain, "--config.train.steps=5")
    assert str(workdir) == "runs/sweeps/positions,train.steps=5,model.position,model.num_layers"


@pytest.mark.slow
def test_a_sweep_over_tasks_from_the_shell(tmp_path):
    fields = {"train.steps": 3, "train.batch_size": 4, "optimizer.warmup_steps": 2, "model.num_layers": 1}
    fields |= {"mesh.data": 1, "model.d_model": 16, "eval.tokens": 64, "data.task_length": 4}
    typed = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "mini_gpt.sweep", "--config=configs/tasks.py:copy", "--suite=tasks", *typed]
    command += ["--vary=model.position=none,alibi", "--lengths=1x,2x", f"--workdir={tmp_path}/sweep"]
    alone = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # one device
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[2 of 2 complete\] (none|alibi),seed=0", done.stderr)
    assert f"Report: {tmp_path}/sweep/report.html" in done.stdout
    assert "| none | 1 | 0." in (tmp_path / "sweep" / "tasks.md").read_text()
    saved = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").glob("*/checkpoints/3")}
    done = subprocess.run([*command, "--lengths=1x"], cwd=REPOSITORY, capture_output=True, text=True, env=alone)
    assert done.returncode == 0 and "| 8 |" not in (tmp_path / "sweep" / "tasks.md").read_text(), done.stderr
    assert len(saved) == 2 and all(path.stat().st_mtime_ns == time for path, time in saved.items()), "only measured"

"""The ledger of a study, and the cores, accelerators and memory that its runs share."""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from mini_gpt.runtime import errors
from mini_gpt.runtime.errors import UserError
from mini_gpt.study import ledger, machine, processes
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.local import Local
from tests.commands.test_command_line import type_in
from tests.study.conftest import sweep

# The ledger of a study: freezing, changes after results, and damage.


def test_the_commit_of_a_repository_around_an_environment_is_not_recorded(monkeypatch, tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--message=theirs")
    (tmp_path / ".venv" / "site-packages").mkdir(parents=True)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    assert ledger.commit() == git("rev-parse", "HEAD")
    monkeypatch.setattr(processes, "ROOT", tmp_path / ".venv" / "site-packages")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.0")
    assert ledger.commit() == "mini-gpt 9.0"


TEXT = {"wide": "a" * 64, "narrow": "a" * 64}


@pytest.fixture
def study(overrides):
    conditions = {"wide": {"model.d_ff": 128}, "narrow": {"model.d_ff": 64}}
    contrasts = ["wide < narrow"]
    suites = {"perplexity": {}}
    return Study("Which?", "configs/default.py", conditions, range(6), suites, contrasts, overrides)


def test_a_frozen_plan_is_confirmatory_until_it_changes(study, tmp_path):
    plan = Plan("s", study)
    assert ledger.standing(tmp_path, plan) == "Exploratory: no plan was frozen before the first result."
    digest = ledger.freeze(tmp_path, plan, TEXT)
    (entry,) = ledger.entries(tmp_path)
    assert (entry["event"], entry["plan"], entry["content"]) == ("frozen", digest, plan.to_dict())
    assert ledger.standing(tmp_path, plan).startswith(
        f"Confirmatory: the plan was frozen on {entry['date']} at commit "
    )
    ledger.append(tmp_path, "run", plan, 0)
    changed = Plan("s", dataclasses.replace(study, smallest_effect=0.1))
    said = ledger.standing(tmp_path, changed)
    assert said.startswith("Exploratory: ") and said.endswith("and was changed later (smallest_effect).")


@pytest.mark.parametrize("seeds, contrasts, needed", [(5, 1, 6), (6, 1, None), (6, 2, 7), (3, 0, 6)])
def test_too_few_seeds_make_a_frozen_study_descriptive(study, tmp_path, seeds, contrasts, needed):
    chosen = ["wide < narrow", "narrow < wide"][:contrasts]
    plan = Plan("s", dataclasses.replace(study, seeds=range(seeds), contrasts=chosen))
    ledger.freeze(tmp_path, plan, TEXT)
    few = f"Descriptive: with {seeds} seeds no difference can be shown (at least {needed} are needed); the plan was"
    assert ledger.standing(tmp_path, plan).startswith("Confirmatory: the plan was" if needed is None else few)


def test_a_plan_can_be_frozen_again_only_before_the_first_result(study, tmp_path):
    plan = Plan("s", study)
    ledger.freeze(tmp_path, plan, TEXT)
    changed = Plan("s", dataclasses.replace(study, seeds=range(7)))
    ledger.freeze(tmp_path, changed, TEXT)
    assert ledger.standing(tmp_path, changed).startswith("Confirmatory: ")
    assert ledger.standing(tmp_path, plan).startswith("Exploratory: ")
    (tmp_path / "other,seed=0").mkdir()
    (tmp_path / "other,seed=0" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"^freeze: \S+ has the losses of other,seed=0; a plan is frozen before"):
        ledger.freeze(tmp_path, plan, TEXT)
    (tmp_path / "other,seed=0" / "metrics.jsonl").unlink()
    ledger.append(tmp_path, "changed", plan, 0)
    with pytest.raises(UserError, match=r"^freeze: \S+ was run on 20\S+; a plan is frozen before the first run$"):
        ledger.freeze(tmp_path, plan, TEXT)  # also if the results were deleted


def test_a_directory_holds_one_study(study, tmp_path):
    ledger.save(tmp_path, Plan("one", study))
    assert ledger.changes(tmp_path, Plan("one", study)) == []
    with pytest.raises(UserError, match=r"^--workdir: \S+ holds the study one; name a new directory for two$"):
        ledger.changes(tmp_path, Plan("two", study))


def test_a_damaged_ledger_is_one_line(study, tmp_path):
    ledger.freeze(tmp_path, Plan("s", study), TEXT)
    path = tmp_path / ledger.LEDGER
    path.write_text(path.read_text().replace("}", "}}"))
    with pytest.raises(UserError, match=r"ledger\.jsonl: damaged"):
        ledger.entries(tmp_path)


def test_half_a_line_of_a_killed_process_is_ignored(study, tmp_path):
    plan = Plan("s", study)
    ledger.freeze(tmp_path, plan, TEXT)
    path = tmp_path / ledger.LEDGER
    whole = path.read_text()
    path.write_text(whole + whole[:50])
    assert [entry["event"] for entry in ledger.entries(tmp_path)] == ["frozen"]
    ledger.append(tmp_path, "run", plan, 0)
    assert [entry["event"] for entry in ledger.entries(tmp_path)] == ["frozen", "run"]


def test_entries_of_several_processes_stay_whole(study, tmp_path, monkeypatch):
    """Threads stand for processes: each opens the file anew, and the lock belongs to the opened file."""
    plan = Plan("s", study)
    monkeypatch.setattr(ledger, "commit", lambda: "a" * 40)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ledger.append(tmp_path, "run", plan, number), range(100)))
    assert sorted(entry["results"] for entry in ledger.entries(tmp_path)) == list(range(100))


def test_the_text_of_a_frozen_plan_may_not_change(study, tmp_path):
    plan, other = Plan("s", study), TEXT | {"narrow": "b" * 64}
    ledger.check_corpora(tmp_path, plan, TEXT)
    ledger.freeze(tmp_path, plan, TEXT)
    ledger.check_corpora(tmp_path, plan, TEXT)
    with pytest.raises(UserError, match=r"^data: the text of narrow has the fingerprint bbbbbbbbbbbb; that of"):
        ledger.check_corpora(tmp_path, plan, other)
    ledger.check_corpora(tmp_path, Plan("s", dataclasses.replace(study, seeds=range(7))), other)  # exploratory anyway


def test_a_report_names_other_commits_that_started_runs(study, tmp_path, monkeypatch):
    plan = Plan("s", study)
    monkeypatch.setattr(ledger, "commit", lambda: "a" * 40)
    ledger.freeze(tmp_path, plan, TEXT)
    ledger.append(tmp_path, "run", plan, 0)
    assert "commits" not in ledger.standing(tmp_path, plan)
    monkeypatch.setattr(ledger, "commit", lambda: "b" * 40)
    ledger.append(tmp_path, "changed", plan, 1)
    assert ledger.standing(tmp_path, plan).endswith("Some runs were started at other commits: bbbbbbbbbbbb.")


def test_a_damaged_study_is_one_line(study, tmp_path):
    (tmp_path / ledger.STUDY).write_text("{")
    with pytest.raises(UserError, match=r"study\.json: damaged \(.*\); restore it from a backup, or delete it$"):
        ledger.changes(tmp_path, Plan("s", study))


FILE = """
def get_study():
    return {{
        "question": "Which?",
        "config": "configs/default.py",
        "conditions": {{"wide": {{"model.d_ff": 128}}, "narrow": {{"model.d_ff": 64}}}},
        "seeds": range({seeds}),
        "suites": {{"perplexity": {{}}}},
        "contrasts": ["wide < narrow"],
        "overrides": {overrides},
    }}
"""


def test_a_plan_that_changed_after_results_needs_consent(monkeypatch, fake, overrides, tmp_path, capsys):
    path, workdir = tmp_path / "sizes.py", tmp_path / "study"
    run = lambda action, *more: type_in(
        monkeypatch, "mini_gpt.commands.study", action, str(path), f"--workdir={workdir}", *more
    )
    path.write_text(FILE.format(seeds=1, overrides=overrides))
    assert run("freeze") is None
    assert "Warning: with 1 seeds, no difference can be shown." in capsys.readouterr().out
    assert run("run") is None and len(fake) == 2
    assert "Descriptive: with 1 seeds no difference can be shown" in (workdir / "report.md").read_text()
    path.write_text(FILE.format(seeds=2, overrides=overrides))
    said = run("run")
    assert said.startswith(
        f"error: study: the plan of {workdir} was changed after 2 runs were measured (seeds); restore"
    )
    assert len(fake) == 2
    assert run("report") is None
    assert "2 of 4 runs are complete, 0 failed, 2 missing" in capsys.readouterr().out
    assert "Exploratory: the plan was frozen" in (workdir / "report.md").read_text()
    assert run("run", "--changed") is None and len(fake) == 4
    assert [entry["event"] for entry in ledger.entries(workdir)] == ["frozen", "run", "changed"]
    assert ledger.entries(workdir)[-1]["fields"] == ["seeds"]
    assert "was changed later (seeds)" in (workdir / "report.md").read_text()
    assert run("freeze").startswith(f"error: freeze: {workdir} was run on")


def test_other_seeds_than_the_frozen_ones_are_refused_before_any_run(monkeypatch, fake, overrides, tmp_path):
    path, workdir = tmp_path / "sizes.py", tmp_path / "study"
    run = lambda *words: type_in(monkeypatch, "mini_gpt.commands.study", *words, str(path), f"--workdir={workdir}")
    path.write_text(FILE.format(seeds=6, overrides=overrides))
    assert run("freeze") is None
    path.write_text(FILE.format(seeds=[6, 7, 8, 9, 10, 11], overrides=overrides).replace("range(", "list("))
    said = f"error: study: the plan of {workdir} was changed after it was frozen (seeds, seed of wide, "
    assert run("run").startswith(said) and fake == []
    assert run("freeze") is None  # as a new plan, openly


# The cores, accelerators and memory that the runs of a study share.


@pytest.mark.slow
def test_each_process_has_its_own_cores(monkeypatch, flags, fake, tmp_path):
    """One of two jobs waits, so all others run in the second slot."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    half = len(cores) // 2
    assert [slot.cores for slot in machine.slots(2)] == [cores[:half], cores[half : 2 * half]]
    assert [slot.environment["OMP_NUM_THREADS"] for slot in machine.slots()] == ["1"] * len(cores)
    assert machine.slots(1)[0].cores is None
    assert sweep(monkeypatch, flags, "64,96", "--seeds=2", "--jobs=2") is None
    seen = [json.loads(path.read_text())["cores"] for path in (tmp_path / "sweep").glob("*/eval/perplexity.json")]
    assert len(seen) == 4 and all(found in (cores[:half], cores[half : 2 * half]) for found in seen)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    for quota, jobs in [("max 100000", len(cores)), ("100000 100000", 1), ("20000 100000", 1)]:
        (tmp_path / "cpu.max").write_text(quota)
        assert len(machine.slots()) == jobs
    assert [slot.cores for slot in machine.slots(2)] == [None, None]  # other containers may use the same cores


def test_runs_of_other_processes_have_other_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.devices, "cores", lambda: [2, 3, 5])
    monkeypatch.setattr(machine.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    with machine.own_cores(1) as one, machine.own_cores(2) as two, machine.own_cores(2) as more:
        assert [one.cores, two.cores, more.cores] == [[2], [3, 5], [2, 3]]  # too many runs share cores
        assert two.environment["OMP_NUM_THREADS"] == "2"
    (tmp_path / "cpu.max").write_text("200000 100000")
    with machine.own_cores(1) as slot:
        assert slot.cores is None  # other containers may use the same cores


def test_gpus_and_tpus_are_shared_by_the_jobs(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    visible = lambda jobs: [slot.environment.get("CUDA_VISIBLE_DEVICES") for slot in machine.slots(jobs)]
    monkeypatch.setattr(machine, "_accelerators", lambda: ("cuda", 4))
    assert visible(None) == ["0", "1", "2", "3"] and visible(2) == ["0,1", "2,3"] and visible(1) == [None]
    assert [slot.accelerators for slot in machine.slots(2)] == [2, 2]
    monkeypatch.setattr(machine, "_accelerators", lambda: ("tpu", 8))
    assert len(machine.slots()) == 1
    with pytest.raises(errors.UserError, match=r"^--jobs: found 2; must be in 1..1, since all chips"):
        machine.slots(2)


@pytest.mark.slow
def test_new_runs_on_accelerators_are_checked_in_a_process(monkeypatch, flags, fake):
    slot = machine.Slot(None, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, accelerators=1)
    monkeypatch.setattr(machine, "slots", lambda _: [slot])
    assert sweep(monkeypatch, flags, "64").startswith(
        "error: mesh: found data × fsdp × tensor = 1 × 1 × 1, and this job has 3 devices"
    )
    assert not fake


def test_a_device_that_cannot_start_is_one_line(monkeypatch):
    monkeypatch.setattr(machine.devices, "PLUGINS", {"jax": "GPU"})
    monkeypatch.setattr(machine, "ASK", "raise RuntimeError('the GPU is busy')")
    with pytest.raises(errors.UserError, match=r"^JAX can't start on the devices .*the GPU is busy\); JAX_PLAT"):
        machine.slots()


def test_too_many_jobs_are_refused(monkeypatch, flags, fake, tmp_path):
    for jobs in (0, 10_000):
        assert sweep(monkeypatch, flags, "64", f"--jobs={jobs}").startswith(
            f"error: --jobs: found {jobs}; must be in 1.."
        )
    assert not (tmp_path / "sweep").exists()


def test_the_memory_of_a_container_is_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.memory_left() > 5000, "without the used bytes, the limit says nothing"
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1500\ninactive_file 1100\nactive_file 400\n")
    assert machine.memory_left() == 5000 - 3000 + 1100
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_left() > 5000


def test_runs_start_while_there_is_memory(monkeypatch):
    """One run always starts. Until a run was measured, each is expected to grow to 1 GiB, with a fifth to spare."""
    engine, small = Local(None, []), SimpleNamespace(resident=0)
    monkeypatch.setattr(machine, "memory_left", lambda: 2**20)
    assert engine._has_memory([]) and not engine._has_memory([small])
    monkeypatch.setattr(machine, "memory_left", lambda: 3 * 2**30)
    assert engine._has_memory([small]) and not engine._has_memory([small, small])
    engine.is_measured, engine.largest = True, 2**28
    assert engine._has_memory([small] * 10) and not engine._has_memory([small] * 11)

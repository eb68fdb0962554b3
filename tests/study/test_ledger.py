"""The ledger of a study: freezing, changes after results, and damage."""

import dataclasses
import importlib.metadata
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_gpt.runtime.errors import UserError
from mini_gpt.study import ledger, processes
from mini_gpt.study.definition import Plan, Study
from tests.commands.test_command_line import type_in


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

"""Fixtures of the tests of studies: a sweep over small models, whose runs a fake worker does."""

import pytest

from mini_gpt.config import loading
from mini_gpt.data import corpora
from mini_gpt.study import machine, processes, runner
from mini_gpt.study.definition import Plan, Study
from mini_gpt.study.local import Local
from mini_gpt.study.machine import Slot
from mini_gpt.study.results import Results
from mini_gpt.study.runner import Display, Job
from tests.commands.test_command_line import type_in
from tests.conftest import SMALL


def sweep(monkeypatch, flags, widths, *more):
    """Run a sweep over model.d_ff in this process. Return None, or the error line."""
    return type_in(monkeypatch, "mini_gpt.sweep", *flags, f"--vary=model.d_ff={widths}", *more)


@pytest.fixture
def flags(corpus_files, tmp_path):
    """Return the flags of a sweep over small models, into tmp_path/sweep."""
    fields = SMALL | {"data.path": corpus_files, "train.steps": 4, "seed": 3}
    typed = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/default.py", f"--workdir={tmp_path}/sweep", *typed]


@pytest.fixture
def started(monkeypatch):
    """Return a list that collects the names of the started runs, in order."""
    start, names = processes.start, []

    def watched(module, content, slot, **streams):
        names.append(content["workdir"].rpartition("/")[2])
        return start(module, content, slot, **streams)

    monkeypatch.setattr(processes, "start", watched)
    return names


@pytest.fixture
def fake(monkeypatch, small, started, caplog):
    """Let runs be done by tests/study/fake_worker.py. Return the list of the started runs."""
    caplog.set_level("INFO", "mini_gpt")
    fingerprint = corpora.open_corpus(small().data).fingerprint
    monkeypatch.setenv("FINGERPRINT", fingerprint)
    monkeypatch.setattr(processes, "WORKER", "tests.study.fake_worker")
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(machine, "memory_left", lambda: 2**40)
    return started


@pytest.fixture
def run(fake, overrides, tmp_path):
    """Return a function that lets a Runner do the missing runs of some widths, without a command and a report.

    It returns {name: job} of these runs.
    """

    def run(*widths, seeds=1, slots=2):
        conditions = {f"d_ff={width}": {"model.d_ff": width} for width in widths}
        study = Study("", "configs/default.py", conditions, range(3, 3 + seeds), {"perplexity": {}}, (), overrides)
        found = Results(Plan("sweep", study), tmp_path / "sweep")
        jobs = [Job(each, found.workdir / each.name) for each in found.plan.runs if found.missing(each)]
        engine = Local(found, [Slot(None, {}) for _ in range(slots)])
        runner.Runner(found, jobs, engine).run(Display(len(found.plan.runs)))
        return {job.run.name: job for job in jobs}

    return run


@pytest.fixture
def overrides(corpus_files):
    """Return the fields of a small config, as a study has them."""
    fields = SMALL | {"data.path": corpus_files, "train.steps": 4}
    loading.load("configs/default.py", fields)
    return fields

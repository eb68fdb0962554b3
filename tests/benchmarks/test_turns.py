"""benchmarks/turns.py: processes that measure in turns."""

import sys

import pytest

from benchmarks import turns
from mini_gpt.runtime.errors import UserError
from tests.conftest import REPOSITORY

SERVE = """
from benchmarks import turns
counts = []
{}
finish = lambda: {{"n": len(counts), "peak": turns.peak_resident_bytes()}}
turns.serve({{"start": 0}}, lambda: counts.append(1) or {}, finish)
"""


def worker(name, measured, before=""):
    return turns.Worker(name, [sys.executable, "-c", SERVE.format(before, measured)], REPOSITORY)


def test_a_worker_measures_when_it_is_asked():
    with worker("x", "len(counts) + 0.5", "print('noise')") as asked:
        assert asked.about == {"start": 0}
        assert [asked.measure(), asked.measure()] == [1.5, 2.5]
        assert asked.finish()["n"] == 2


def test_a_worker_that_ends_says_why(capfd):
    with pytest.raises(UserError, match="x: ZeroDivisionError: division by zero"):
        worker("x", "1", "1 / 0")
    with worker("y", "1 / 0") as ended, pytest.raises(UserError, match="y: ZeroDivisionError: division by zero"):
        ended.measure()
    with pytest.raises(UserError, match="z: ended by SIGABRT"):
        worker("z", "1", "import os; os.abort()")
    assert capfd.readouterr().err.count("Traceback") == 2, "what it wrote is shown once"


def test_workers_alternate_and_change_their_order(monkeypatch):
    asked, measure = [], turns.Worker.measure
    monkeypatch.setattr(turns.Worker, "measure", lambda worker: asked.append(worker.name) or measure(worker))
    with worker("a", "len(counts)") as a, worker("b", "10 * len(counts)") as b:
        assert turns.alternate({"a": a, "b": b}, 3) == {"a": [1, 2, 3], "b": [10, 20, 30]}
    assert asked == ["a", "b", "b", "a", "a", "b"] and a.process.returncode is not None
